"""One model in the engine: its waiting line, its slots, its launches, and what is known of every request in them.

    arrive ─> waiting ─admit─> slot ─launch─> prefill, step, step, ... ─collect─> frames ready ─render─> samples ─deliver─> client

The engine drives it, one round a turn. With the other models it shares the pages, which it takes and gives back, and nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serving.pages import Pages
from serving.runner import Arena, Pending, Runner
from serving.scheduler import Policy, Render, Scheduler
from zoo.contract import Family, Prompt

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


@dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    id: str
    model: Resident
    prompt: Prompt
    deliver: Callable[[Event], None]
    ticket: int = -1  # its place in the order in which all models' requests came
    slot: int = -1
    pages: list[int] = field(default_factory=list)

    @property
    def num_frames(self) -> int:
        return int(self.model.scheduler.num_ready[self.slot]) if self.slot >= 0 else 0

    def spoken(self) -> Finished:
        """The end of one that was not cut off."""
        return Finished("length" if self.num_frames >= self.prompt.max_frames else "stop", self.num_frames, self.prompt.usage)

    def cancelled(self) -> Finished:
        return Finished("cancelled", self.num_frames, self.prompt.usage)


class Resident:
    """A family with `num_slots` slots of its own, on pages that it may have to share. Raises ValueError for a policy that is none."""

    def __init__(
        self,
        family: Family,
        arena: Arena,
        pages: Pages,
        *,
        num_slots: int,
        policy: str,
        compile: bool,
        lag: int,
        clock: Callable[[], float],
    ):
        spec = family.spec
        self.family, self.pages, self.lag, self.clock = family, pages, lag, clock
        self.runner = Runner(family, num_slots, arena, compile)
        self.scheduler = Scheduler(num_slots, Policy.named(policy), spec.window.new, 1 / spec.frame_rate_hz, spec.window.right)
        self.salt = next(_salts)
        self._frame_samples = spec.frame_samples

        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # by slot
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._tenancy = np.zeros(num_slots, np.int64)  # grows when a slot changes hands, so that late reports find their own request
        self.launches: deque[tuple[np.ndarray, np.ndarray, Pending]] = deque()
        self.renders: deque[tuple[Render, np.ndarray, Pending]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.launches or self.renders)

    def num_pages(self, prompt: Prompt) -> int:
        """All that a request can ever need."""
        positions = len(prompt.inputs) + prompt.max_frames + self.family.spec.delay
        return -(-positions // self.runner.page_tokens)

    def admit(self) -> bool:
        """Give the first in line a slot and all its pages: who speaks is never paused. -> whether there were pages enough."""
        job, page_tokens = self.waiting[0], self.runner.page_tokens
        shared = self.pages.match(self.salt, job.prompt.keys, page_tokens)
        fresh = self.pages.take(self.num_pages(job.prompt) - len(shared))
        if fresh is None:
            self.pages.give_back(shared)
            self.pages.shared -= len(shared)  # nothing came of it
            return False
        self.waiting.popleft()
        job.slot, job.pages = self.free_slots.pop(), shared + fresh
        skip = len(shared) * page_tokens
        self.running[job.slot] = job
        self.scheduler.open(job.slot, len(job.prompt.inputs) - 1, skip)
        self.runner.open(job.slot, job.prompt, job.pages, skip)
        return True

    def leave(self, job: Job) -> None:
        """Take back whatever a request holds. What is under way for its slot still runs, ahead of anything the next tenant launches."""
        if job.slot < 0:
            self.waiting.remove(job)
            return
        del self.running[job.slot]
        self.scheduler.close(job.slot)
        self.runner.close(job.slot)
        self._tenancy[job.slot] += 1
        self.pages.give_back(job.pages)
        self.free_slots.append(job.slot)

    def launch(self) -> bool:
        """One stretch of prompts, then one step of everybody who speaks. -> whether there was anything to launch."""
        chunks = self.scheduler.prefill()
        if chunks:
            self.runner.prefill(chunks)
            for chunk in chunks:
                self.scheduler.prefilled(chunk)
                if chunk.is_last:
                    job = self.running[chunk.slot]
                    self.pages.publish(self.salt, job.prompt.keys[:-1], self.runner.page_tokens, job.pages)
        slots = self.scheduler.decode()
        if slots.size:
            self.launches.append((slots, self._tenancy[slots], self.runner.step(slots)))
        return bool(chunks) or bool(slots.size)

    def take_in(self, launched: bool) -> None:
        """What came of it: reports, the windows that are due because of them, samples to their listeners. While there are launches under
        way, the last of each kind (`lag`) is left alone."""
        self._collect(self.lag if launched else 0)
        rendered = self._render()
        self._deliver(self.lag if launched or rendered else 0)

    def finished(self) -> list[Job]:
        """Who has spoken, and whose listener has all of it."""
        return [self.running[int(slot)] for slot in self.scheduler.finished()]

    def stats(self, arriving: int) -> dict[str, int]:
        """arriving: requests that are on their way into the line."""
        return {
            "slots": self.runner.num_slots,
            "running": len(self.running),
            "waiting": len(self.waiting) + arriving,
            "underruns": self.scheduler.underruns,
            "graph_misses": self.runner.graphs.misses,
        }

    def _collect(self, lag: int) -> None:
        while len(self.launches) > lag:
            slots, tenancy, pending = self.launches.popleft()
            report = pending.read()
            same = self._tenancy[slots] == tenancy
            self.scheduler.report(slots[same], report[same, 0], report[same, 1].astype(bool))

    def _render(self) -> bool:
        due = self.scheduler.renders(self.clock())
        for render in due:
            self.renders.append((render, self._tenancy[render.slots], self.runner.render(render)))
        return bool(due)

    def _deliver(self, lag: int) -> None:
        while len(self.renders) > lag:
            render, tenancy, pending = self.renders.popleft()
            samples = pending.read()
            same = np.flatnonzero(self._tenancy[render.slots] == tenancy)
            slots, counts = render.slots[same], render.count[same]
            for row, slot, frames in zip(same.tolist(), slots.tolist(), counts.tolist(), strict=True):
                self.running[slot].deliver(Audio(samples[row, : frames * self._frame_samples].copy(), frames))
            self.scheduler.delivered(slots, counts, self.clock())
