"""The input of a decision: the slots at one moment, and recent timing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.engine.schedule.numbers import GPU_MARGIN_FRAMES
from serving.engine.schedule.render_times import RenderTimes
from serving.engine.schedule.slots import Slots
from serving.engine.schedule.window_cost import WindowCost
from zoo.contract import Window


class Shapes:
    """A window's sizes, as the policies name them."""

    def __init__(self, window: Window):
        sizes = window.sizes
        assert sizes and sizes[0] > 0 and all(np.diff(sizes) > 0), (
            f"window sizes {sizes}, ascending frame counts expected"
        )
        assert not any(size % window.grid for size in sizes), (
            f"window sizes {sizes}, multiples of the grid {window.grid} expected"
        )
        assert window.lookahead >= 0, f"a lookahead of {window.lookahead} frames"
        self.window = window
        self.sizes = np.array(sizes)
        self.smallest = int(sizes[0])
        self.middle = int(sizes[:2][-1])
        self.largest = int(sizes[-1])
        # Of every window, where no listener's time counts: the middle shape, or a stretch of the grid.
        self.even = self.middle if window.grid == 1 else window.bucket(window.grid)

    @property
    def first_frames(self) -> int:
        """Frames on a tape before its first window is due."""
        return (self.window.grid_offset or self.smallest) + self.window.lookahead

    def fitting(self, count: np.ndarray) -> np.ndarray:
        """Return the smallest shape that holds `count` frames. [B]"""
        return self.sizes[np.searchsorted(self.sizes, np.maximum(count, 1))]

    def filled(self, count: np.ndarray) -> np.ndarray:
        """Return the largest shape that `count` frames fill, or the smallest one. [B]"""
        return self.sizes[np.maximum(np.searchsorted(self.sizes, count, side="right") - 1, 0)]


@dataclass
class Timing:
    """Recent measurements in seconds.

    hold_s: the most audio that the renderer keeps back. latency_s: the time from a window's launch to its
    listener. iteration_s: the length of an iteration with all running requests (0: not known).
    other_models_s: the share of other models in it. step_s: the length of an iteration without windows.
    window_cost: times of windows that are rendered one at a time. render_times: times of launches that render
    several windows, on a GPU."""

    frame_s: float
    hold_s: float = 0.0
    latency_s: float = 0.0
    iteration_s: float = 0.0
    other_models_s: float = 0.0
    step_s: float = 0.0
    window_cost: WindowCost | None = None
    render_times: RenderTimes | None = None

    @property
    def service_s(self) -> float:
        """Return how long a listener may wait if it is not served now: until the next iteration, and then a
        window's latency. At least a frame. On a GPU it is more, because steps and renders slow each other
        down."""
        margin_s = 0.0 if self.render_times is None else GPU_MARGIN_FRAMES * self.frame_s
        return margin_s + max(self.frame_s, self.latency_s + max(self.latency_s, self.iteration_s))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The slots at `now_s`. A decision reads it and writes nothing. All vectors are [S]."""

    slots: Slots
    shapes: Shapes
    timing: Timing
    now_s: float
    iteration: int
    is_flexible_time: bool = True

    @cached_property
    def renderable(self) -> np.ndarray:
        """Frame up to which the renderer has all that it reads, and may stop."""
        if not self.slots.renders_from_pages:
            return self.known
        return np.where(self.slots.cannot_render, self.slots.tape.num_rendered, self.known)

    @cached_property
    def known(self) -> np.ndarray:
        """The same, whether or not there are pages."""
        tape, window = self.slots.tape, self.shapes.window
        known = tape.num_ready - np.where(tape.is_done, 0, window.lookahead)
        if window.grid == 1:
            return known
        on_grid = tape.grid_offset + (known - tape.grid_offset) // window.grid * window.grid
        return np.where(tape.is_done, known, on_grid)

    @cached_property
    def pending(self) -> np.ndarray:
        """Frames that may be rendered now; below 0 where even less is known."""
        return self.renderable - self.slots.tape.num_rendered

    @cached_property
    def remaining_s(self) -> np.ndarray:
        """Audio that each listener has or will have from windows in flight."""
        listener, tape = self.slots.listener, self.slots.tape
        in_flight = tape.num_rendered - tape.num_delivered
        heard_s = np.maximum(listener.plays_until_s - self.now_s, listener.unread_s)
        return heard_s + in_flight * listener.frame_s

    @cached_property
    def buffered_s(self) -> np.ndarray:
        """Audio that each listener has not played, on the tape included; inf for flexible requests."""
        listener, tape = self.slots.listener, self.slots.tape
        heard_s = np.maximum(listener.plays_until_s - self.now_s, listener.unread_s)
        heard_s = np.where(listener.is_flexible, np.inf, heard_s)
        return heard_s + (tape.num_ready - tape.num_delivered) * listener.frame_s

    @cached_property
    def is_finished(self) -> np.ndarray:
        """Whether no more frames come and all are delivered."""
        tape = self.slots.tape
        is_whole = tape.is_end_delivered | (tape.num_ready == 0) | (self.shapes.window.hold_samples == 0)
        return tape.is_done & (tape.num_delivered == tape.num_ready) & is_whole

    @cached_property
    def is_resting(self) -> np.ndarray:
        """Whether there is nothing to do for a slot, as far as is known."""
        slots = self.slots
        is_waiting = (slots.is_starved | slots.lacks_pages) & (self.renderable <= slots.tape.num_rendered)
        return ~slots.is_occupied | is_waiting | slots.listener.has_backpressure | self.is_finished

    @cached_property
    def is_ending(self) -> np.ndarray:
        """Whether all frames that will come for now are on the tape: the speech or its text ends there."""
        return self.slots.tape.is_done | self.slots.is_starved

    @cached_property
    def is_heard(self) -> np.ndarray:
        """Whether the listener has audio, or its first window is in flight."""
        return np.isfinite(self.slots.listener.plays_until_s) | (self.slots.tape.num_rendered > 0)

    @cached_property
    def needs_flush(self) -> np.ndarray:
        """Whether samples are left to be rendered, without frames."""
        return self.has_held_samples & ~self.slots.cannot_render

    @cached_property
    def has_held_samples(self) -> np.ndarray:
        """Whether all frames were rendered before it was known that no more come, and the renderer keeps
        samples back."""
        tape = self.slots.tape
        if not self.shapes.window.hold_samples:
            return np.zeros(len(tape.is_done), bool)
        is_rendered = (tape.num_rendered == tape.num_ready) & ~tape.is_end_rendered
        return tape.is_done & is_rendered & (tape.num_ready > 0)
