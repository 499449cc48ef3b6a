"""Time policy: who runs next, by deadline. One turn of the engine asks, in this order:

    next_chunks(now)       startup goes first: the next stretch of the prompts that wait, the shortest first, bounded by the policy;
                           who waits counts as shorter from turn to turn, so that no prompt is passed for ever. Where a turn takes
                           most of a frame, prompts wait for a time while somebody who listens has next to nothing in hand
    decoding_slots()       then every speaker takes one step, so a long prompt costs the others one bounded chunk per turn
    take_due_windows(now)  the windows of the tape that are due, the nearest deadline first; who waits for first audio has none to lose,
                           and whose listener has time may be left to a later turn

What is known of a slot is one row in vectors by slot, and a turn is arithmetic on whole vectors: its cost
does not grow with the number of speakers. The clock is an argument, so the same calls give the same answers.
Idea of a policy on one screen: GeeeekExplorer/nano-vllm, nanovllm/engine/scheduler.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serving.engine.deadlines import Listeners, WindowCost, next_window
from serving.engine.launches import Chunk, Render
from serving.engine.policy import AGEING, FIRST_TURNS, JOINED, PATIENCE, PATIENT_TURNS, Policy
from zoo.contract import Window

UNBOUNDED = np.iinfo(np.int64).max


class Scheduler:
    """The state of every slot, as far as time is concerned. frame_s: a frame's length; lanes: prompts of a
    slot, all of which are prefilled before it decodes; chunk_tokens: prompts are cut at its multiples,
    whoever else is prefilled, None: as there is room.

    A slot's frames pass three counters: ready (on the tape, reported), rendered (handed to a launch),
    delivered (given to the listener). The listener plays from the first delivery on, and `plays_until_s` is
    when all that was delivered is played (-inf before the first). A delivery that comes later than that is an
    underrun, and playback goes on from there. A listener who says what it takes may leave max_unread_s of audio; then its
    slot is held back: in no launch, until half of that is taken. A slot whose text is still arriving takes `steps_left` steps
    and then starves: it is in no launch, and what it has spoken is rendered.
    prefill_turns: where a launch of a few positions takes nearly as long as one of many, from one to the next while others
    speak. hold_s: the most audio that the renderer keeps back. is_one_by_one: windows of several slots take as long together as
    one after the other, and steps wait for them; then a turn has one, and serving/engine/deadlines.py says whose.
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
        prefill_turns: int = 1,
        hold_s: float = 0.0,
        is_one_by_one: bool = False,
    ):
        assert num_slots > 0 and frame_s > 0, (
            f"{num_slots} slots of {frame_s} s a frame, more than 0 of both expected"
        )
        sizes = window.sizes
        assert sizes and sizes[0] > 0 and all(np.diff(sizes) > 0), (
            f"window sizes {sizes}, ascending frame counts expected"
        )
        assert not any(size % window.grid for size in sizes), (
            f"window sizes {sizes}, multiples of the grid {window.grid} expected"
        )
        assert window.lookahead >= 0, f"a lookahead of {window.lookahead} frames"
        self.policy, self.chunk_tokens, self.max_unread_s = policy, chunk_tokens, max_unread_s
        self.prefill_turns, self.next_prefill_turn = prefill_turns, 0
        self.frame_s, self.hold_s = frame_s, hold_s
        self.is_one_by_one, self.window_cost = is_one_by_one, WindowCost()
        self.heard_frame_s = np.full(num_slots, frame_s)  # as long as each listener hears a frame
        self.window = window
        self.sizes = np.array(sizes)
        # slots whose prompt is not wholly prefilled, in order of arrival, and the turn of that
        self.waiting: dict[int, int] = {}
        self.turn = 0
        self.is_open = np.zeros(num_slots, bool)
        self.is_decoding = np.zeros(num_slots, bool)
        self.is_done = np.zeros(num_slots, bool)
        self.is_flushed = np.zeros(num_slots, bool)  # whether the window that ends the speech was handed out
        self.is_over = np.zeros(num_slots, bool)  # whether it was delivered
        self.is_paused = np.zeros(
            num_slots, bool
        )  # without pages: it takes no step, and what it has spoken is rendered
        # whether it is for when nobody else is in need; whether that is now
        self.is_flex = np.zeros(num_slots, bool)
        self.is_flex_time = True
        # Of listeners who say what they took (`read`): whether it is one, the frames not taken, since when it is held back.
        self.is_metered = np.zeros(num_slots, bool)
        self.num_unread = np.zeros(num_slots, np.int64)
        self.is_held = np.zeros(num_slots, bool)
        self.held_s = np.full(num_slots, np.inf)
        # whether windows are cut by frame number, not by the clock
        self.is_pinned = np.zeros(num_slots, bool)
        self.steps_left = np.full(num_slots, UNBOUNDED)
        self.grid_offset = np.zeros(num_slots, np.int64)
        self.expected_frames = np.zeros(num_slots)
        self.prompt_tokens = np.zeros((num_slots, lanes), np.int64)
        self.num_prefilled = np.zeros((num_slots, lanes), np.int64)
        self.num_ready = np.zeros(num_slots, np.int64)
        self.num_rendered = np.zeros(num_slots, np.int64)
        self.num_delivered = np.zeros(num_slots, np.int64)
        self.num_underruns = np.zeros(num_slots, np.int64)
        self.late_in_a_row = np.zeros(num_slots, np.int64)  # deliveries, the last one included
        self.past_underruns = 0  # of slots' earlier tenants
        self.num_passed = np.zeros(num_slots, np.int64)  # windows of others since its first one was due
        self.plays_until_s = np.full(num_slots, -np.inf)
        self.latency_s = 0.0  # of a window, from when it is handed out to its listener, as measured of late
        self.turn_s = 0.0  # that a turn of those who speak is expected to take; 0: nobody knows
        self.other_s = 0.0  # of it, what other models take
        self.step_s = 0.0  # of it, without windows

    def open(
        self,
        slot: int,
        prompt_tokens: int | Sequence[int],
        skip: int | Sequence[int] = 0,
        *,
        grid_offset: int = 0,
        steps: int | None = None,
        is_pinned: bool = False,
        plays_until_s: float = -np.inf,
        expected_frames: float = 0.0,
        unread_frames: int | None = None,
        is_flex: bool = False,
        speed: float = 1.0,
    ) -> None:
        """A request moves in. prompt_tokens: positions to fill before its first step; skip: those that shared
        pages already hold. Either is a number for each lane, or one for all. steps: that its text allows so
        far, None: all of the text is there. plays_until_s: of a listener who has heard an earlier pass. expected_frames:
        that its speech will have, as far as anybody knows. unread_frames: of earlier passes, that its listener has not
        taken; None: it does not say. is_flex: it is served while nobody else waits for first audio or is at risk. speed: at
        which its listener plays."""
        assert not self.is_open[slot], f"slot {slot} is opened, but it is in use"
        skipped, tokens = np.asarray(skip), np.asarray(prompt_tokens)
        assert ((skipped >= 0) & (skipped <= tokens)).all(), f"{skip} of {prompt_tokens} positions skipped"
        self.is_open[slot] = True
        self.past_underruns += int(self.num_underruns[slot])
        self.is_decoding[slot] = (skipped == tokens).all()
        self.is_done[slot] = self.is_flushed[slot] = self.is_over[slot] = self.is_paused[slot] = False
        self.is_pinned[slot] = is_pinned
        self.steps_left[slot] = UNBOUNDED if steps is None else steps
        self.grid_offset[slot] = grid_offset
        self.prompt_tokens[slot], self.num_prefilled[slot] = tokens, skipped
        self.num_ready[slot] = self.num_rendered[slot] = self.num_delivered[slot] = self.num_underruns[
            slot
        ] = 0
        self.late_in_a_row[slot] = self.num_passed[slot] = 0
        self.plays_until_s[slot] = plays_until_s
        self.expected_frames[slot] = expected_frames
        self.is_metered[slot], self.num_unread[slot] = unread_frames is not None, unread_frames or 0
        self.is_held[slot], self.held_s[slot] = False, np.inf
        self.is_flex[slot], self.heard_frame_s[slot] = is_flex, self.frame_s / speed
        self.is_flex_time &= is_flex or self.policy.at_risk_s is None
        if not self.is_decoding[slot]:
            self.waiting[slot] = self.turn

    def close(self, slot: int) -> None:
        """The request is gone, finished or cancelled at any point; the slot asks for nothing any more."""
        assert self.is_open[slot], f"slot {slot} is closed, but it is not in use"
        self.is_open[slot] = self.is_decoding[slot] = self.is_done[slot] = self.is_paused[slot] = False
        self.is_held[slot], self.held_s[slot] = False, np.inf
        self.num_rendered[slot] = self.num_ready[slot]  # nothing is pending
        self.waiting.pop(slot, None)

    @property
    def max_prefill_tokens(self) -> int:
        """Of one turn."""
        return self.policy.prefill_tokens + (self.chunk_tokens or 1) - 1

    @property
    def underruns(self) -> int:
        """Since the start, of everybody."""
        return self.past_underruns + int(self.num_underruns.sum())

    def ahead_s(self, now: float) -> np.ndarray:
        """The audio that each listener has not played yet, made or on the tape. [S]"""
        heard_s = np.maximum(self.plays_until_s - now, self.num_unread * self.heard_frame_s)
        heard_s = np.where(self.is_flex, np.inf, heard_s)  # nobody waits for it
        return heard_s + (self.num_ready - self.num_delivered) * self.heard_frame_s

    @property
    def frames_left(self) -> np.ndarray:
        """That those who speak are expected to make, at least one. [B]"""
        speaks = self.is_open & ~self.is_done & ~self.is_flex
        return np.maximum(self.expected_frames[speaks] - self.num_ready[speaks], 1.0)

    @property
    def shortest_frame_s(self) -> float:
        """Of those who speak, as the fastest listener plays it."""
        return float(
            self.heard_frame_s[self.is_open & ~self.is_done & ~self.is_flex].min(initial=self.frame_s)
        )

    @property
    def tokens_left(self) -> int:
        """Positions of prompts that are not filled."""
        return int((self.prompt_tokens - self.num_prefilled)[self.is_open & ~self.is_flex].sum())

    @property
    def first_frames(self) -> int:
        """Of a tape, before its first window is due."""
        return int(self.sizes[0]) + self.window.lookahead

    def next_chunks(self, now: float = -math.inf, prefill_s: float = 0.0) -> list[Chunk]:
        """The prompt positions of this turn, at most policy.prefill_tokens of them; short prompts share a
        turn, long ones take several. A slot's lanes are filled one after the other. now: without it everybody who listens
        has enough to play; prefill_s: that the positions are likely to take."""
        chunks: list[Chunk] = []
        left = self.policy.prefill_tokens
        self.turn += 1
        if self._waits_for_more() or self._waits_for_others(now, prefill_s):
            return chunks
        for slot in self._prefill_order():
            for lane, (start, end) in enumerate(
                zip(self.num_prefilled[slot].tolist(), self.prompt_tokens[slot].tolist(), strict=True)
            ):
                stop = self._chunk_end(start, end, left)
                if start < stop:
                    chunks.append(Chunk(slot, start, stop, is_last=stop == end, lane=lane))
                    left -= stop - start
            if left <= 0:
                break
        if chunks:
            self.next_prefill_turn = self.turn + self.prefill_turns
        return chunks

    def _waits_for_more(self) -> bool:
        """Whether prompts are so few, and so early behind the last ones, that those who speak go on without them."""
        if self.turn >= self.next_prefill_turn or not self.waiting:
            return False
        slots = list(self.waiting)
        left = int((self.prompt_tokens[slots] - self.num_prefilled[slots]).sum())
        return left < self.policy.prefill_tokens and self.decoding_slots().size > 0

    def _waits_for_others(self, now: float, prefill_s: float) -> bool:
        """Whether somebody who listens would be in need soon after a turn that fills prompts: where turns are long, one newcomer
        after the other would leave nothing to those who came before. Only for so many turns, so that nobody waits for ever."""
        came = [turn for slot, turn in self.waiting.items() if not self.is_flex[slot]]
        if not came or not self.has_long_turns or self.turn - min(came) > PATIENT_TURNS:
            return False
        listens = (self.num_rendered > 0) & ~self._rests() & ~self.is_flex  # [S]
        needed_s = self._lead_s() + self.turn_s + max(self.turn_s, prefill_s)
        return self._left_s(now)[listens].min(initial=math.inf) < needed_s

    def _prefill_order(self) -> list[int]:
        slots = [slot for slot in self.waiting if self.is_flex_time or not self.is_flex[slot]]
        if not self.policy.is_timed:
            return slots
        left = (self.prompt_tokens - self.num_prefilled).sum(1)  # [S]

        def key(slot: int) -> tuple[bool, int]:
            return bool(self.is_flex[slot]), int(left[slot]) - AGEING * (self.turn - self.waiting[slot])

        return sorted(slots, key=key)

    def _chunk_end(self, start: int, end: int, left: int) -> int:
        """Of a stretch with room for `left` positions; the room is not kept to where chunks are cut in equal
        lengths."""
        if self.chunk_tokens is None:
            return min(start + left, end)
        return start if left <= 0 else min(start - start % self.chunk_tokens + self.chunk_tokens, end)

    def record_prefill(self, chunk: Chunk) -> None:
        """The chunk is launched. After the last one of all its lanes the slot decodes."""
        slot, start = chunk.slot, self.num_prefilled[chunk.slot, chunk.lane]
        assert slot in self.waiting and start == chunk.start, (
            f"{chunk} is launched, but slot {slot} has {start} positions"
        )
        self.num_prefilled[slot, chunk.lane] = chunk.stop
        if (self.num_prefilled[slot] == self.prompt_tokens[slot]).all():
            del self.waiting[slot]
            self.is_decoding[slot] = True

    def decoding_slots(self) -> np.ndarray:
        """The slots that take a step now, ascending. [B]"""
        rests = self.is_done | self.is_paused | self.is_held
        if not self.is_flex_time:
            rests = rests | self.is_flex
        return np.flatnonzero(self.is_decoding & ~rests & (self.steps_left > 0))

    def record_step(self, slots: np.ndarray) -> None:
        """A step of `slots` [B] is launched."""
        bounded = slots[self.steps_left[slots] < UNBOUNDED]
        self.steps_left[bounded] -= 1

    def has_all_text(self, slot: int) -> bool:
        """Whether no more text can come."""
        return bool(self.steps_left[slot] == UNBOUNDED)

    def feed(self, slot: int, steps: int | None) -> None:
        """More text arrived, which allows so many more steps; None: it was the last of it."""
        self.steps_left[slot] = UNBOUNDED if steps is None else self.steps_left[slot] + steps

    @property
    def is_starved(self) -> np.ndarray:
        """Which slots wait for text. [S]"""
        return self.is_decoding & ~self.is_done & (self.steps_left <= 0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done before more text, or a next pass, arrives."""
        return bool(self._rests().all())

    def _rests(self) -> np.ndarray:
        """Which slots nothing is to be done for, as far as is known. [S]"""
        is_waiting = (self.is_starved | self.is_paused) & (self._renderable() <= self.num_rendered)
        return ~self.is_open | is_waiting | self.is_held | self._is_finished()

    def dry_in_s(self, now: float) -> float:
        """Until the first of those who listen runs dry, below 0 where it has; -inf where somebody has heard nothing yet, inf
        where nobody listens, or the policy has no regard to time."""
        if not self.policy.is_timed:
            return math.inf
        return float(self._left_s(now)[~self._rests() & ~self.is_flex].min(initial=math.inf))

    def is_in_need(self, now: float) -> bool:
        """Whether somebody has heard nothing yet, or is about to run dry."""
        return self.dry_in_s(now) <= self._lead_s()

    def has_time(self, now: float) -> bool:
        """Whether some turns may be left out, and nobody would be in need after them."""
        return self.dry_in_s(now) > self._lead_s() + FIRST_TURNS * self.turn_s

    def read(self, slot: int, frames: int, now: float) -> None:
        """A listener took so many of the frames that were delivered. One that was held back goes on when half of what it
        may leave is left, and has that to play."""
        self.num_unread[slot] = max(self.num_unread[slot] - frames, 0)
        left_s = self.num_unread[slot] * self.heard_frame_s[slot]
        if self.is_held[slot] and left_s <= self.max_unread_s / 2:
            self.is_held[slot], self.held_s[slot] = False, np.inf
            self.plays_until_s[slot] = max(self.plays_until_s[slot], now + left_s)

    def report(self, slots: np.ndarray, ready: np.ndarray, done: np.ndarray) -> None:
        """A launch's late report, all [B]: frames on the tape, and whether no more come. Slots that were
        closed since are left out."""
        assert self.is_decoding[slots].all(), (
            f"slots {slots} report, but only {np.flatnonzero(self.is_decoding)} decode"
        )
        self.num_ready[slots] = ready
        self.is_done[slots] = done

    def take_due_windows(self, now: float) -> list[Render]:
        """The windows that are due, one per slot at most and grouped by launch shape, the nearest deadline
        first. All of them are to be launched, in this order: they count as rendered from here on."""
        pending = self._renderable() - self.num_rendered  # [S], below 0 where even less is known
        left_s = self._left_s(now)  # [S]
        self.is_flex_time = self._is_flex_time(left_s)
        is_dry = self._is_dry(pending, left_s)
        is_flush = self._needs_flush()
        is_due = (self._is_due(pending, left_s) | is_dry | is_flush) & ~self.is_held
        if self.is_one_by_one and self.policy.is_timed:
            slots, count = self._one_window(is_due, is_flush, pending, left_s)  # [B], [B]
        else:
            joins = self._joins(is_due, pending, left_s)
            is_due |= joins
            slots = np.flatnonzero(is_due & ~self._may_wait(is_due, left_s))  # [B]
            count = np.where(
                is_flush[slots], 0, self._cut(slots, pending[slots], (is_dry | joins)[slots])
            )  # [B]
        start = self.num_rendered[slots]  # [B]
        self.num_rendered[slots] += count
        is_last = self.is_done[slots] & (start + count == self.num_ready[slots])  # [B]
        self.is_flushed[slots] = is_last
        renders = self._grouped(slots, start, count, is_last, now)
        if self.policy.is_fifo:
            return renders
        return sorted(renders, key=lambda render: left_s[render.slots].min())

    def _one_window(
        self, is_due: np.ndarray, is_flush: np.ndarray, pending: np.ndarray, left_s: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next one, those that follow from frame numbers alone, and those without frames -> slots, ascending [B], frames of
        each [B]."""
        listeners = self._listeners(is_due & ~is_flush, pending, left_s)
        slots = np.flatnonzero(is_flush | (is_due & self.is_pinned))
        count = np.where(is_flush[slots], 0, self._cut(slots, pending[slots], np.zeros(len(slots), bool)))
        least, most = max(int(self.sizes[0]), self.window.grid), int(self.sizes[-1])
        found = next_window(listeners, self.window_cost, least, most, self.step_s)
        if found is None:
            return slots, count
        slot = np.array([found[0]])
        self.num_passed += listeners.is_first & (np.arange(len(pending)) != slot)
        frames = self._to_grid(slot, np.minimum(pending[slot], found[1]))
        at = np.searchsorted(slots, slot)
        return np.insert(slots, at, slot), np.insert(count, at, frames)

    def _listeners(self, is_due: np.ndarray, pending: np.ndarray, left_s: np.ndarray) -> Listeners:
        """Those whose windows do not follow from frame numbers alone."""
        is_asked = ~self._rests() & ~self.is_pinned & ~self.is_flex
        is_heard = np.isfinite(self.plays_until_s) | (self.num_rendered > 0)
        is_whole = self.is_done & (self.num_rendered == self.num_ready)
        # The next point of the grid; the first one is where the prompt's codes put it, or a whole stretch away.
        grid, known = self.window.grid, self.num_ready - self.window.lookahead - self.grid_offset
        next_point = self.grid_offset + np.maximum(known // grid + 1, self.grid_offset == 0) * grid
        missing = next_point + self.window.lookahead - self.num_ready
        return Listeners(
            left_s=np.where(self.is_flex, np.inf, left_s),
            pending=pending,
            missing=np.where(pending > 0, 0, missing),
            plays=is_asked & is_heard & ~is_whole,
            is_first=is_asked & ~is_heard & is_due,
            passed=self.num_passed,
            is_due=is_due & ~self.is_pinned,
            is_done=self.is_done | self.is_starved,
            has_newcomers=bool((is_asked & ~is_heard).any()),
        )

    def _left_s(self, now: float) -> np.ndarray:
        """The audio that each listener has, and that is being made for it: as good as heard, so the next window need not be
        hurried because of it. [S]"""
        in_flight = self.num_rendered - self.num_delivered
        unread_s = self.num_unread * self.heard_frame_s
        return np.maximum(self.plays_until_s - now, unread_s) + in_flight * self.heard_frame_s

    def _is_flex_time(self, left_s: np.ndarray) -> bool:
        """Whether nobody but flexible requests waits for first audio, or is at risk."""
        if self.policy.at_risk_s is None:
            return True
        in_need = ~np.isfinite(self.plays_until_s) | (left_s < self.policy.at_risk_s)
        rests = self.is_flex | self.is_done | self.is_held | self.is_starved
        return not bool((self.is_open & ~rests & in_need).any())

    def _renderable(self) -> np.ndarray:
        """How far the renderer has all that it reads, and may stop. [S]"""
        known = self.num_ready - np.where(self.is_done, 0, self.window.lookahead)
        if self.window.grid == 1:
            return known
        on_grid = self.grid_offset + (known - self.grid_offset) // self.window.grid * self.window.grid
        return np.where(self.is_done, known, on_grid)

    def _is_due(self, pending: np.ndarray, left_s: np.ndarray) -> np.ndarray:
        """Due is a slot whose frames fill the largest shape, or that is done or starved (the rest goes).
        Where somebody listens, also a slot without audio whose frames fill the smallest shape, and one that
        is at risk whose frames fill the middle shape. [S]"""
        middle, largest = self.sizes[:2][-1], self.sizes[-1]
        if self.policy.is_fifo:
            middle = self._even_size()
        is_due = (pending >= largest) | ((self.is_done | self.is_starved) & (pending > 0))
        if self.policy.at_risk_s is None:
            return is_due
        is_first = self.num_rendered == 0
        hurried = is_first & (pending >= self._first_size())
        hurried |= (left_s < self.policy.at_risk_s) & (pending >= np.maximum(middle, self._least()))
        in_order = pending >= self._pinned_size()
        return is_due | np.where(self.is_pinned, in_order, hurried)

    def _first_size(self) -> int:
        """Of who listens and has heard nothing: the smallest shape, where turns are short. Where one takes most of a frame, whoever
        is given a frame has played it before the next is made: then as many as last for some turns, up to the middle shape.
        What other models take counts once: whose listeners are in need goes first, and others that have time let it pass.
        Without regard to time all are alike: one frame and then four is late wherever four turns take longer than a frame."""
        smallest, middle = int(self.sizes[0]), int(self.sizes[:2][-1])
        if self.policy.is_fifo:
            return self._even_size()
        grid, own_s = self.window.grid, self.turn_s - self.other_s
        if grid == 1:
            return max(
                smallest, min(math.ceil((FIRST_TURNS * own_s + self.other_s) / self.frame_s - 0.5), middle)
            )
        # The grid's first stretch may be shorter than any shape: so short that it is played before the next one is there.
        lasts_s = grid * own_s + self.other_s + self.hold_s + self.latency_s
        return min(math.ceil(lasts_s / self.frame_s), grid) if self.latency_s else grid

    def _even_size(self) -> int:
        """Of every window, where nobody's time counts: the middle one, or a stretch of the grid."""
        return int(self.sizes[:2][-1]) if self.window.grid == 1 else self.window.bucket(self.window.grid)

    def _has_waited(self, slots: np.ndarray) -> np.ndarray:
        """Whose first window was not cut as soon as the smallest shape was full: it is to last. [B]"""
        least = self.sizes[0] if self.window.grid == 1 else 1
        is_long = self.policy.at_risk_s is not None and self._first_size() > least
        return (self.num_rendered[slots] == 0) & ~self.is_pinned[slots] & is_long

    def _is_dry(self, pending: np.ndarray, left_s: np.ndarray) -> np.ndarray:
        """Whose listener is about to run dry, and has a frame to go on with. [S]"""
        if not self.policy.is_timed:
            return np.zeros(len(pending), bool)
        is_dry = (self.num_rendered > 0) & (left_s <= self._lead_s()) & (pending >= self._least())
        return is_dry & ~self.is_pinned

    def _joins(self, is_due: np.ndarray, pending: np.ndarray, left_s: np.ndarray) -> np.ndarray:
        """Who has nearly as many frames as the middle shape, where turns are long and a window of that shape is due: from then on
        their windows fall into one turn, and one launch of three takes less than three. [S]"""
        enough = math.ceil(JOINED * int(self.sizes[:2][-1]))
        if not self.has_long_turns or not (is_due & (pending >= enough)).any():
            return np.zeros(len(pending), bool)
        is_on = (self.num_rendered > 0) & ~self.is_pinned & ~self.is_held
        return is_on & (pending >= enough) & (left_s < self.policy.at_risk_s)

    @property
    def has_long_turns(self) -> bool:
        """Whether a turn takes so much of a frame that one frame is too little for first audio."""
        return self.policy.is_timed and self._first_size() > self.sizes[0]

    def _least(self) -> np.ndarray:
        """The fewest frames worth a window. Who is late time after time is late for want of speed, and is
        only helped by larger shapes, which cost less a frame. [S]"""
        least = self.sizes[np.minimum(self.late_in_a_row // PATIENCE, len(self.sizes) - 1)]
        least[self.late_in_a_row < PATIENCE] = 1
        return least

    def _pinned_size(self) -> np.ndarray:
        """The next window where windows follow from frame numbers alone: first audio early, then full ones.
        [S]"""
        smallest, middle, largest = self.sizes[0], self.sizes[:2][-1], self.sizes[-1]
        if self.policy.at_risk_s is None:
            return np.full(len(self.num_rendered), largest)
        size = np.where(self.num_rendered < largest, middle, largest)
        return np.where(self.num_rendered == 0, smallest, size)

    def _may_wait(self, is_due: np.ndarray, left_s: np.ndarray) -> np.ndarray:
        """Whose window is left to a later turn, since its listener has time: where many of the largest fall into one turn, all
        others would hear it. Of such the nearest deadlines go, twice as many as are filled in a turn on the average. [S]"""
        may_wait = np.zeros(len(is_due), bool)
        if not self.policy.is_timed:
            return may_wait
        patient = np.flatnonzero(is_due & (self.num_rendered > 0) & (left_s >= self.policy.at_risk_s))  # [B]
        num_now = int(np.ceil(2 * self.is_open.sum() / self.sizes[-1]))
        may_wait[patient[np.argsort(left_s[patient], kind="stable")][num_now:]] = True
        return may_wait

    def _needs_flush(self) -> np.ndarray:
        """Whose frames were all handed out before it was known that no more come, while the renderer keeps
        samples back. [S]"""
        if not self.window.hold_samples:
            return np.zeros(len(self.is_done), bool)
        return self.is_done & (self.num_rendered == self.num_ready) & ~self.is_flushed & (self.num_ready > 0)

    def _cut(self, slots: np.ndarray, pending: np.ndarray, is_dry: np.ndarray) -> np.ndarray:
        """How many frames of each slot go into its window. [B]

        Who is done, starved or dry gets all there is, padded up to a shape, unless that is more than twice
        the work of several smaller ones: then one of those, and soon the next. The others are due because
        they fill a shape, and can wait for what is left over, so the renderer computes nothing in vain. The
        work of a shape is its frames, and those around it that are read as well.
        """
        around = self.window.left + self.window.lookahead
        largest = np.where(self.is_pinned[slots], self._pinned_size()[slots], self.sizes[-1])
        there = np.minimum(pending, largest)
        padded = self.sizes[np.searchsorted(self.sizes, np.maximum(there, 1))]  # [B]
        # [B], where there is enough for any
        full = self.sizes[np.maximum(np.searchsorted(self.sizes, there, side="right") - 1, 0)]
        is_worth = (padded + around <= 2 * -(-there // full) * (full + around)) | (there < self.sizes[0])
        takes_all = self.is_done[slots] | self.is_starved[slots] | is_dry | self._has_waited(slots)
        return self._to_grid(slots, np.minimum(np.where(takes_all & is_worth, there, full), pending))

    def _to_grid(self, slots: np.ndarray, count: np.ndarray) -> np.ndarray:
        """Frames of each, down to the grid's last point, unless the speech ends with them. [B]"""
        if self.window.grid == 1:
            return count
        stop, offset, grid = self.num_rendered[slots] + count, self.grid_offset[slots], self.window.grid
        is_end = self.is_done[slots] & (stop == self.num_ready[slots])
        return np.where(is_end, count, offset + (stop - offset) // grid * grid - self.num_rendered[slots])

    def _grouped(
        self, slots: np.ndarray, start: np.ndarray, count: np.ndarray, is_last: np.ndarray, now: float
    ) -> list[Render]:
        """One launch for each shape."""
        frames = self.sizes[np.searchsorted(self.sizes, np.maximum(count, 1))]  # [B]
        lengths = np.array(self.window.lengths or (0,))
        length = lengths[np.searchsorted(lengths, np.minimum(start + count, lengths[-1]))]  # [B]
        shapes = np.stack((frames, length, self.is_pinned[slots]), 1)  # [B, 3]
        renders = []
        for shape in np.unique(shapes, axis=0):
            rows = np.flatnonzero((shapes == shape).all(1))
            render = Render(
                slots[rows],
                start[rows],
                count[rows],
                is_last[rows],
                int(shape[0]),
                now,
                int(shape[1]),
                bool(shape[2]),
            )
            renders.append(render)
        return renders

    def record_delivery(
        self,
        slots: np.ndarray,
        count: np.ndarray,
        given_s: np.ndarray,
        is_last: np.ndarray,
        handed_s: float,
        now: float,
    ) -> None:
        """Frames were given to the listeners, as `given_s` seconds of audio, all [B]; each slot once, and
        those that were closed since are left out. is_last: the speech ended with them. handed_s: when their
        window was handed out."""
        until_s = self.plays_until_s[slots]
        is_late = np.isfinite(until_s) & (until_s < now) & (self.num_unread[slots] == 0)
        self.num_underruns[slots] += is_late
        self.late_in_a_row[slots] = np.where(is_late, self.late_in_a_row[slots] + 1, 0)
        heard_s = given_s * self.heard_frame_s[slots] / self.frame_s
        self.plays_until_s[slots] = np.maximum(until_s, now) + heard_s
        self.num_delivered[slots] += count
        self.num_unread[slots] += np.where(self.is_metered[slots], count, 0)
        is_full = self.num_unread[slots] * self.heard_frame_s[slots] >= self.max_unread_s
        self.held_s[slots] = np.where(is_full & ~self.is_held[slots], now, self.held_s[slots])
        self.is_held[slots] |= is_full
        self.is_over[slots] |= is_last
        # Turns are uneven, since some prefill a prompt: a long one is remembered for about twenty deliveries.
        self.latency_s = max(0.9 * self.latency_s, now - handed_s)
        if self.is_one_by_one and count.any():
            self.window_cost.record(float(count.sum()), now - handed_s)
        over = slots[self.num_delivered[slots] > self.num_rendered[slots]]
        assert not over.size, (
            f"slots {over}: {self.num_delivered[over]} frames delivered, {self.num_rendered[over]} rendered"
        )

    def finished_slots(self) -> np.ndarray:
        """The slots that are done and wholly delivered, ascending. [B]"""
        return np.flatnonzero(self._is_finished())

    def _is_finished(self) -> np.ndarray:
        is_whole = self.is_over | (self.num_ready == 0) | (self.window.hold_samples == 0)
        return self.is_done & (self.num_delivered == self.num_ready) & is_whole

    def _lead_s(self) -> float:
        """With less than this left, a listener who is not served in this turn may hear a gap: the next turn
        comes up to a latency later, or as late as a turn takes, and its audio another latency later. Never less
        than a frame."""
        return max(self.frame_s, self.latency_s + max(self.latency_s, self.turn_s))
