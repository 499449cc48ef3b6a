"""Metrics of a run, from handwritten and random records."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tools.load.metrics import Record, Slo, quantiles, summary

RATE_HZ = 1000


def record(arrivals=(), outcome="ok", role="listener", submitted_s=100.0, sent_s=None, end_s=None, index=0):
    """Return a record. arrivals: (seconds from the submission, samples)."""
    times = [(submitted_s + at_s, num) for at_s, num in arrivals]
    last_s = max([submitted_s, *(at_s for at_s, _ in times)])
    sent_s, end_s = submitted_s if sent_s is None else sent_s, last_s if end_s is None else end_s
    return Record(index, role, submitted_s, sent_s, end_s, outcome, RATE_HZ if times else 0, times)


SMOOTH = [(0.25, 500), (0.5, 500), (1.0, 500)]
HALTING = [(0.25, 500), (0.875, 500), (1.0, 500)]  # the second chunk is due at 0.75
SLOW = [(0.75, 500), (1.0, 500)]  # the first audio is late


def test_a_run():
    records = [
        record(SMOOTH, submitted_s=100.0),
        record(HALTING, submitted_s=101.0),
        record(SLOW, submitted_s=102.0),
        record([(0.25, 700)], submitted_s=103.0),
        record(SMOOTH[:2], "cut", submitted_s=104.0, end_s=106.0),
        record(outcome="http_503", submitted_s=105.0),
    ]
    found = summary(records, Slo(ttfa_s=0.5), offered_s=10.0)
    assert (found["requests"], found["completed"], found["failed"]) == (6, 4, 2)
    assert found["failures"] == {"cut": 1, "http_503": 1}
    assert found["wall_s"] == 6.0 and found["audio_s"] == 1.5 + 1.5 + 1.0 + 0.7 + 1.0
    assert found["audio_s_per_s"] == pytest.approx(5.7 / 6)
    assert found["requests_per_s"] == pytest.approx(4 / 6)
    # The good ones are the smooth stream and the one with a single chunk.
    assert found["goodput_requests_per_s"] == 2 / 10 and found["good_share"] == pytest.approx(2 / 6)
    assert found["ttfa_p50_ms"] == 250 and found["ttfa_max_ms"] == 750 and found["ttfa_mean_ms"] == 350
    assert found["rtf_p50"] == pytest.approx((1 / 1.5 + 1 / 1.5) / 2)
    assert found["streams_of_one_chunk"] == 1
    assert found["chunk_viability"] == (2 + 1 + 1 + 1) / 6
    assert found["stream_viability"] == 2 / 4  # the broken stream is not viable
    assert (found["c50"], found["c100"], found["c200"]) == (2 / 4, 2 / 4, 3 / 4)
    assert found["underruns"] == 1 and found["underrun_s"] == 0.125
    json.dumps(found, allow_nan=False)


def test_a_pause_may_be_allowed():
    assert summary([record(HALTING)], Slo(underrun_s=0.2))["good_share"] == 1
    assert summary([record(HALTING)], Slo(underrun_s=0.1))["good_share"] == 0


def test_latency_counts_from_when_a_request_was_due():
    """It does not count from when the client sent it."""
    late = record(SMOOTH, sent_s=100.2)
    assert summary([late], Slo())["ttfa_p50_ms"] == 250


def test_clients_that_disconnect_or_read_slowly_are_not_judged():
    records = [
        record(SMOOTH),
        record(HALTING, "left", "leaver"),
        record(outcome="http_500", role="leaver"),
        record(HALTING, "cut", "slow"),
        record(HALTING, "interrupted"),
    ]
    found = summary(records, Slo())
    assert found["requests"] == found["completed"] == 1 and found["stream_viability"] == 1
    assert (found["leavers"], found["slow_readers"], found["interrupted"]) == (2, 1, 1)
    assert found["disturber_failures"] == {"cut": 1, "http_500": 1} and found["failures"] == {}


def test_unknown_values_are_none():
    found = summary([], Slo(), offered_s=5.0)
    assert found["requests"] == 0 and found["audio_s_per_s"] is None and found["good_share"] is None
    assert found["ttfa_p99_ms"] is None and found["c50"] is None and found["goodput_requests_per_s"] == 0
    assert quantiles("x", "", [1.0, 2.0, 3.0])["x_p50"] == 2.0


OUTCOMES = st.sampled_from(["ok", "ok", "ok", "cut", "timeout", "interrupted"])
chunks = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 5000)), max_size=6).map(sorted)
records = st.builds(
    record, chunks, OUTCOMES, st.sampled_from(["listener", "listener", "leaver", "slow"]), st.floats(100, 200)
)


@given(st.lists(records, max_size=12), st.floats(0, 5), st.floats(0, 1))
def test_the_figures_agree_with_each_other(records, ttfa_s, underrun_s):
    found = summary(records, Slo(ttfa_s, underrun_s), offered_s=100.0)
    assert found["completed"] + found["failed"] == found["requests"] <= len(records)
    assert sum(found["failures"].values()) == found["failed"]
    assert 100 * found["goodput_requests_per_s"] <= found["completed"] + 1e-9
    if found["c50"] is not None:
        assert found["stream_viability"] <= found["c50"] <= found["c100"] <= found["c200"] <= 1
    if found["ttfa_p50_ms"] is not None:
        parts = [found[f"ttfa_{part}_ms"] for part in ("p50", "p90", "p95", "p99", "max")]
        assert parts == sorted(parts) and parts[0] >= 0
    strict, loose = (summary(records, Slo(ttfa_s, wait_s))["good_share"] for wait_s in (0, underrun_s))
    assert strict == loose or strict < loose
    json.dumps(found, allow_nan=False)
