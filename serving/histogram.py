"""Histograms of durations in Prometheus' form: the engine process fills them, the HTTP process reports
them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import msgspec

# A step takes a few milliseconds; a late first audio takes a few hundred.
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Histogram(msgspec.Struct):
    """A histogram. counts: one for each interval that ends at a bound, and one for values above all
    bounds."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def num(self) -> int:
        return sum(self.counts)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with the number of values up to it."""
        return list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self.counts), strict=True))
