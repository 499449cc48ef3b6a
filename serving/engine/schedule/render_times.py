"""Times of render launches on a GPU, measured by the warm-up, and the choices that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from serving.engine.device.launches import Render
from serving.engine.schedule.numbers import GPU_RENDERS_IN_FLIGHT, LONG_RENDER_STEPS, PACE_STEPS


@dataclass(frozen=True)
class RenderTimes:
    """seconds: by frames of the window, and then by rows of the launch, ascending. step_s: of a step of all
    slots."""

    seconds: Mapping[int, Mapping[int, float]]
    step_s: float

    @classmethod
    def measured(
        cls,
        render_s: Callable[[int, int], float],
        sizes: Iterable[int],
        rows_of: Callable[[int], Iterable[int]],
        step_s: float,
    ) -> RenderTimes:
        """render_s: seconds of a launch, by rows and frames. rows_of: the possible rows of a launch, by
        frames."""
        seconds = {frames: {rows: render_s(rows, frames) for rows in rows_of(frames)} for frames in sizes}
        return cls(seconds, step_s)

    def __call__(self, rows: int, frames: int) -> float:
        """Return the seconds of rows that may take several launches."""
        known = self.seconds[frames]
        full, rest = divmod(rows, max(known))
        last_s = next(took_s for num, took_s in known.items() if num >= rest) if rest else 0.0
        return full * known[max(known)] + last_s

    @property
    def shortest_s(self) -> float:
        return min(took_s for known in self.seconds.values() for took_s in known.values())

    @property
    def max_in_flight(self) -> int:
        """Return how many renders a device has at once: one, if it takes longer than a step, since many
        windows become due meanwhile and share the next launch."""
        return 1 if self.shortest_s > self.step_s else GPU_RENDERS_IN_FLIGHT

    @property
    def pace_s(self) -> float:
        """Return the seconds from one step to the next while a render is under way."""
        return PACE_STEPS * self.step_s if self.shortest_s > LONG_RENDER_STEPS * self.step_s else 0.0

    def joined(self, renders: list[Render]) -> list[Render]:
        """Return the launches of an iteration. Small windows ride in the largest launch if that takes less
        time. Reproducible windows keep their shape."""

        def kind(render: Render) -> tuple[int, bool]:
            return render.length, render.is_reproducible

        found = []
        for (_, is_reproducible), group in groupby(sorted(renders, key=kind), key=kind):
            alike = list(group)
            found += alike if is_reproducible else self._together(alike)
        return found

    def _together(self, renders: list[Render]) -> list[Render]:
        frames = max(render.frames for render in renders)
        num_rows = [len(render.slots) for render in renders]
        apart_s = sum(self(rows, render.frames) for rows, render in zip(num_rows, renders, strict=True))
        return [merged(renders, frames)] if self(sum(num_rows), frames) < apart_s else renders


def merged(renders: list[Render], frames: int) -> Render:
    """Return one launch of windows of `frames` frames."""
    slots = np.concatenate([render.slots for render in renders])
    order = np.argsort(slots)
    return Render(
        slots[order],
        np.concatenate([render.start for render in renders])[order],
        np.concatenate([render.count for render in renders])[order],
        np.concatenate([render.is_last for render in renders])[order],
        frames=frames,
        handed_s=renders[0].handed_s,
        length=renders[0].length,
    )
