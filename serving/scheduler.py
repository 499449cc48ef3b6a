"""Time policy: who runs next, by deadline. One turn of the engine asks, in this order:

    prefill()     startup goes first: the next stretch of the prompts that wait, first come first served, and bounded by the policy
    decode()      then everybody who speaks takes one step, so a long prompt costs the others one bounded chunk per turn
    renders(now)  the windows of the tape that are due, the nearest deadline first; who waits for first audio has none to lose

What is known of a slot is one row in vectors by slot, and a turn is arithmetic on whole vectors: its cost does not grow with the
number of speakers. The clock is an argument, so the same calls give the same answers. Idea of a policy on one screen:
GeeeekExplorer/nano-vllm, nanovllm/engine/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Policy:
    """What a server is for. `Policy.named` finds one by name and raises ValueError for a name that is none."""

    name: str
    prefill_tokens: int  # prompt positions per turn, at most
    at_risk_s: float | None  # a listener with less audio than this is served early; None: nobody listens yet, so windows are full

    STREAMING: ClassVar[Policy]
    THROUGHPUT: ClassVar[Policy]

    @classmethod
    def named(cls, name: str) -> Policy:
        policies = {policy.name: policy for policy in (cls.STREAMING, cls.THROUGHPUT)}
        if name not in policies:
            raise ValueError(f"policy {name!r} is unknown; there are: {', '.join(policies)}")
        return policies[name]


PATIENCE = 3  # late deliveries in a row after which a listener's windows grow by a shape
Policy.STREAMING = Policy("streaming", prefill_tokens=256, at_risk_s=1.0)
Policy.THROUGHPUT = Policy("throughput", prefill_tokens=1024, at_risk_s=None)


@dataclass(frozen=True)
class Chunk:
    """Positions start .. stop of one lane's prompt, to be prefilled in one launch. is_last: the prompt ends there."""

    slot: int
    start: int
    stop: int
    is_last: bool
    lane: int = 0


@dataclass(frozen=True, eq=False)
class Render:
    """One launch of the renderer: frames start .. start + count of each slot's tape, in a window of `frames` frames."""

    slots: np.ndarray  # [B], ascending
    start: np.ndarray  # [B]
    count: np.ndarray  # [B], at most `frames`
    frames: int


class Scheduler:
    """The state of every slot, as far as time is concerned. window: the renderer's shapes in frames, ascending; frame_s: a frame's length;
    right: the renderer's lookahead, so frames are pending only once so many more are ready behind them, or no more come; lanes: prompts
    of a slot, all of which are prefilled before it decodes.

    A slot's frames pass three counters: ready (on the tape, reported), rendered (handed to a launch), delivered (given to the listener).
    The listener plays from the first delivery on, and `plays_until_s` is when all that was delivered is played (-inf before the first).
    A delivery that comes later than that is an underrun, and playback goes on from there.
    """

    def __init__(self, num_slots: int, policy: Policy, window: tuple[int, ...], frame_s: float, right: int = 0, lanes: int = 1):
        assert num_slots > 0 and frame_s > 0, f"{num_slots} slots of {frame_s} s a frame, more than 0 of both expected"
        assert window and window[0] > 0 and all(np.diff(window) > 0), f"window {window}, ascending frame counts expected"
        assert right >= 0, f"a lookahead of {right} frames"
        self.policy = policy
        self.frame_s = frame_s
        self.right = right
        self.window = np.array(window)
        self.waiting: dict[int, None] = {}  # slots whose prompt is not wholly prefilled, in order of arrival
        self.is_open = np.zeros(num_slots, bool)
        self.is_decoding = np.zeros(num_slots, bool)
        self.is_done = np.zeros(num_slots, bool)
        self.prompt_tokens = np.zeros((num_slots, lanes), np.int64)
        self.num_prefilled = np.zeros((num_slots, lanes), np.int64)
        self.num_ready = np.zeros(num_slots, np.int64)
        self.num_rendered = np.zeros(num_slots, np.int64)
        self.num_delivered = np.zeros(num_slots, np.int64)
        self.num_underruns = np.zeros(num_slots, np.int64)
        self.late_in_a_row = np.zeros(num_slots, np.int64)  # deliveries, the last one included
        self.past_underruns = 0  # of slots' earlier tenants
        self.plays_until_s = np.full(num_slots, -np.inf)
        self.rendered_s = np.zeros(num_slots)  # when the last window was handed out
        self.latency_s = 0.0  # from there to the listener, as measured of late

    def open(self, slot: int, prompt_tokens: int | Sequence[int], skip: int | Sequence[int] = 0) -> None:
        """A request moves in. prompt_tokens: positions to fill before its first step; skip: those that shared pages already hold. Either
        is a number for each lane, or one for all."""
        assert not self.is_open[slot], f"slot {slot} is opened, but it is in use"
        skipped, tokens = np.asarray(skip), np.asarray(prompt_tokens)
        assert ((skipped >= 0) & (skipped <= tokens)).all(), f"{skip} of {prompt_tokens} positions skipped"
        self.is_open[slot] = True
        self.past_underruns += int(self.num_underruns[slot])
        self.is_decoding[slot] = (skipped == tokens).all()
        self.is_done[slot] = False
        self.prompt_tokens[slot], self.num_prefilled[slot] = tokens, skipped
        self.num_ready[slot] = self.num_rendered[slot] = self.num_delivered[slot] = self.num_underruns[slot] = 0
        self.late_in_a_row[slot] = 0
        self.plays_until_s[slot] = -np.inf
        if not self.is_decoding[slot]:
            self.waiting[slot] = None

    def close(self, slot: int) -> None:
        """The request is gone, finished or cancelled at any point; the slot asks for nothing any more."""
        assert self.is_open[slot], f"slot {slot} is closed, but it is not in use"
        self.is_open[slot] = self.is_decoding[slot] = self.is_done[slot] = False
        self.num_rendered[slot] = self.num_ready[slot]  # nothing is pending
        self.waiting.pop(slot, None)

    @property
    def underruns(self) -> int:
        """Since the start, of everybody."""
        return self.past_underruns + int(self.num_underruns.sum())

    def prefill(self) -> list[Chunk]:
        """The prompt positions of this turn, at most policy.prefill_tokens of them; short prompts share a turn, long ones take several.
        A slot's lanes are filled one after the other."""
        chunks: list[Chunk] = []
        left = self.policy.prefill_tokens
        for slot in self.waiting:
            for lane, (start, end) in enumerate(zip(self.num_prefilled[slot].tolist(), self.prompt_tokens[slot].tolist(), strict=True)):
                stop = min(start + left, end)
                if start < stop:
                    chunks.append(Chunk(slot, start, stop, is_last=stop == end, lane=lane))
                    left -= stop - start
            if left == 0:
                break
        return chunks

    def prefilled(self, chunk: Chunk) -> None:
        """The chunk is launched. After the last one of all its lanes the slot decodes."""
        slot, start = chunk.slot, self.num_prefilled[chunk.slot, chunk.lane]
        assert slot in self.waiting and start == chunk.start, f"{chunk} is launched, but slot {slot} has {start} positions"
        self.num_prefilled[slot, chunk.lane] = chunk.stop
        if (self.num_prefilled[slot] == self.prompt_tokens[slot]).all():
            del self.waiting[slot]
            self.is_decoding[slot] = True

    def decode(self) -> np.ndarray:
        """The slots that take a step now, ascending. [B]"""
        return np.flatnonzero(self.is_decoding & ~self.is_done)

    def report(self, slots: np.ndarray, ready: np.ndarray, done: np.ndarray) -> None:
        """A launch's late report, all [B]: frames on the tape, and whether no more come. Slots that were closed since are left out."""
        assert self.is_decoding[slots].all(), f"slots {slots} report, but only {np.flatnonzero(self.is_decoding)} decode"
        self.num_ready[slots] = ready
        self.is_done[slots] = done

    def renders(self, now: float) -> list[Render]:
        """The windows that are due, one per slot at most and grouped by launch shape, the nearest deadline first. All of them are to be
        launched, in this order: they count as rendered from here on.

        Due is a slot whose frames fill the largest shape, or that is done (the rest goes). Where somebody listens, also a slot without
        audio whose frames fill the smallest shape; one that is at risk whose frames fill the middle shape; and one about to run dry, with
        any frame. Who is late time after time is late for want of speed, and is only helped by larger shapes, which cost less a frame.
        """
        smallest, middle, largest = self.window[0], self.window[:2][-1], self.window[-1]
        known = self.num_ready - np.where(self.is_done, 0, self.right)  # [S], how far the renderer has all that it reads
        pending = known - self.num_rendered  # [S], below 0 where even less is known
        in_flight = self.num_rendered - self.num_delivered  # [S], as good as heard: the next window need not be hurried because of them
        left_s = np.maximum(self.plays_until_s - now, 0) + in_flight * self.frame_s  # [S]
        is_first = self.num_rendered == 0
        least = self.window[np.minimum(self.late_in_a_row // PATIENCE, len(self.window) - 1)]  # [S]
        least[self.late_in_a_row < PATIENCE] = 1
        is_dry = ~is_first & (left_s <= self._lead_s()) & (pending >= least)
        is_due = (pending >= largest) | (self.is_done & (pending > 0))
        if self.policy.at_risk_s is not None:
            is_due |= is_first & (pending >= smallest)
            is_due |= (left_s < self.policy.at_risk_s) & (pending >= np.maximum(middle, least))
            is_due |= is_dry
        slots = np.flatnonzero(is_due)  # [B]

        # Who is done or dry gets all there is, padded up to a shape, unless that is more than twice the work of several smaller ones: then
        # one of those, and soon the next. The others are due because they fill a shape, and can wait for what is left over, so the renderer
        # computes nothing in vain. The work of a shape is its frames, and those around it that are read as well.
        there, around = np.minimum(pending[slots], largest), 2 * self.right
        padded = self.window[np.searchsorted(self.window, there)]  # [B]
        full = self.window[np.searchsorted(self.window, there, side="right") - 1]  # [B], where there is enough for any
        is_worth = (padded + around <= 2 * -(-there // full) * (full + around)) | (there < smallest)
        count = np.where((self.is_done[slots] | is_dry[slots]) & is_worth, there, full)  # [B]
        start = self.num_rendered[slots]  # [B]
        shape = self.window[np.searchsorted(self.window, count)]  # [B]
        self.num_rendered[slots] += count
        self.rendered_s[slots] = now

        groups = [(frames, np.flatnonzero(shape == frames)) for frames in self.window]
        renders = [Render(slots[rows], start[rows], count[rows], int(frames)) for frames, rows in groups if rows.size]
        return sorted(renders, key=lambda render: left_s[render.slots].min())

    def delivered(self, slots: np.ndarray, count: np.ndarray, now: float) -> None:
        """Frames were given to the listeners, both [B]; each slot once, and those that were closed since are left out."""
        until_s = self.plays_until_s[slots]
        is_late = (self.num_delivered[slots] > 0) & (until_s < now)
        self.num_underruns[slots] += is_late
        self.late_in_a_row[slots] = np.where(is_late, self.late_in_a_row[slots] + 1, 0)
        self.plays_until_s[slots] = np.maximum(until_s, now) + count * self.frame_s
        self.num_delivered[slots] += count
        # Turns are uneven, since some prefill a prompt: a long one is remembered for about twenty deliveries.
        self.latency_s = max(0.9 * self.latency_s, (now - self.rendered_s[slots]).max(initial=0.0))
        over = slots[self.num_delivered[slots] > self.num_rendered[slots]]
        assert not over.size, f"slots {over}: {self.num_delivered[over]} frames delivered, {self.num_rendered[over]} rendered"

    def finished(self) -> np.ndarray:
        """The slots that are done and wholly delivered, ascending. [B]"""
        return np.flatnonzero(self.is_done & (self.num_delivered == self.num_ready))

    def _lead_s(self) -> float:
        """With less than this left, a listener who is not served in this turn may hear a gap: the next turn comes up to a latency later,
        and its audio another one later. Never less than a frame."""
        return max(self.frame_s, 2 * self.latency_s)
