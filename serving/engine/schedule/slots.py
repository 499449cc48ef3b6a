"""State: one row for every slot.

Decisions read it (snapshot.py, policy.py) and only the scheduler writes it (scheduler.py). A step is
arithmetic on whole vectors, so its cost does not grow with the number of streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.protocol import Listener

UNBOUNDED = np.iinfo(np.int64).max  # steps of a slot whose text is complete


class PromptRows:
    """How far each slot's prompt is prefilled. A slot decodes once all its lanes are."""

    def __init__(self, num_slots: int, lanes: int):
        self.num_tokens = np.zeros((num_slots, lanes), np.int64)  # [S, L]
        self.num_prefilled = np.zeros((num_slots, lanes), np.int64)  # [S, L]
        # Slots whose prompts are not filled, in order of arrival, and the iteration in which each arrived.
        self.queue: dict[int, int] = {}

    @property
    def num_left(self) -> np.ndarray:
        """Positions that are not filled. [S]"""
        return (self.num_tokens - self.num_prefilled).sum(1)

    @property
    def is_first_filled(self) -> np.ndarray:
        """Which slots' first lanes are filled, while another one is not. [S]"""
        is_queued = np.zeros(len(self.num_tokens), bool)
        is_queued[list(self.queue)] = True
        return is_queued & (self.num_prefilled[:, 0] == self.num_tokens[:, 0])


class TapeRows:
    """Frames of each slot. They pass three counters: ready (on the tape, reported), rendered (handed to a
    launch), delivered."""

    def __init__(self, num_slots: int):
        self.num_ready = np.zeros(num_slots, np.int64)
        self.num_rendered = np.zeros(num_slots, np.int64)
        self.num_delivered = np.zeros(num_slots, np.int64)
        self.is_done = np.zeros(num_slots, bool)  # no more frames come
        self.is_end_rendered = np.zeros(num_slots, bool)  # the window that ends the speech was launched
        self.is_end_delivered = np.zeros(num_slots, bool)
        self.grid_offset = np.zeros(num_slots, np.int64)
        self.num_expected = np.zeros(num_slots)
        self.is_final = np.ones(num_slots, bool)  # no pass follows

    def open(self, slot: int, grid_offset: int, num_expected: float, is_final: bool) -> None:
        for counter in (self.num_ready, self.num_rendered, self.num_delivered):
            counter[slot] = 0
        for fact in (self.is_done, self.is_end_rendered, self.is_end_delivered):
            fact[slot] = False
        self.grid_offset[slot] = grid_offset
        self.num_expected[slot] = num_expected
        self.is_final[slot] = is_final

    def close(self, slot: int) -> None:
        self.is_done[slot] = False
        self.num_rendered[slot] = self.num_ready[slot]  # nothing is pending


class ListenerRows:
    """The audio of each listener. It plays from the first delivery on, and `plays_until_s` is when it has
    played all (-inf before the first). A later delivery is an underrun, and playback continues from there.

    A metered listener reports the frames
    that it consumed; if too many are unread, its slot is paused by backpressure.
    """

    def __init__(self, num_slots: int, frame_s: float):
        self.frame_s = np.full(num_slots, frame_s)  # a frame's length at the listener's speed
        self.plays_until_s = np.full(num_slots, -np.inf)
        self.num_underruns = np.zeros(num_slots, np.int64)
        self.num_late_in_a_row = np.zeros(num_slots, np.int64)  # deliveries, the last one included
        self.num_skipped = np.zeros(num_slots, np.int64)  # windows of others since its first one was due
        self.is_flexible = np.zeros(num_slots, bool)
        self.is_reproducible = np.zeros(num_slots, bool)
        self.is_metered = np.zeros(num_slots, bool)
        self.num_unread = np.zeros(num_slots, np.int64)
        self.has_backpressure = np.zeros(num_slots, bool)
        self.backpressure_since_s = np.full(num_slots, np.inf)

    def open(self, slot: int, listener: Listener, frame_s: float) -> None:
        self.frame_s[slot] = frame_s / listener.speed
        self.plays_until_s[slot] = -np.inf
        self.num_underruns[slot] = 0
        self.num_late_in_a_row[slot] = 0
        self.num_skipped[slot] = 0
        self.is_flexible[slot] = listener.is_flexible
        self.is_reproducible[slot] = listener.is_reproducible
        self.is_metered[slot] = listener.is_metered
        self.num_unread[slot] = 0
        self.release(slot)

    def play(self, slots: np.ndarray, given_s: np.ndarray | float, now_s: float, frame_s: float) -> None:
        """Give listeners [B] `given_s` [B] more seconds of audio to play. frame_s: a frame's length at speed
        1."""
        heard_s = given_s * self.frame_s[slots] / frame_s
        self.plays_until_s[slots] = np.maximum(self.plays_until_s[slots], now_s) + heard_s

    def release(self, slot: int) -> None:
        """End the backpressure."""
        self.has_backpressure[slot] = False
        self.backpressure_since_s[slot] = np.inf

    @property
    def unread_s(self) -> np.ndarray:
        """[S]"""
        return self.num_unread * self.frame_s


class Slots:
    """All rows. A slot whose text is still arriving takes `steps_left` steps and then starves: it takes no
    step, and its frames are rendered. A slot that lacks pages takes no step either; if the renderer reads its
    past from them, its frames wait, too."""

    def __init__(self, num_slots: int, frame_s: float, lanes: int, renders_from_pages: bool):
        self.num_slots = num_slots
        self.renders_from_pages = renders_from_pages
        self.is_occupied = np.zeros(num_slots, bool)
        self.is_decoding = np.zeros(num_slots, bool)
        self.lacks_pages = np.zeros(num_slots, bool)
        self.steps_left = np.full(num_slots, UNBOUNDED)
        self.prompt = PromptRows(num_slots, lanes)
        self.tape = TapeRows(num_slots)
        self.listener = ListenerRows(num_slots, frame_s)

    def begin_pass(
        self, slot: int, tokens: int | Sequence[int], skipped: int | Sequence[int], iteration: int
    ) -> None:
        """tokens: positions of each lane's prompt; skipped: those that shared pages already hold."""
        start = np.asarray(skipped)
        stop = np.asarray(tokens)
        assert ((start >= 0) & (start <= stop)).all(), f"{skipped} of {tokens} positions skipped"
        self.is_occupied[slot] = True
        self.listener.num_skipped[slot] = 0
        self.is_decoding[slot] = (start == stop).all()
        self.lacks_pages[slot] = False
        self.prompt.num_tokens[slot] = stop
        self.prompt.num_prefilled[slot] = start
        if not self.is_decoding[slot]:
            self.prompt.queue[slot] = iteration

    def open_lane(self, slot: int, lane: int, tokens: int, skip: int, iteration: int) -> None:
        """As `begin_pass`, for another lane of a slot that decodes."""
        assert 0 <= skip <= tokens, f"{skip} of {tokens} positions skipped"
        self.prompt.num_tokens[slot, lane] = tokens
        self.prompt.num_prefilled[slot, lane] = skip
        if skip < tokens:
            self.is_decoding[slot] = False
            self.prompt.queue[slot] = iteration

    def close(self, slot: int) -> None:
        assert self.is_occupied[slot], f"slot {slot} is closed, but it is not in use"
        for fact in (self.is_occupied, self.is_decoding, self.lacks_pages):
            fact[slot] = False
        self.prompt.queue.pop(slot, None)
        self.tape.close(slot)
        self.listener.release(slot)

    @property
    def cannot_render(self) -> np.ndarray:
        """Which slots' frames wait for pages. [S]"""
        return self.lacks_pages & self.renders_from_pages

    @property
    def is_starved(self) -> np.ndarray:
        """Which slots wait for text. [S]"""
        return self.is_decoding & ~self.tape.is_done & (self.steps_left <= 0)

    @property
    def speaks(self) -> np.ndarray:
        """Which slots make audio that a listener waits for. [S]"""
        return self.is_occupied & ~self.tape.is_done & ~self.listener.is_flexible

    def may_step(self, is_flexible_time: bool) -> np.ndarray:
        """Return which slots would take steps if they had pages. [S]"""
        waits = self.tape.is_done | self.listener.has_backpressure | (self.steps_left <= 0)
        if not is_flexible_time:
            waits = waits | self.listener.is_flexible
        return self.is_occupied & ~waits

    def stepping(self, is_flexible_time: bool) -> np.ndarray:
        """Return the slots that take a step now, ascending. [B]"""
        return np.flatnonzero(self.is_decoding & ~self.lacks_pages & self.may_step(is_flexible_time))
