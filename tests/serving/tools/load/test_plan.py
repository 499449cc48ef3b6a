"""Requests and arrivals follow from the seed alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tools.load.client import Target
from serving.tools.load.metrics import Slo
from serving.tools.load.plan import SENTENCES, Texts, Work, poisson
from serving.tools.load.run import Plan, Rung


def work(**fields):
    return Work(["pcm"], **fields)


def test_a_request_is_the_same_in_every_run_and_differs_from_others():
    one, same, other = work(voices=["a", "b"]), work(voices=["a", "b"]), work(voices=["a", "b"], seed=1)
    asked = [one.request(index) for index in range(50)]
    assert asked == [same.request(index) for index in range(50)]
    assert asked != [other.request(index) for index in range(50)]
    assert len({planned.body["seed"] for planned in asked}) == 50
    assert {planned.body["voice"] for planned in asked} == {"a", "b"}
    assert all(planned.body["input"] in SENTENCES for planned in asked)


def test_fields_go_into_the_body_unchanged():
    planned = work(fields={"model": "m", "seed": 3, "max_new_tokens": 9}, has_seeds=False).request(0)
    assert planned.body["seed"] == 3 and planned.body["max_new_tokens"] == 9 and planned.body["model"] == "m"
    assert "seed" not in work(has_seeds=False).request(0).body


def test_shares_are_kept():
    roles = Counter(work(cancel_share=0.2, slow_share=0.05).request(index).role for index in range(4000))
    assert abs(roles["leaver"] / 4000 - 0.2) < 0.02 and abs(roles["slow"] / 4000 - 0.05) < 0.01
    assert {work(cancel_share=1.0).request(index).role for index in range(50)} == {"leaver"}
    assert {work().request(index).role for index in range(50)} == {"listener"}


def test_texts(tmp_path):
    lengths = {
        name: [len(work(texts=Texts.named(name)).request(i).body["input"]) for i in range(400)]
        for name in ("short", "long", "mixed")
    }
    assert 50 <= sum(lengths["short"]) / 400 <= 70  # four seconds at fifteen characters a second
    assert 400 <= sum(lengths["long"]) / 400 <= 520
    assert 0.2 < sum(length > 200 for length in lengths["mixed"]) / 400 < 0.3
    path = tmp_path / "texts"
    path.write_text("one\n\n  two \n", "utf-8")
    assert Texts.named(str(path)).lines == ("one", "two")
    path.write_text("\n")
    for name in (str(path), str(tmp_path / "none")):
        with pytest.raises(ValueError, match="text"):
            Texts.named(name)


def test_arrivals_are_a_poisson_process():
    times = poisson(5.0, 0, 0, 2000.0, None)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert len(times) == pytest.approx(10000, rel=0.03)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)  # 1 / e
    # Every rate has the same arrivals, scaled.
    assert poisson(10.0, 0, 0, None, 50) == pytest.approx([at / 2 for at in times[:50]])
    assert poisson(5.0, 1, 0, None, 50) != times[:50]


@given(st.integers(0, 20), st.integers(1, 30), st.floats(0.5, 5))
def test_arrivals_end_after_their_number_or_duration(num_warmup, num, duration_s):
    both = poisson(4.0, 7, num_warmup, duration_s, num)
    timed, counted = poisson(4.0, 7, num_warmup, duration_s, None), poisson(4.0, 7, num_warmup, None, num)
    assert both == min(timed, counted, key=len)
    assert len(counted) == num_warmup + num
    begin_s = timed[num_warmup - 1] if num_warmup else 0.0
    assert all(begin_s < at_s <= begin_s + duration_s for at_s in timed[num_warmup:])


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 20), st.integers(0, 5))
def test_workers_share_the_requests(workers, streams, num, num_warmup):
    """Each request is made once, so a run does not depend on the number of processes."""
    plan = Plan(Target("http://x/v1"), work(), [], None, num, num_warmup, workers, Slo())
    jobs, offered_s = plan.jobs(Rung(rate=3.0), 0.0)
    arrivals = sorted((arrival.index, arrival.at_s) for job in jobs for arrival in job.arrivals)
    times = poisson(3.0, 0, num_warmup, None, num)
    assert len(jobs) == workers and arrivals == list(enumerate(times))
    assert offered_s == times[-1] - (times[num_warmup - 1] if num_warmup else 0.0)

    jobs, offered_s = plan.jobs(Rung(streams=streams), 0.0)
    asked = [index for job in jobs for s in job.streams for index in range(s.first, s.end, s.step)]
    assert sorted(asked) == list(range(num + num_warmup)) and offered_s is None


def test_the_default_warmup_is_two_seconds_or_one_request_per_stream():
    plan = Plan(Target("http://x/v1"), work(), [], 10.0, None)
    assert plan.warmup(Rung(rate=1.5)) == 3 and plan.warmup(Rung(streams=6)) == 6
    assert plan.jobs(Rung(rate=1.5), 0.0)[1] == 10.0
