"""Policies: three sets of answers to the same questions. Each answer is a pure function of a snapshot.

    which prompts first      prompt_order, delays_prompts
    which windows, how large windows
    who speaks               allows_flexible, runs_dry_in_s

Idea of a policy on one screen: GeeeekExplorer/nano-vllm, nanovllm/engine/scheduler.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from serving.engine.schedule.numbers import (
    AT_RISK_S,
    BATCHED_PART,
    FIRST_WINDOW_ITERATIONS,
    MAX_LATE_IN_A_ROW,
    MAX_PROMPT_DELAY,
    STREAMING_PREFILL_TOKENS,
    THROUGHPUT_PREFILL_TOKENS,
)
from serving.engine.schedule.one_window import one_window
from serving.engine.schedule.snapshot import Snapshot
from serving.engine.schedule.windows import WindowPlan, cut, to_grid


@dataclass(frozen=True)
class Policy(ABC):
    """A server's policy: the answers to the scheduler's questions. prefill_tokens: prompt positions of
    one iteration at most.
    """

    prefill_tokens: int
    name: ClassVar[str]
    serves_listeners: ClassVar[bool] = (
        True  # audio is played as it comes, so only as many streams as can be made in real time
    )
    sorts_by_deadline: ClassVar[bool] = True

    @staticmethod
    def named(name: str) -> Policy:
        """Raises ValueError for an unknown name."""
        policies = {policy.name: policy for policy in (Streaming, Throughput, Fifo)}
        if name not in policies:
            raise ValueError(f"policy {name!r} is unknown; there are: {', '.join(policies)}")
        return policies[name]()

    def prompt_order(self, now: Snapshot) -> list[int]:
        """Return the slots whose prompts are prefilled next: in order of arrival, flexible ones only if no
        listener needs the time."""
        waits = now.slots.lacks_pages | (now.slots.listener.is_flexible & (not now.is_flexible_time))
        return [slot for slot in now.slots.prompt.queue if not waits[slot]]

    def delays_prompts(self, now: Snapshot, prefill_s: float) -> bool:
        """Return whether prompts wait for listeners. prefill_s: that their next positions are likely to
        take.
        """
        return False

    def allows_flexible(self, now: Snapshot) -> bool:
        """Return whether flexible requests may take steps: no listener waits for first audio or is at
        risk.
        """
        is_in_need = ~np.isfinite(now.slots.listener.plays_until_s) | self.is_at_risk(now)
        waits = now.slots.listener.has_backpressure | now.slots.is_starved
        return not bool((now.slots.speaks & ~waits & is_in_need).any())

    def runs_dry_in_s(self, now: Snapshot) -> float:
        """Return the seconds until the first listener runs dry; inf where the policy has no regard to
        time.
        """
        return math.inf

    def windows(self, now: Snapshot) -> WindowPlan:
        """Return the windows of this iteration."""
        flush = now.needs_flush
        is_due = (self.is_due(now) | flush) & ~now.slots.listener.has_backpressure
        return self.cut(now, is_due, flush, self.takes_all(now))

    def cut(self, now: Snapshot, is_due: np.ndarray, flush: np.ndarray, takes_all: np.ndarray) -> WindowPlan:
        slots = np.flatnonzero(is_due)
        if not slots.size:
            return WindowPlan(slots, slots)
        is_reproducible = now.slots.listener.is_reproducible[slots]
        largest = np.where(is_reproducible, self.reproducible_size(now)[slots], now.shapes.largest)
        return WindowPlan(slots, np.where(flush[slots], 0, cut(now, slots, takes_all, largest)))

    def is_full(self, now: Snapshot) -> np.ndarray:
        """Return which slots fill the largest shape, or have all frames that will come. [S]"""
        return (now.pending >= now.shapes.largest) | (now.is_ending & (now.pending > 0))

    def takes_all(self, now: Snapshot) -> np.ndarray:
        """Return which windows take all frames there are, padded up to a shape. [S]"""
        return now.is_ending

    @abstractmethod
    def is_due(self, now: Snapshot) -> np.ndarray:
        """Return whose window is due. [S]"""

    @abstractmethod
    def is_at_risk(self, now: Snapshot) -> np.ndarray:
        """Return which listeners have too little audio to wait for a full window. [S]"""

    def reproducible_size(self, now: Snapshot) -> np.ndarray:
        """Return the next window where windows follow from frame numbers alone: first audio early, then full
        ones. [S]"""
        shapes, num_rendered = now.shapes, now.slots.tape.num_rendered
        size = np.where(num_rendered < shapes.largest, shapes.middle, shapes.largest)
        return np.where(num_rendered == 0, shapes.smallest, size)

    def is_in_order(self, now: Snapshot) -> np.ndarray:
        """Return whose next such window is there. [S]"""
        every = np.arange(now.slots.num_slots)
        return now.pending >= to_grid(now, every, self.reproducible_size(now))


@dataclass(frozen=True)
class Throughput(Policy):
    """Nobody listens yet, so windows are full."""

    prefill_tokens: int = THROUGHPUT_PREFILL_TOKENS
    name: ClassVar[str] = "throughput"
    serves_listeners: ClassVar[bool] = False

    def allows_flexible(self, now: Snapshot) -> bool:
        return True

    def is_due(self, now: Snapshot) -> np.ndarray:
        return self.is_full(now)

    def is_at_risk(self, now: Snapshot) -> np.ndarray:
        return np.zeros(now.slots.num_slots, bool)

    def reproducible_size(self, now: Snapshot) -> np.ndarray:
        return np.full(now.slots.num_slots, now.shapes.largest)


@dataclass(frozen=True)
class Fifo(Policy):
    """The baseline of comparisons: prompts in order of arrival, windows of one shape as soon as
    they are filled."""

    prefill_tokens: int = STREAMING_PREFILL_TOKENS
    name: ClassVar[str] = "fifo"
    sorts_by_deadline: ClassVar[bool] = False

    def is_at_risk(self, now: Snapshot) -> np.ndarray:
        return np.ones(now.slots.num_slots, bool)

    def is_due(self, now: Snapshot) -> np.ndarray:
        is_even = now.pending >= now.shapes.even
        return self.is_full(now) | np.where(
            now.slots.listener.is_reproducible, self.is_in_order(now), is_even
        )

    def takes_all(self, now: Snapshot) -> np.ndarray:
        is_first = (now.slots.tape.num_rendered == 0) & ~now.slots.listener.is_reproducible
        least = now.shapes.smallest if now.shapes.window.grid == 1 else 1
        return now.is_ending | (is_first & (now.shapes.even > least))


@dataclass(frozen=True)
class Streaming(Policy):
    """First audio early, and no gaps: the listener that runs dry first is served first."""

    prefill_tokens: int = STREAMING_PREFILL_TOKENS
    name: ClassVar[str] = "streaming"

    def delays_prompts(self, now: Snapshot, prefill_s: float) -> bool:
        """With long iterations, one newcomer after another would leave the listeners no time: a prompt
        waits while one of them would run dry, for some iterations at most.
        """
        prompt, listener = now.slots.prompt, now.slots.listener
        arrived = [came for slot, came in prompt.queue.items() if not listener.is_flexible[slot]]
        if not arrived or not self.has_long_iterations(now):
            return False
        if now.iteration - min(arrived) > MAX_PROMPT_DELAY:
            return False
        listens = (now.slots.tape.num_rendered > 0) & ~now.is_resting & ~listener.is_flexible
        iteration_s = now.timing.iteration_s
        needed_s = now.timing.service_s + iteration_s + max(iteration_s, prefill_s)
        return bool(now.remaining_s[listens].min(initial=math.inf) < needed_s)

    def runs_dry_in_s(self, now: Snapshot) -> float:
        """Below 0 where a listener has run dry; -inf where one has heard nothing yet."""
        is_asked = ~now.is_resting & ~now.slots.listener.is_flexible
        return float(now.remaining_s[is_asked].min(initial=math.inf))

    def windows(self, now: Snapshot) -> WindowPlan:
        is_dry = self.is_dry(now)
        flush = now.needs_flush
        is_due = (self.is_due(now) | is_dry | flush) & ~now.slots.listener.has_backpressure
        if now.timing.window_cost is not None:
            in_order = flush | (is_due & now.slots.listener.is_reproducible)
            return one_window(now, is_due & ~flush, self.cut(now, in_order, flush, self.takes_all(now)))
        is_batched = self.is_batched(now, is_due)
        is_due |= is_batched
        takes_all = self.takes_all(now) | is_dry | is_batched
        return self.cut(now, is_due, flush, takes_all)

    def is_at_risk(self, now: Snapshot) -> np.ndarray:
        return now.remaining_s < AT_RISK_S

    def is_due(self, now: Snapshot) -> np.ndarray:
        """Return which windows are due: a full one, a first one that fills its shape, and one of a listener
        at risk that fills the middle shape. [S]"""
        is_first = now.slots.tape.num_rendered == 0
        is_hurried = is_first & (now.pending >= self.first_size(now))
        is_hurried |= self.is_at_risk(now) & (now.pending >= now.shapes.middle)
        is_reproducible = now.slots.listener.is_reproducible
        return self.is_full(now) | np.where(is_reproducible, self.is_in_order(now), is_hurried)

    def takes_all(self, now: Snapshot) -> np.ndarray:
        """So does a first window that was not cut as soon as the smallest shape was full: it is to last."""
        least = now.shapes.smallest if now.shapes.window.grid == 1 else 1
        is_first = (now.slots.tape.num_rendered == 0) & ~now.slots.listener.is_reproducible
        return now.is_ending | (is_first & (self.first_size(now) > least))

    def first_size(self, now: Snapshot) -> int:
        """Return the frames of a first window: the smallest shape, or as many as last for some iterations, up
        to the middle shape.

        The time of other models counts once: a model whose listeners are in need goes first, and others let
        it pass. A grid's first stretch may be shorter than any shape; then it must last until the next one
        is there.
        """
        shapes, timing = now.shapes, now.timing
        own_s = timing.iteration_s - timing.other_models_s
        grid = shapes.window.grid
        if grid == 1:
            lasts_s = FIRST_WINDOW_ITERATIONS * own_s + timing.other_models_s
            return max(shapes.smallest, min(math.ceil(lasts_s / timing.frame_s - 0.5), shapes.middle))
        lasts_s = grid * own_s + timing.other_models_s + timing.hold_s + timing.latency_s
        return min(math.ceil(lasts_s / timing.frame_s), grid) if timing.latency_s else grid

    def has_long_iterations(self, now: Snapshot) -> bool:
        """Return whether an iteration takes so much of a frame that one frame is too little for first
        audio.
        """
        return self.first_size(now) > now.shapes.smallest

    def is_dry(self, now: Snapshot) -> np.ndarray:
        """Return whose listener is about to run dry, and has a frame to go on with. [S]"""
        is_short = now.remaining_s <= now.timing.service_s
        is_dry = (now.slots.tape.num_rendered > 0) & is_short & (now.pending > 0)
        return is_dry & ~self.is_late(now) & ~now.slots.listener.is_reproducible

    def is_late(self, now: Snapshot) -> np.ndarray:
        """Return which listeners wait for the middle shape although they run dry: their last windows all came
        too late. Single frames take the most time per frame, and would keep them late. [S]"""
        return now.slots.listener.num_late_in_a_row >= MAX_LATE_IN_A_ROW

    def is_batched(self, now: Snapshot, is_due: np.ndarray) -> np.ndarray:
        """Return which windows nearly fill the middle shape while another one does and iterations are long:
        one launch of three rows takes less than three. [S]"""
        listener = now.slots.listener
        enough = math.ceil(BATCHED_PART * now.shapes.middle)
        if not self.has_long_iterations(now) or not (is_due & (now.pending >= enough)).any():
            return np.zeros(now.slots.num_slots, bool)
        is_on = (now.slots.tape.num_rendered > 0) & ~listener.is_reproducible & ~listener.has_backpressure
        return is_on & (now.pending >= enough) & self.is_at_risk(now)
