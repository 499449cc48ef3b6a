"""A GPU on a virtual clock: steps and renders run at the same time, and slow each other down."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RENDERS_PART = 0.5  # of a device while steps want it too, as figures of an H200 suggest (benchmarks/LOG.md)


@dataclass(eq=False)
class Work:
    """A launch. left_s: its remaining time if alone. done_s: on the clock; None before its end."""

    left_s: float
    done_s: float | None = None


class SimulatedDevice:
    """Two streams, "lm" and "renders". Launches of one stream run one after the other. While both have some,
    each runs at its part of the device's speed, so nothing is gained or lost."""

    def __init__(self, renders_part: float = RENDERS_PART):
        self.parts = {"lm": 1 - renders_part, "renders": renders_part}
        self.queues: dict[str, deque[Work]] = {name: deque() for name in self.parts}
        self.now_s = 0.0

    def launch(self, stream: str, cost_s: float, now_s: float) -> Work:
        self.advance(now_s)
        work = Work(cost_s)
        self.queues[stream].append(work)
        return work

    def advance(self, until_s: float) -> None:
        """Work on until `until_s`."""
        while (end := self._next_end()) is not None and end[0] <= until_s:
            at_s, stream = end
            self._work_until(at_s)
            self.queues[stream].popleft().done_s = at_s
        if until_s > self.now_s:
            self._work_until(until_s)

    def finish(self, work: Work, until_s: float = float("inf")) -> float:
        """Work on until `work` is done, or until `until_s`. Return when that is."""
        while work.done_s is None and (end := self._next_end()) is not None and end[0] <= until_s:
            self.advance(end[0])
        return until_s if work.done_s is None else work.done_s

    def _speeds(self) -> dict[str, float]:
        busy = [stream for stream, queue in self.queues.items() if queue]
        return {stream: self.parts[stream] if len(busy) > 1 else 1.0 for stream in busy}

    def _next_end(self) -> tuple[float, str] | None:
        """Return when the first launch ends if none is added, and its stream."""
        ends = [
            (self.now_s + self.queues[stream][0].left_s / speed, stream)
            for stream, speed in self._speeds().items()
        ]
        return min(ends, default=None)

    def _work_until(self, at_s: float) -> None:
        for stream, speed in self._speeds().items():
            self.queues[stream][0].left_s -= (at_s - self.now_s) * speed
        self.now_s = at_s
