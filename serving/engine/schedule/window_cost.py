"""The measured time of windows."""

from __future__ import annotations

import numpy as np

from serving.engine.schedule.numbers import WINDOW_COST_DECAY, WINDOW_COST_MARGIN


class WindowCost:
    """Predicts the seconds of a window with a margin: a fixed part and one for each frame, by least
    squares over recent windows.
    """

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.frame_s = 0.0
        self._sums = np.zeros(5)  # of 1, frames, frames squared, seconds, frames times seconds

    def record(self, frames: float, took_s: float) -> None:
        new = np.array((1, frames, frames * frames, took_s, frames * took_s))
        self._sums = WINDOW_COST_DECAY * self._sums + new
        num, x, xx, y, xy = self._sums.tolist()
        spread = xx - x * x / num
        slope = (xy - x * y / num) / spread if spread > 1 else np.inf
        frame_s = min(max(slope, 0.0), y / x)
        self.frame_s = WINDOW_COST_MARGIN * frame_s
        self.fixed_s = WINDOW_COST_MARGIN * (y - frame_s * x) / num

    def __call__(self, frames: float) -> float:
        return self.fixed_s + self.frame_s * frames
