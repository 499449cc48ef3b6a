"""The scheduler: asks its policy what to launch, and writes down what was launched.

    next_chunks         which prompts are prefilled now
    decoding_slots      which slots take a step: all that may, so a long prompt costs them one bounded launch
    take_due_windows    which windows are rendered, the nearest deadline first

State is one row per slot (slots.py). Decisions are pure functions of a snapshot (policy.py). Only the
scheduler writes the results of launches, reports and deliveries. The clock is an argument, so the same
calls give the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.engine.device.launches import Chunk, Render
from serving.engine.schedule.numbers import FIRST_WINDOW_ITERATIONS
from serving.engine.schedule.policy import Policy
from serving.engine.schedule.prompts import chunks_of
from serving.engine.schedule.slots import UNBOUNDED, Slots
from serving.engine.schedule.snapshot import Shapes, Snapshot, Timing
from serving.engine.schedule.window_cost import WindowCost
from serving.engine.schedule.windows import grouped
from serving.protocol import Listener
from zoo.contract import Window

NOBODY = np.zeros(0, np.int64)


class Scheduler:
    """frame_s: a frame's length; lanes: prompts of a slot, all of which are prefilled before it decodes.
    chunk_tokens: prompts are cut at its multiples, independent of other prompts; None: wherever there is
    room.
    max_unread_s: audio that a metered listener may leave; then its slot is paused by backpressure, until half
    of that is consumed.
    hold_s: the most audio that the renderer keeps back. is_one_by_one: windows of several slots take as long
    together as one after the other, and steps wait for them; then an iteration has one. renders_from_pages:
    a slot that lacks pages has no windows either.
    """

    def __init__(
        self,
        num_slots: int,
        policy: Policy,
        window: Window,
        frame_s: float,
        lanes: int = 1,
        chunk_tokens: int | None = None,
        max_unread_s: float = np.inf,
        hold_s: float = 0.0,
        is_one_by_one: bool = False,
        renders_from_pages: bool = False,
    ):
        assert num_slots > 0 and frame_s > 0, (
            f"{num_slots} slots of {frame_s} s a frame, more than 0 of both expected"
        )
        self.policy = policy
        self.shapes = Shapes(window)
        self.slots = Slots(num_slots, frame_s, lanes, renders_from_pages)
        self.timing = Timing(frame_s, hold_s, window_cost=WindowCost() if is_one_by_one else None)
        self.chunk_tokens = chunk_tokens
        self.max_unread_s = max_unread_s
        self.iteration = 0
        self.is_flexible_time = True  # whether flexible requests take steps
        self.past_underruns = 0  # of slots' earlier tenants

    def snapshot(self, now_s: float) -> Snapshot:
        return Snapshot(self.slots, self.shapes, self.timing, now_s, self.iteration, self.is_flexible_time)

    # coming and going

    def open(
        self,
        slot: int,
        prompt_tokens: int | Sequence[int],
        skip: int | Sequence[int] = 0,
        *,
        listener: Listener = Listener(),  # noqa: B008, it is frozen
        **first_pass: Any,
    ) -> None:
        """Put a request into a slot, and begin its first pass."""
        assert not self.slots.is_occupied[slot], f"slot {slot} is opened, but it is in use"
        self.past_underruns += int(self.slots.listener.num_underruns[slot])
        self.slots.listener.open(slot, listener, self.timing.frame_s)
        self.begin_pass(slot, prompt_tokens, skip, **first_pass)

    def begin_pass(
        self,
        slot: int,
        prompt_tokens: int | Sequence[int],
        skip: int | Sequence[int] = 0,
        *,
        grid_offset: int = 0,
        steps: int | None = None,
        expected_frames: float = 0.0,
        is_final: bool = True,
    ) -> None:
        """Begin a pass in a slot, whose listener plays what earlier passes gave.

        prompt_tokens: positions to fill before its first step. skip: the positions that shared pages already
        hold. Both are numbers per lane, or one number for all lanes. steps: the steps that the text so far
        allows (None: the text is complete). expected_frames: an estimate for this pass and the later ones.
        is_final: no pass follows.
        """
        slots = self.slots
        slots.begin_pass(slot, prompt_tokens, skip, self.iteration)
        slots.steps_left[slot] = UNBOUNDED if steps is None else steps
        slots.tape.open(slot, grid_offset, expected_frames, is_final)
        if not slots.listener.is_flexible[slot]:
            self.is_flexible_time &= not self.policy.serves_listeners

    def close(self, slot: int) -> None:
        """Take a request out of its slot, finished or cancelled at any point."""
        self.slots.close(slot)

    def feed(self, slot: int, steps: int | None) -> None:
        """Record that more text arrived, which allows `steps` more steps; None: it was the last of it."""
        left = self.slots.steps_left
        left[slot] = UNBOUNDED if steps is None else left[slot] + steps

    def has_all_text(self, slot: int) -> bool:
        return bool(self.slots.steps_left[slot] == UNBOUNDED)

    # prompts and steps

    @property
    def max_prefill_tokens(self) -> int:
        """Positions of one iteration."""
        return self.policy.prefill_tokens + (self.chunk_tokens or 1) - 1

    def next_chunks(self, now_s: float = -math.inf, prefill_s: float = 0.0) -> list[Chunk]:
        """Begin an iteration, and return the prompt positions that it prefills. now_s: without it every
        listener has enough to play; prefill_s: that the positions are likely to take."""
        self.iteration += 1
        if not self.slots.prompt.queue:
            return []
        now = self.snapshot(now_s)
        if self.policy.delays_prompts(now, prefill_s):
            return []
        order = self.policy.prompt_order(now)
        return chunks_of(self.slots.prompt, order, self.policy.prefill_tokens, self.chunk_tokens)

    def record_prefill(self, chunk: Chunk) -> None:
        """Record a launched chunk. After the last one of all its lanes the slot decodes."""
        prompt, slot = self.slots.prompt, chunk.slot
        start = prompt.num_prefilled[slot, chunk.lane]
        assert slot in prompt.queue and start == chunk.start, (
            f"{chunk} is launched, but slot {slot} has {start} positions"
        )
        prompt.num_prefilled[slot, chunk.lane] = chunk.stop
        if (prompt.num_prefilled[slot] == prompt.num_tokens[slot]).all():
            del prompt.queue[slot]
            self.slots.is_decoding[slot] = True

    def decoding_slots(self) -> np.ndarray:
        """Return the slots that take a step now, ascending. [B]"""
        return self.slots.stepping(self.is_flexible_time)

    def record_step(self, slots: np.ndarray) -> None:
        """Record a launched step of `slots` [B]."""
        left = self.slots.steps_left
        left[slots[left[slots] < UNBOUNDED]] -= 1

    def report(self, slots: np.ndarray, ready: np.ndarray, done: np.ndarray) -> None:
        """Record a launch's late report, all [B]: frames on the tape, and whether no more come. Slots that
        were closed since are left out."""
        # A second lane may be filled now.
        decodes = self.slots.is_decoding | self.slots.prompt.is_first_filled
        assert decodes[slots].all(), f"slots {slots} report, but only {np.flatnonzero(decodes)} decode"
        self.slots.tape.num_ready[slots] = ready
        self.slots.tape.is_done[slots] = done

    # windows

    def take_due_windows(self, now_s: float) -> list[Render]:
        """Return the windows that are due, grouped by launch shape, the nearest deadline first. The caller
        launches all of them in this order: they count as rendered from here on."""
        now = self.snapshot(now_s)
        plan = self.policy.windows(now)
        self.is_flexible_time = self.policy.allows_flexible(now)
        tape, listener = self.slots.tape, self.slots.listener
        if plan.is_skipped is not None:
            listener.num_skipped += plan.is_skipped
        if not plan.slots.size:
            return []
        remaining_s = now.remaining_s  # before these windows count
        start = tape.num_rendered[plan.slots]  # [B]
        stop = start + plan.count  # [B]
        tape.num_rendered[plan.slots] = stop
        is_last = tape.is_done[plan.slots] & (stop == tape.num_ready[plan.slots])  # [B]
        tape.is_end_rendered[plan.slots] = is_last
        is_reproducible = listener.is_reproducible[plan.slots]
        renders = grouped(self.shapes, plan, start, is_last, is_reproducible, now_s)
        if self.timing.render_times is not None:
            renders = self.timing.render_times.joined(renders)
        if not self.policy.sorts_by_deadline:
            return renders
        return sorted(renders, key=lambda render: remaining_s[render.slots].min())

    def record_delivery(
        self,
        slots: np.ndarray,
        count: np.ndarray,
        given_s: np.ndarray,
        is_last: np.ndarray,
        handed_s: float,
        now_s: float,
    ) -> None:
        """Record frames given to the listeners, as `given_s` seconds of audio, all [B]; each slot once, and
        those that were closed since are left out. is_last: the speech ended with them. handed_s: when their
        window was launched."""
        tape, listener = self.slots.tape, self.slots.listener
        until_s = listener.plays_until_s[slots]
        is_late = np.isfinite(until_s) & (until_s < now_s) & (listener.num_unread[slots] == 0)
        listener.num_underruns[slots] += is_late
        listener.num_late_in_a_row[slots] = np.where(is_late, listener.num_late_in_a_row[slots] + 1, 0)
        listener.play(slots, given_s, now_s, self.timing.frame_s)
        tape.num_delivered[slots] += count
        tape.is_end_delivered[slots] |= is_last
        self._record_unread(slots, count, now_s)
        self._record_latency(float(count.sum()), now_s - handed_s)
        over = slots[tape.num_delivered[slots] > tape.num_rendered[slots]]
        assert not over.size, (
            f"slots {over}: {tape.num_delivered[over]} frames delivered, {tape.num_rendered[over]} rendered"
        )

    def record_silence(self, slot: int, given_s: float, now_s: float) -> None:
        """Record silence that was given before or behind a pass: its listener plays it as it plays speech."""
        self.slots.listener.play(np.array([slot]), given_s, now_s, self.timing.frame_s)

    def _record_unread(self, slots: np.ndarray, count: np.ndarray, now_s: float) -> None:
        listener = self.slots.listener
        listener.num_unread[slots] += np.where(listener.is_metered[slots], count, 0)
        is_full = listener.unread_s[slots] >= self.max_unread_s
        since_s = listener.backpressure_since_s
        since_s[slots] = np.where(is_full & ~listener.has_backpressure[slots], now_s, since_s[slots])
        listener.has_backpressure[slots] |= is_full

    def _record_latency(self, frames: float, took_s: float) -> None:
        """Iterations are uneven, since some prefill a prompt: a long one is remembered for about twenty
        deliveries."""
        self.timing.latency_s = max(0.9 * self.timing.latency_s, took_s)
        if self.timing.window_cost is not None and frames:
            self.timing.window_cost.record(frames, took_s)

    def consume(self, slot: int, frames: int, now_s: float) -> None:
        """Record that a listener consumed so many of the delivered frames. One that was paused by
        backpressure continues at half of its limit, and has that audio to play."""
        listener = self.slots.listener
        listener.num_unread[slot] = max(listener.num_unread[slot] - frames, 0)
        left_s = listener.num_unread[slot] * listener.frame_s[slot]
        if listener.has_backpressure[slot] and left_s <= self.max_unread_s / 2:
            listener.release(slot)
            listener.plays_until_s[slot] = max(listener.plays_until_s[slot], now_s + left_s)

    def finished_slots(self) -> np.ndarray:
        """Return the slots that are done and wholly delivered, ascending. [B]"""
        if not self.slots.tape.is_done.any():
            return NOBODY
        return np.flatnonzero(self.snapshot(0.0).is_finished)

    # how things stand

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done before more text, or a next pass, arrives."""
        return bool(self.snapshot(0.0).is_resting.all())

    def waits_to_render(self, slot: int) -> bool:
        """Return whether a slot has frames that could be rendered if it had pages."""
        now = self.snapshot(0.0)
        is_left = (now.known > self.slots.tape.num_rendered) | now.has_held_samples
        return bool((is_left & self.slots.cannot_render)[slot])

    def runs_dry_in_s(self, now_s: float) -> float:
        """Return the seconds until the first listener runs dry; -inf where one has heard nothing yet, inf
        without listeners.
        """
        return self.policy.runs_dry_in_s(self.snapshot(now_s))

    def is_in_need(self, now_s: float) -> bool:
        """Return whether a listener has heard nothing yet, or is about to run dry."""
        return self.runs_dry_in_s(now_s) <= self.timing.service_s

    def has_time(self, now_s: float) -> bool:
        """Return whether some iterations may be left out, and no listener would be in need after them."""
        spare_s = FIRST_WINDOW_ITERATIONS * self.timing.iteration_s
        return self.runs_dry_in_s(now_s) > self.timing.service_s + spare_s

    def buffered_s(self, now_s: float) -> np.ndarray:
        """Return the audio that each listener has not played, on the tape included. [S]"""
        return self.snapshot(now_s).buffered_s

    def is_quiet(self, now_s: float) -> np.ndarray:
        """Return which slots wait for text while their listeners have played all audio. [S]"""
        return self.slots.is_starved & (self.buffered_s(now_s) <= 0)

    @property
    def num_underruns(self) -> int:
        """Underruns of all listeners since the start."""
        return self.past_underruns + int(self.slots.listener.num_underruns.sum())

    @property
    def frames_left(self) -> np.ndarray:
        """Frames that each listener's slot is expected to make, in later passes too, at least one. [B]"""
        slots, tape = self.slots, self.slots.tape
        goes_on = slots.is_occupied & ~slots.listener.is_flexible & ~(tape.is_done & tape.is_final)
        return np.maximum(tape.num_expected[goes_on] - tape.num_ready[goes_on], 1.0)

    @property
    def tokens_left(self) -> int:
        """Prompt positions that are not filled."""
        is_asked = self.slots.is_occupied & ~self.slots.listener.is_flexible
        return int(self.slots.prompt.num_left[is_asked].sum())
