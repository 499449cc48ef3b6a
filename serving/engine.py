"""The loop: admit, launch, collect late, render, deliver.

    speak() ─> inbox ─> waiting ─admit─> slot ─launch─> prefill, step, step, ... ─collect─> frames ready ─render─> samples ─deliver─> client
     any thread            engine's thread, one turn after another

Requests come and go through an inbox, so the loop owns everything else and needs no locks. A launch's report is read after the next
launch is under way (`lag`), so the device never waits for the host. On a CPU, where a launch returns when it is done, it is read at once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.pages import Pages
from serving.runner import PAGE_TOKENS, Pending, Runner
from serving.scheduler import Policy, Render, Scheduler
from zoo.contract import Family, Prompt, Request

_salts = itertools.count(1)  # one per loaded model: equal keys under other weights are other pages


@dataclass(frozen=True)
class Audio:
    """samples [N] float32; `frames` frames of the tape."""

    samples: np.ndarray
    frames: int


@dataclass(frozen=True)
class Finished:
    """reason: "stop" (the model ended), "length" (the cap) or "cancelled". No event follows."""

    reason: str
    frames: int
    usage: dict[str, int]


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on with this request. No event follows."""

    message: str


Event = Audio | Finished | Failed


class Full(Exception):
    """No room to wait: try again in `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float):
        super().__init__(f"{why}; try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


@dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    id: str
    prompt: Prompt
    deliver: Callable[[Event], None]
    slot: int = -1
    pages: list[int] = field(default_factory=list)


class Engine:
    """One family, its slots and its pages.

    kv_bytes None: room for 1,024 positions a slot, and for one request of the model's longest. Raises ValueError for settings that
    leave no room.
    """

    def __init__(
        self,
        family: Family,
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
        spec = family.spec
        if kv_bytes is None:
            tokens = max(1024 * max_slots, spec.max_frames + 1024) + 2 * PAGE_TOKENS
            kv_bytes = tokens * spec.kv.token_bytes(family.dtype)
        self.family, self.max_waiting, self.clock = family, max_waiting, clock
        self.runner = Runner(family, max_slots, kv_bytes, compile)
        self.pages = Pages(self.runner.arena.num_pages)
        self.scheduler = Scheduler(max_slots, Policy.named(policy), spec.window.new, spec.frame_samples / spec.sample_rate_hz)
        self.lag = lag if lag is not None else int(family.device.type == "cuda")
        self.salt = next(_salts)

        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._cancelled: set[str] = set()
        self._is_stopping = False
        self._is_over = False

        self._known: dict[str, Job] = {}  # everything taken and not yet ended
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by slot
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._tenancy = np.zeros(max_slots, np.int64)  # grows when a slot changes hands, so that late reports find their own request
        self._launches: deque[tuple[np.ndarray, np.ndarray, Pending]] = deque()
        self._renders: deque[tuple[Render, np.ndarray, Pending]] = deque()
        self._frames = spec.frame_samples

    # any thread

    def warm(self, progress: Callable[[float, str], None]) -> None:
        """Compile and record everything; call before `run`."""
        self.runner.warm(progress)

    def speak(self, request_id: str, request: Request, deliver: Callable[[Event], None]) -> None:
        """Take a request; `deliver` is called on the engine's thread. Raises ValueError (with `.param` where a field is to blame), Full."""
        with self._wake:
            self._refuse_if_full(request_id)
        prompt = self.family.prompt(request)
        needed, there = self._num_pages(prompt), self.runner.arena.num_pages - 1
        if needed > there:
            raise ValueError(
                f"{len(prompt.inputs)} prompt positions and {prompt.max_frames} frames need {needed} pages of KV memory; this server has "
                f"{there}: ask for fewer frames, or serve with more KV memory"
            )
        with self._wake:
            self._refuse_if_full(request_id)
            self._inbox.append(Job(request_id, prompt, deliver))
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
        runner, pages = self.runner, self.pages
        return {
            "slots": runner.num_slots,
            "running": len(self._running),
            "waiting": len(self._waiting) + len(self._inbox),
            "pages": runner.arena.num_pages - 1,
            "pages_free": pages.free,
            "pages_shared": pages.shared,
            "pages_evicted": pages.evicted,
            "underruns": self.scheduler.underruns,
            "graph_misses": runner.graphs.misses,
        }

    # the engine's thread

    def run(self) -> None:
        """Turn after turn until `stop`. If a turn raises, every request fails, and the error goes on to the caller."""
        try:
            while not self._is_stopping:
                if not self.turn():
                    with self._wake:
                        self._wake.wait_for(lambda: self._inbox or self._cancelled or self._is_stopping)
            self._end_all(lambda job: Finished("cancelled", self._num_frames(job), job.prompt.usage))
        except BaseException as error:
            self._end_all(lambda job, text=f"the engine stopped: {error}": Failed(text))  # type: ignore[misc]
            raise

    def turn(self) -> bool:
        """One round of everything. -> whether there was anything to do."""
        self._take_inbox()
        self._admit()
        launched = self._launch()
        self._collect(self.lag if launched else 0)
        rendered = self._render()
        self._deliver(self.lag if launched or rendered else 0)
        self._finish()
        return bool(self._known)

    def _refuse_if_full(self, request_id: str) -> None:
        if self._is_over:
            raise Full("the engine has stopped", retry_after_s=5.0)
        if request_id in self._known or any(job.id == request_id for job in self._inbox):
            raise ValueError(f"request {request_id!r} is under way already; every request needs an id of its own")
        waiting = len(self._inbox) + len(self._waiting)
        if waiting >= self.max_waiting:
            raise Full(f"{waiting} requests are waiting already", retry_after_s=1.0)

    def _take_inbox(self) -> None:
        with self._wake:
            arrived, cancelled = list(self._inbox), set(self._cancelled)
            self._inbox.clear()
            self._cancelled.clear()
        for job in arrived:
            self._known[job.id] = job
            self._waiting.append(job)
        for id in cancelled & self._known.keys():
            job = self._known[id]
            frames = self._num_frames(job)
            self._leave(job)
            job.deliver(Finished("cancelled", frames, job.prompt.usage))

    def _admit(self) -> None:
        """First come, first served, while there is a slot and all the pages a request can ever need: who speaks is never paused."""
        while self._waiting and self._free_slots:
            job = self._waiting[0]
            prompt = job.prompt
            shared = self.pages.match(self.salt, prompt.keys, PAGE_TOKENS)
            fresh = self.pages.take(self._num_pages(prompt) - len(shared))
            if fresh is None:
                self.pages.give_back(shared)
                self.pages.shared -= len(shared)  # nothing came of it
                return
            self._waiting.popleft()
            job.slot, job.pages = self._free_slots.pop(), shared + fresh
            skip = len(shared) * PAGE_TOKENS
            self._running[job.slot] = job
            self.scheduler.open(job.slot, len(prompt.inputs) - 1, skip)
            self.runner.open(job.slot, prompt, job.pages, skip)

    def _launch(self) -> bool:
        """One stretch of prompts, then one step of everybody who speaks."""
        chunks = self.scheduler.prefill()
        if chunks:
            self.runner.prefill(chunks)
            for chunk in chunks:
                self.scheduler.prefilled(chunk)
                if chunk.is_last:
                    job = self._running[chunk.slot]
                    self.pages.publish(self.salt, job.prompt.keys[:-1], PAGE_TOKENS, job.pages)
        slots = self.scheduler.decode()
        if slots.size:
            self._launches.append((slots, self._tenancy[slots], self.runner.step(slots)))
        return bool(chunks) or bool(slots.size)

    def _collect(self, lag: int) -> None:
        while len(self._launches) > lag:
            slots, tenancy, pending = self._launches.popleft()
            report = pending.read()
            same = self._tenancy[slots] == tenancy
            self.scheduler.report(slots[same], report[same, 0], report[same, 1].astype(bool))

    def _render(self) -> bool:
        due = self.scheduler.renders(self.clock())
        for render in due:
            self._renders.append((render, self._tenancy[render.slots], self.runner.render(render)))
        return bool(due)

    def _deliver(self, lag: int) -> None:
        while len(self._renders) > lag:
            render, tenancy, pending = self._renders.popleft()
            samples = pending.read()
            for row in np.flatnonzero(self._tenancy[render.slots] == tenancy):
                frames = int(render.count[row])
                self._running[int(render.slots[row])].deliver(Audio(samples[row, : frames * self._frames].copy(), frames))
                self.scheduler.delivered(render.slots[row : row + 1], render.count[row : row + 1], self.clock())

    def _finish(self) -> None:
        for slot in self.scheduler.finished():
            job = self._running[int(slot)]
            frames = self._num_frames(job)
            self._leave(job)
            job.deliver(Finished("length" if frames >= job.prompt.max_frames else "stop", frames, job.prompt.usage))

    def _leave(self, job: Job) -> None:
        """Give back whatever a request holds. What is under way for its slot still runs, ahead of anything the next tenant launches."""
        del self._known[job.id]
        if job.slot < 0:
            self._waiting.remove(job)
            return
        del self._running[job.slot]
        self.scheduler.close(job.slot)
        self.runner.close(job.slot)
        self._tenancy[job.slot] += 1
        self.pages.give_back(job.pages)
        self._free_slots.append(job.slot)

    def _end_all(self, event: Callable[[Job], Event]) -> None:
        with self._wake:
            self._is_over = True
            late = list(self._inbox)
            self._inbox.clear()
        for job in [*self._known.values(), *late]:
            last = event(job)
            if job.id in self._known:
                self._leave(job)
            job.deliver(last)

    def _num_frames(self, job: Job) -> int:
        return int(self.scheduler.num_ready[job.slot]) if job.slot >= 0 else 0

    def _num_pages(self, prompt: Prompt) -> int:
        return -(-(len(prompt.inputs) + prompt.max_frames) // PAGE_TOKENS)
