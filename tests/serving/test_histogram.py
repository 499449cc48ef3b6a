"""Histograms of durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.histogram import BOUNDS_S, Histogram


@given(st.lists(st.one_of(st.sampled_from(BOUNDS_S), st.floats(0, 100)), max_size=20))
def test_each_bucket_counts_the_values_up_to_its_bound(times):
    histogram = Histogram()
    for seconds in times:
        histogram.add(seconds)
    assert histogram.buckets[-1] == ("+Inf", len(times)) and histogram.sum_s == pytest.approx(sum(times))
    for (name, count), bound_s in zip(histogram.buckets, BOUNDS_S, strict=False):
        assert float(name) == bound_s and count == sum(seconds <= bound_s for seconds in times)


def test_histograms_do_not_share_their_counts():
    one, other = Histogram(), Histogram()
    one.add(1.0)
    assert sum(other.counts) == 0
