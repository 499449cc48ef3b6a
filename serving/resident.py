"""One model in the engine: its waiting line, its slots, its launches, and what is known of every request in them.

    arrive ─> waiting ─admit─> slot ─launch─> prefill, step, step, ... ─collect─> frames ready ─render─> samples ─deliver─> client

The engine drives it, one round a turn. With the other models it shares the pages, which it takes and gives back, and nothing else.
"""

from __future__ import annotations

import codecs
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
class Text:
    """What the model wrote, from where the last such event ended: whole characters."""

    text: str


@dataclass(frozen=True)
class Finished:
    """reason: "stop" (the model ended), "length" (the cap) or "cancelled"; usage: the prompt's, and `text_tokens` that the model wrote, if
    any. No event follows."""

    reason: str
    frames: int
    usage: dict[str, int]


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on with this request. No event follows."""

    message: str


Event = Audio | Text | Finished | Failed


@dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    id: str
    model: Resident
    prompt: Prompt
    deliver: Callable[[Event], None]
    ticket: int = -1  # its place in the order in which all models' requests came
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)  # of each lane
    text_tokens: int = 0
    characters: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def num_frames(self) -> int:
        return int(self.model.scheduler.num_ready[self.slot]) if self.slot >= 0 else 0

    def spoken(self) -> Finished:
        """The end of one that was not cut off."""
        return Finished("length" if self.num_frames >= self.prompt.max_frames else "stop", self.num_frames, self.usage)

    def cancelled(self) -> Finished:
        return Finished("cancelled", self.num_frames, self.usage)

    @property
    def usage(self) -> dict[str, int]:
        return self.prompt.usage | ({"text_tokens": self.text_tokens} if self.text_tokens else {})

    def write(self, token: int, is_done: bool) -> None:
        """The model wrote a text token (-1: none). A character is delivered once all its bytes are here, or no more come."""
        self.text_tokens += token >= 0
        text = self.characters.decode(self.model.family.spell(token) if token >= 0 else b"", is_done)
        if text:
            self.deliver(Text(text))


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
        frame_s = 1 / spec.frame_rate_hz
        self.scheduler = Scheduler(num_slots, Policy.named(policy), spec.window.new, frame_s, spec.window.right, spec.lanes)
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
        return sum(self._lane_pages(prompt))

    def admit(self) -> bool:
        """Give the first in line a slot and all the pages of all its lanes: who speaks is never paused. -> whether there were enough."""
        job, page_tokens = self.waiting[0], self.runner.page_tokens
        lanes, needed = job.prompt.lanes, self._lane_pages(job.prompt)
        shared = [self.pages.match(self.salt, lane.keys, page_tokens) for lane in lanes]
        num_shared = sum(map(len, shared))
        fresh = self.pages.take(sum(needed) - num_shared)
        if fresh is None:
            for pages in shared:
                self.pages.give_back(pages)
            self.pages.shared -= num_shared  # nothing came of it
            return False
        self.waiting.popleft()
        job.slot, dealt = self.free_slots.pop(), iter(fresh)
        job.pages = [pages + list(itertools.islice(dealt, count - len(pages))) for pages, count in zip(shared, needed, strict=True)]
        skips = [len(pages) * page_tokens for pages in shared]
        self.running[job.slot] = job
        self.scheduler.open(job.slot, [len(lane.inputs) - 1 for lane in lanes], skips)
        self.runner.open(job.slot, job.prompt, job.pages, skips)
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
        for pages in job.pages:
            self.pages.give_back(pages)
        self.free_slots.append(job.slot)

    def launch(self) -> bool:
        """One stretch of prompts, then one step of everybody who speaks. -> whether there was anything to launch."""
        chunks = self.scheduler.prefill()
        if chunks:
            self.runner.prefill(chunks)
            for chunk in chunks:
                self.scheduler.prefilled(chunk)
                if chunk.is_last:
                    job, lane = self.running[chunk.slot], chunk.lane
                    self.pages.publish(self.salt, job.prompt.lanes[lane].keys[:-1], self.runner.page_tokens, job.pages[lane])
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

    def _lane_pages(self, prompt: Prompt) -> list[int]:
        return [-(-positions // self.runner.page_tokens) for positions in prompt.most_positions(self.family.spec)]

    def _collect(self, lag: int) -> None:
        while len(self.launches) > lag:
            slots, tenancy, pending = self.launches.popleft()
            report = pending.read()
            same = self._tenancy[slots] == tenancy
            slots, (ready, done, written) = slots[same], report[same].T
            # A slot that was done already took a step in vain, whose report says again what the one before said.
            has_text = ((written >= 0) | (done > 0)) & ~self.scheduler.is_done[slots]
            self.scheduler.report(slots, ready, done > 0)
            for slot, token, is_done in zip(slots[has_text].tolist(), written[has_text].tolist(), done[has_text].tolist(), strict=True):
                self.running[slot].write(token, bool(is_done))

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
