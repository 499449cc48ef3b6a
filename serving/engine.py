"""The loop: turn after turn, every model with work has one round.

    speak() ─> inbox ─> the model's line ─> admit, launch, collect late, render, deliver (resident.py)
     any thread         engine's thread, one turn after another

Requests come and go through an inbox, so the loop owns everything else and needs no locks. A launch's report is read after the next
launch is under way (`lag`), so the device never waits for the host. On a CPU, where a launch returns when it is done, it is read at once.

All models live on one arena of pages. Who gets in, in what order:
- Slots are each model's own: a model whose slots are all taken holds up nobody but those who wait for it.
- Pages are everyone's: of the requests whose model has a free slot the one that came first goes first, and if it lacks pages, nobody,
  of whatever model, takes any before it. Those who hold pages end, so it gets them: nobody is overtaken for ever.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from compile_cache.counts import counts
from serving.pages import Pages
from serving.resident import Audio, Event, Failed, Finished, Job, Resident, Text
from serving.runner import PAGE_TOKENS, Arena, token_bytes
from zoo.contract import Family, Request, refuse

__all__ = ["Audio", "Engine", "Event", "Failed", "Finished", "Full", "Text"]


class Full(Exception):
    """No room to wait: try again in `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float):
        super().__init__(f"{why}; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Engine:
    """Families by name, or just one, each with `max_slots` slots and `max_waiting` places in its line, and one arena for them all.

    kv_bytes None: for each room for 1,024 positions a slot, and for one request of the model's longest. Raises ValueError for settings
    that leave no room.
    """

    def __init__(
        self,
        families: Family | Mapping[str, Family],
        *,
        max_slots: int = 8,
        kv_bytes: int | None = None,
        policy: str = "streaming",
        max_waiting: int = 256,
        compile: bool = True,
        lag: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; at least 1 is needed")
        named = {families.spec.family: families} if isinstance(families, Family) else dict(families)
        if kv_bytes is None:
            kv_bytes = sum(usual_kv_bytes(family, max_slots) for family in named.values())
        self.arena = Arena(list(named.values()), kv_bytes)
        self.pages = Pages(self.arena.num_pages, self.arena.num_scratch)
        lag = lag if lag is not None else int(self.arena.device.type == "cuda")
        self.models = {
            name: Resident(family, self.arena, self.pages, num_slots=max_slots, policy=policy, compile=compile, lag=lag, clock=clock)
            for name, family in named.items()
        }
        self.max_waiting, self.clock = max_waiting, clock

        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._cancelled: set[str] = set()
        self._is_stopping = False
        self._is_over = False
        self._tickets = itertools.count()
        self._known: dict[str, Job] = {}  # everything taken and not yet ended
        self._warm_graphs: int | None = None  # what the process had compiled by then

    # any thread

    def warm(self, progress: Callable[[float, str], None], begin: Callable[[Family], object] = lambda family: None) -> None:
        """Compile and record everything, one model after the other, each after `begin`; call before `run`."""
        for i, (name, model) in enumerate(self.models.items()):
            whose = f"{name}: " if len(self.models) > 1 else ""

            def tell(fraction: float, stage: str, i: int = i, whose: str = whose) -> None:
                progress((i + fraction) / len(self.models), whose + stage)

            begin(model.family)
            model.runner.warm(tell)
        self._warm_graphs = counts().graphs

    def speak(self, request_id: str, request: Request, deliver: Callable[[Event], None], model: str | None = None) -> None:
        """Take a request for a model, which need not be named where there is but one; `deliver` is called on the engine's thread.
        Raises ValueError (with `.param` where a field is to blame), Full."""
        resident = self._resident(model)
        with self._wake:
            self._refuse_if_full(request_id, resident)
        prompt = resident.family.prompt(request)
        needed, there = resident.num_pages(prompt), self.pages.num_pages
        if needed > there:
            positions = sum(len(lane.inputs) for lane in prompt.lanes)
            raise ValueError(
                f"{positions} prompt positions and {prompt.max_frames} frames need {needed} pages of KV memory; this server has "
                f"{there}: ask for fewer frames, or serve with more KV memory"
            )
        with self._wake:
            self._refuse_if_full(request_id, resident)
            self._inbox.append(Job(request_id, resident, prompt, deliver))
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Let go of a request at the next turn, wherever it is. Unknown and ended ones are no error."""
        with self._wake:
            self._cancelled.add(request_id)
            self._wake.notify()

    def stop(self) -> None:
        """End `run`; requests under way end as cancelled."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def stats(self) -> dict[str, Any]:
        """Of the arena, and of each model by name."""
        with self._wake:
            arriving = Counter(job.model for job in self._inbox)
        return {
            "pages": self.pages.num_pages,
            "pages_free": self.pages.free,
            "pages_shared": self.pages.shared,
            "pages_evicted": self.pages.evicted,
            "late_compiles": 0 if self._warm_graphs is None else counts().graphs - self._warm_graphs,
            "models": {name: model.stats(arriving[model]) for name, model in self.models.items()},
        }

    # the engine's thread

    def run(self) -> None:
        """Turn after turn until `stop`. If a turn raises, every request fails, and the error goes on to the caller."""
        try:
            while not self._is_stopping:
                if not self.turn():
                    with self._wake:
                        self._wake.wait_for(lambda: self._inbox or self._cancelled or self._is_stopping)
            self._end_all(lambda job: job.cancelled())
        except BaseException as error:
            self._end_all(lambda job, text=f"the engine stopped: {error}": Failed(text))  # type: ignore[misc]
            raise

    def turn(self) -> bool:
        """One round of every model that has work. -> whether there was anything to do."""
        self._take_inbox()
        self._admit()
        rounds = [(model, model.launch()) for model in self.models.values() if model.has_work]  # all launch before any is waited for
        for model, launched in rounds:
            model.take_in(launched)
        for model, _ in rounds:
            for job in model.finished():
                self._leave(job, job.spoken())
        return bool(self._known)

    def _resident(self, name: str | None) -> Resident:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise refuse("model", f"model {name!r} is not served here; there is: {', '.join(self.models)}")
        return self.models[name]

    def _refuse_if_full(self, request_id: str, model: Resident) -> None:
        if self._is_over:
            raise Full("the engine has stopped", retry_after_s=5.0)
        if request_id in self._known or any(job.id == request_id for job in self._inbox):
            raise ValueError(f"request {request_id!r} is under way already; every request needs an id of its own")
        waiting = len(model.waiting) + sum(job.model is model for job in self._inbox)
        if waiting >= self.max_waiting:
            raise Full(f"{waiting} requests are waiting already", retry_after_s=1.0)

    def _take_inbox(self) -> None:
        with self._wake:
            arrived, cancelled = list(self._inbox), set(self._cancelled)
            self._inbox.clear()
            self._cancelled.clear()
        for job in arrived:
            job.ticket = next(self._tickets)
            self._known[job.id] = job
            job.model.waiting.append(job)
        for id in cancelled & self._known.keys():
            job = self._known[id]
            self._leave(job, job.cancelled())

    def _admit(self) -> None:
        """First come, first served, of those whose model has a slot for them; who lacks pages lets nobody by."""
        while able := [model for model in self.models.values() if model.waiting and model.free_slots]:
            if not min(able, key=lambda model: model.waiting[0].ticket).admit():
                return

    def _leave(self, job: Job, last: Event) -> None:
        del self._known[job.id]
        job.model.leave(job)
        job.deliver(last)

    def _end_all(self, event: Callable[[Job], Event]) -> None:
        with self._wake:
            self._is_over = True
            late = list(self._inbox)
            self._inbox.clear()
        for job in tuple(self._known.values()):
            self._leave(job, event(job))
        for job in late:
            job.deliver(event(job))


def usual_kv_bytes(family: Family, max_slots: int) -> int:
    """Room for 1,024 positions a slot, and for one request of the model's longest."""
    tokens = max(1024 * max_slots, family.spec.max_frames + 1024) + 2 * PAGE_TOKENS
    return family.spec.lanes * tokens * token_bytes(family)
