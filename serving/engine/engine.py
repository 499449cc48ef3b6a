"""The loop: turn after turn, every model with work has one round.

    speak() ─> inbox ─> the model's queue ─> admit, launch, collect late, render, deliver (model_worker.py)
     any thread         engine's thread, one turn after another

Requests come and go through an inbox, so the loop owns everything else and needs no locks. A launch's report
is read after the next launch is under way (`report_lag`), so the device never waits for the host, and
samples when they are there. On a CPU, where a launch returns when it is done, both are read at once.

All models live on one arena of pages. Who gets in, in what order:
- Slots are each model's own: a model whose slots are all taken holds up nobody but those who wait for it.
- Pages are everyone's: of the requests whose model has a free slot the one that came first goes first, and if it lacks pages, nobody,
  of whatever model, takes any before it. Those who hold pages end, so it gets them: nobody is overtaken for ever.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from compile_cache import threads, unfinished
from compile_cache.counts import counts
from serving.engine import warmup
from serving.engine.job import Audio, Event, Failed, Finished, Job, Text
from serving.engine.memory_plan import usual_kv_bytes
from serving.engine.model_worker import ModelWorker
from serving.engine.pages import Pages
from serving.engine.runner import Arena
from zoo.contract import Family, Prompt, Request, RequestError

__all__ = ["Audio", "Engine", "Event", "Failed", "Finished", "Full", "Text"]


STOPPED = "the engine stopped while it worked on this request"
CODECS = ("float32", "tf32")
INTERNAL = "an error in the engine; its log says more"

log = structlog.get_logger()


class Full(Exception):
    """No room to wait: try again in `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float):
        super().__init__(f"{why}; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Engine:
    """Families by name, or just one, each with `max_slots` slots and `max_waiting` places in its queue, and
    one arena for them all.

    kv_bytes None: for each room for 1,024 positions a slot, and for one request of the model's longest. codec: in
    which precision a GPU renders, "tf32" or "float32".
    Raises ValueError for settings that leave no room.
    """

    def __init__(
        self,
        families: Family[Any] | Mapping[str, Family[Any]],
        *,
        max_slots: int = 8,
        kv_bytes: int | None = None,
        policy: str = "streaming",
        max_waiting: int = 256,
        compile: bool = True,
        report_lag: int | None = None,
        is_deterministic: bool = False,
        codec: str = "float32",
        clock: Callable[[], float] = time.monotonic,
    ):
        named = {families.spec.family: families} if isinstance(families, Family) else dict(families)
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r} is no precision; possible: {', '.join(CODECS)}")
        device = next(iter(named.values())).device
        if device.type == "meta":
            raise ValueError("a model on device meta has shapes and no values: it cannot speak")
        if codec == "tf32" and device.type != "cuda":
            raise ValueError(
                f"codec tf32 is arithmetic of a GPU, and the model is on {device.type}: use float32"
            )
        if max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; at least 1 is needed")
        if kv_bytes is None:
            kv_bytes = sum(usual_kv_bytes(family, max_slots) for family in named.values())
        self.arena = Arena(list(named.values()), kv_bytes)
        self.pages = Pages(self.arena.num_pages, self.arena.num_scratch)
        report_lag = report_lag if report_lag is not None else int(self.arena.device.type == "cuda")
        self.models = {
            name: ModelWorker(
                family,
                self.arena,
                self.pages,
                num_slots=max_slots,
                policy=policy,
                compile=compile,
                report_lag=report_lag,
                clock=clock,
                is_deterministic=is_deterministic,
                codec=codec,
            )
            for name, family in named.items()
        }
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(
                self.arena.device
            )  # weights and states were made on a stream of none of ours
        self.max_waiting, self.clock = max_waiting, clock

        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._cancelled: set[str] = set()
        self._fed: deque[tuple[str, list[int], bool]] = deque()
        self._composed: deque[tuple[Job, Future[Prompt]]] = deque()  # next passes
        self._composer = ThreadPoolExecutor(1, "compose", threads.use_one_thread)
        self._is_stopping = False
        self.num_turns, self.turn_s = 0, 0.0
        self._is_over = False
        self._arrivals = itertools.count()
        self._known: dict[str, Job] = {}  # everything taken and not yet ended
        self._warm_graphs: int | None = None  # what the process had compiled by then

    # any thread

    def warm(
        self,
        progress: Callable[[float, str], None],
        begin: Callable[[Family[Any]], object] = lambda family: None,
    ) -> None:
        """Compile and record everything, one model after the other, each after `begin`; call before `run`."""
        for i, (name, model) in enumerate(self.models.items()):
            whose = f"{name}: " if len(self.models) > 1 else ""

            def tell(fraction: float, stage: str, i: int = i, whose: str = whose) -> None:
                progress((i + fraction) / len(self.models), whose + stage)

            begin(model.family)
            warmup.warm(model.runner, tell)
        unfinished.settle()
        self._warm_graphs = counts().graphs

    def speak(
        self,
        request_id: str,
        request: Request,
        deliver: Callable[[Event], None],
        model: str | None = None,
        is_pinned: bool = False,
    ) -> None:
        """Take a request for a model, which need not be named where there is but one; `deliver` is called on
        the engine's thread.
        is_pinned: its windows follow from frame numbers alone, so equal requests give equal bytes. Raises
        RequestError, Full."""
        worker = self._worker(model)
        with self._wake:
            self._refuse_if_full(request_id, worker)
        passes = worker.family.prompts(request)
        with self.arena.streams.prompts.here():
            prompt = next(passes)
        self._check_room(worker, prompt)
        is_made = self.arena.streams.prompts.mark()
        with self._wake:
            self._refuse_if_full(request_id, worker)
            self._inbox.append(Job(request_id, worker, prompt, passes, deliver, is_pinned, is_made))
            self._wake.notify()

    def feed(self, request_id: str, tokens: Sequence[int], is_last: bool = False) -> None:
        """More text, as the model's tokens, for a request that is open. Unknown and ended requests are no
        error."""
        with self._wake:
            self._fed.append((request_id, list(tokens), is_last))
            self._wake.notify()

    def _check_room(self, worker: ModelWorker, prompt: Prompt) -> None:
        """Raises RequestError for a pass that can never have its positions or its pages."""
        prompt.check_room(worker.family.spec)
        needed, there = worker.num_pages(prompt), self.pages.num_pages
        if needed > there:
            positions = sum(len(lane.inputs) for lane in prompt.lanes)
            takes = f"{positions} prompt positions and {prompt.max_frames} frames need {needed} pages of KV memory"
            instead = "ask for fewer frames, or serve with more KV memory"
            raise RequestError("max_frames", f"{takes}; this server has {there}: {instead}")

    def cancel(self, request_id: str) -> None:
        """Let go of a request at the next turn, wherever it is. Unknown and ended ones are no error."""
        with self._wake:
            self._cancelled.add(request_id)
            self._wake.notify()

    def stop(self) -> None:
        """End `run`; requests under way fail: nobody asked for their end."""
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
            "compiles_after_warmup": 0 if self._warm_graphs is None else counts().graphs - self._warm_graphs,
            "turns": self.num_turns,
            "turn_s": self.turn_s,
            "resident_bytes": resident_bytes(),
            "models": {name: model.stats(arriving[model]) for name, model in self.models.items()},
        }

    # the engine's thread

    def run(self) -> None:
        """Turn after turn until `stop`. If a turn raises, every request fails, and the error goes on to the
        caller."""
        try:
            while not self._is_stopping:
                if not self.turn():
                    with self._wake:
                        self._wake.wait_for(lambda: self._has_news or self._is_stopping)
            self._end_all(Failed(STOPPED, code="engine_stopped"))
        except BaseException as error:
            self._end_all(Failed(f"the engine stopped: {error}"))
            raise
        finally:
            self._composer.shutdown(wait=False, cancel_futures=True)

    def turn(self) -> bool:
        """One round of every model that has work. -> whether there is more to do before any news."""
        began_s = self.clock()
        self._take_news()
        self._admit()
        # all launch before any is waited for
        rounds = [(model, model.launch()) for model in self.models.values() if model.has_work]
        is_alone = not any(launched for _, launched in rounds)
        for model, launched in rounds:
            model.collect(launched, is_alone)
        finished = [job for model, _ in rounds for job in model.finished() if not job.is_composing]
        for job in finished:
            self._finish_pass(job)
        if rounds:
            self.num_turns += 1
            self.turn_s += self.clock() - began_s
        return bool(finished) or any(not model.is_idle for model in self.models.values())

    @property
    def num_requests(self) -> int:
        """Taken and not yet ended."""
        return len(self._known) + len(self._inbox)

    @property
    def _has_news(self) -> bool:
        return bool(self._inbox or self._cancelled or self._fed or self._composed)

    def _finish_pass(self, job: Job) -> None:
        """The listener has all of it: the answer ends, or its next pass is made ready beside the loop, and
        until then its slot is kept."""
        if job.model.family.spec.shares_turns:
            job.model.publish_turn(job)
        if job.prompt.is_final:
            return self._release(job, job.spoken())
        frames = job.model.tape(job)
        job.is_composing = True
        future = self._composer.submit(self._next_prompt, job, frames)
        future.add_done_callback(lambda future: self._compose_done(job, future))

    def _next_prompt(self, job: Job, frames: Tensor) -> Prompt:
        """Beside the loop. Raises RequestError."""
        with self.arena.streams.prompts.here():
            prompt = job.passes.send(frames)
        self._check_room(job.model, prompt)
        job.is_made = self.arena.streams.prompts.mark()
        return prompt

    def _compose_done(self, job: Job, future: Future[Prompt]) -> None:
        with self._wake:
            self._composed.append((job, future))
            self._wake.notify()

    def _worker(self, name: str | None) -> ModelWorker:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise RequestError(
                "model", f"model {name!r} is not served here; there is: {', '.join(self.models)}"
            )
        return self.models[name]

    def _refuse_if_full(self, request_id: str, model: ModelWorker) -> None:
        if self._is_over:
            raise Full("the engine has stopped", retry_after_s=5.0)
        if request_id in self._known or any(job.id == request_id for job in self._inbox):
            raise ValueError(
                f"request {request_id!r} is under way already; every request needs an id of its own"
            )
        waiting = len(model.waiting) + sum(job.model is model for job in self._inbox)
        if waiting >= self.max_waiting:
            raise Full(f"{waiting} requests are waiting already", retry_after_s=1.0)

    def _take_news(self) -> None:
        with self._wake:
            arrived, cancelled = list(self._inbox), set(self._cancelled)
            fed, composed = list(self._fed), list(self._composed)
            for news in (self._inbox, self._cancelled, self._fed, self._composed):
                news.clear()
        for job in arrived:
            job.arrival = next(self._arrivals)
            self._known[job.id] = job
            job.queued_s = self.clock()
            job.model.waiting.append(job)
        for job, future in composed:
            self._queue_pass(job, future)
        for id, tokens, is_last in fed:
            self._feed(id, tokens, is_last)
        for id in cancelled & self._known.keys():
            job = self._known[id]
            self._release(job, job.cancelled())

    def _queue_pass(self, job: Job, future: Future[Prompt]) -> None:
        """A next pass is ready: its request came before those that wait."""
        if self._known.get(job.id) is not job or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            if not isinstance(error, RequestError):
                log.error("unexpected", id=job.id, exc_info=error)
            return self._release(job, Failed(str(error) if isinstance(error, RequestError) else INTERNAL))
        job.model.release(job)
        job.next_pass(future.result())
        job.queued_s = self.clock()
        job.model.waiting.appendleft(job)

    def _feed(self, id: str, tokens: list[int], is_last: bool) -> None:
        job = self._known.get(id)
        if job is None:
            return
        if job.slot < 0:
            job.unfed.append((tokens, is_last))
            return
        try:
            job.model.feed(job, tokens, is_last)
        except RequestError as error:
            self._release(job, Failed(str(error)))

    def _admit(self) -> None:
        """First come, first served, of those whose model has a slot for them; who lacks pages lets nobody
        by."""
        while able := [model for model in self.models.values() if model.waiting and model.free_slots]:
            model = min(able, key=lambda model: model.waiting[0].arrival)
            job = model.waiting[0]
            if not model.admit():
                return
            unfed, job.unfed = job.unfed, []
            for tokens, is_last in unfed:
                self._feed(job.id, tokens, is_last)

    def _release(self, job: Job, last: Event) -> None:
        del self._known[job.id]
        job.model.release(job)
        job.deliver(last)

    def _end_all(self, last: Failed) -> None:
        with self._wake:
            self._is_over = True
            late = list(self._inbox)
            self._inbox.clear()
        for job in tuple(self._known.values()):
            self._release(job, last)
        for job in late:
            job.deliver(last)


def resident_bytes() -> int:
    """Of this process; 0 where the system does not tell."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
