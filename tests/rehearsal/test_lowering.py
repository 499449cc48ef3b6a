"""Check every family's launches for a GPU without one: one graph, kernels that build, and a budget of
launches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import zoo

pytest.importorskip("triton", reason="pip install -e .[rehearse]")

from benchmarks.rehearse import Part, Rehearsal, rehearse

pytestmark = pytest.mark.rehearse
CARDS = ("h100", "4090")  # sm_90 and sm_89
SLOTS = (1, 64)
KINDS = ("triton", "extern", "recorded", "eager")
# Launches of a tiny model's step, by kind (see launches.Launch). Write lower counts down when they fall.
BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text())


@cache
def rehearsed(name: str, card: str) -> Rehearsal:
    with TemporaryDirectory() as directory:
        return rehearse(name, "tiny", card, SLOTS, Path(directory))


def once(name: str, card: str) -> Any:
    """Return a parameter whose tests all run in one process, so that it is rehearsed once."""
    one = f"{name}-{card}"
    return pytest.param((name, card), id=one, marks=pytest.mark.xdist_group(one))


@pytest.fixture(params=[once(name, card) for name in zoo.families() for card in CARDS])
def result(request: pytest.FixtureRequest) -> Rehearsal:
    return rehearsed(*request.param)


def parts(result: Rehearsal, name: str) -> list[Part]:
    found = [part for part in result.parts if part.name == name]
    assert found, f"no part named {name} was rehearsed"
    return found


def test_a_launch_is_one_graph_for_any_number_of_slots(result: Rehearsal) -> None:
    assert result.breaks == {} and result.graphs == result.num_lowered > 0


def test_every_kernel_builds(result: Rehearsal) -> None:
    built = result.built
    assert built is not None and built.failed == {}
    assert built.num_configurations >= built.num_kernels > 0


def test_the_step_launches_at_most_its_budget(result: Rehearsal) -> None:
    budget = BUDGET[result.family]
    for part in parts(result, "step"):
        launches = {kind: part.num(kind) for kind in KINDS}
        over = {kind: num for kind, num in launches.items() if num > budget[kind]}
        assert not over, f"{part.slots} slots: {over} launches, but the budget is {budget}"


@pytest.mark.parametrize("name", ["step", "render", "prefill"])
def test_nothing_waits(result: Rehearsal, name: str) -> None:
    assert {what for part in parts(result, name) for what in part.waits} == set()


@pytest.mark.parametrize("name", ["step", "render", "prefill"])
def test_no_copy_blocks(result: Rehearsal, name: str) -> None:
    assert {what for part in parts(result, name) for what in part.copies} == set()
