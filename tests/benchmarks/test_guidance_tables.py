"""The tables of OpusLM and Bagpiper (benchmarks/guidance_tables.py), with tiny models and few requests."""

from __future__ import annotations

from argparse import Namespace

import pytest
from models import directory

from benchmarks import guidance_tables
from benchmarks.guidance_tables import PLAIN, Measured, Native, Ours, Run, Work, endless, measure, tables

OPTIONS = Namespace(
    words=6, frames=9, device="cpu", requests=[1, 3], rounds=2, eager=True, size="tiny", family=None
)


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Measure one family where ESPnet is not installed."""
    monkeypatch.chdir(tmp_path)
    return lambda name: measure(name, directory(name, "tiny"), OPTIONS, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [("bagpiper", 6), ("opuslm", 0)])
def test_every_answer_has_the_same_length(found, name, words):
    made = found(name)
    assert made.work == Work(words, 9) and made.native.name == PLAIN
    assert [run.requests for run in made.guided] == [1, 3]
    for run in (*made.guided, *made.unguided):
        assert run.rows == run.requests * (words + 9)
        assert len(run.first_s) == len(run.whole_s) == run.requests
        assert all(first <= run.wall_s for first in run.first_s)
    assert len(made.unguided) == len(made.ratios) == (2 if name == "bagpiper" else 0)
    assert set(made.native.rows_per_s) == {1, 3} and made.native.whole_s > 0


def test_only_guided_requests_open_a_second_lane(monkeypatch):
    ours = Ours(endless(directory("bagpiper", "tiny"), "cpu", "float32"), 2, compile=False)
    [model] = ours.engine.models.values()
    opened, open_lane = [], model.runner.open_lane
    monkeypatch.setattr(
        model.runner, "open_lane", lambda slot, *more: (opened.append(slot), open_lane(slot, *more))
    )
    ours.run(2, Work(4, 5, guidance=1.0))
    assert opened == []
    ours.run(2, Work(4, 5))
    assert sorted(opened) == [0, 1]


def test_the_tables_divide_ours_by_the_native_loop_and_guided_by_unguided():
    guided = Run(2, wall_s=2.0, first_s=[0.5, 1.5], whole_s=[1.0, 2.0], rows=90)
    plain = Run(2, wall_s=1.5, first_s=[0.5], whole_s=[1.0], rows=90)
    native = Native(PLAIN, {2: 9.0}, 7.5)
    one = Measured("bagpiper", "tiny", "cpu", "float32", Work(20, 25), native, [guided], [plain], [0.76])
    lines = list(tables(one))
    assert "| 2 | 45.0 | 9.0 | 5.0 |" in lines
    assert "| 2 | 60.0 | 45.0 | 0.75 | 0.76 |" in lines
    assert "| 2 | 1.000 / 1.450 | 1.500 | 7.500 |" in lines
    assert PLAIN in lines[1]


def test_an_order_for_espnet_has_the_same_work(monkeypatch, tmp_path):
    """ESPnet's Bagpiper answers one request after the other, so it is measured with one."""
    orders = []

    def run(family, python, order):
        orders.append(order)
        runs = [
            {"streams": s, "wall_s": 1.0 * order["rounds"] * (2 if s > 1 else 1)} for s in order["streams"]
        ]
        return {"name": "ESPnet", "runs": runs}

    monkeypatch.setattr(guidance_tables.reference, "run", run)
    work = Work(6, 9)
    for name in ("bagpiper", "opuslm"):
        made = guidance_tables.espnet(name, tmp_path, tmp_path / "python", "float32", [8, 4], work)
        assert made.name == "ESPnet"
        expected = {4: 15.0, 8: 15.0} if name == "bagpiper" else {4: 30.0, 8: 60.0}
        assert made.rows_per_s == expected
        assert made.whole_s == 1.0  # of one copy, though none of the numbers of requests is 1
    assert [order["streams"] for order in orders] == [[1], [1, 4, 8]]
    assert orders[0]["request"]["options"] == {"max_tokens": 6, "guidance": 3.0}
