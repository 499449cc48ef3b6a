"""Tests of the load benchmarks."""

import json
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
from models import directory

from benchmarks import clones, simulated_gpu, under_load, zoo_server

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rung(rate, ttfa_p90_ms, viability, failed=0):
    return {
        "rate_requests_per_s": rate,
        "ttfa_p90_ms": ttfa_p90_ms,
        "stream_viability": viability,
        "failed": failed,
    }


@pytest.mark.parametrize(
    ("runs", "highest"),
    [
        ([rung(1, 20, 1.0), rung(2, 99, 1.0), rung(3, 101, 1.0)], 2),
        ([rung(1, 20, 1.0), rung(2, 30, 0.99)], 1),
        ([rung(1, 20, 1.0), rung(2, 30, 1.0, failed=1)], 1),
        ([rung(1, 200, None)], 0),
        ([rung(1, 20, None)], 1),  # every stream had one chunk, which cannot be late
        ([rung(1, None, None, failed=3)], 0),
    ],
)
def test_the_highest_rate_is_that_of_a_rung_that_met_every_condition(runs, highest):
    assert under_load.highest_rate(runs, 100) == highest


def test_the_resources_of_child_processes_count():
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=sys.stdin)"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not children.read_text():
            pass
        found = zoo_server.descendants(os.getpid())
        assert {os.getpid(), parent.pid, int(children.read_text())} <= set(found)


def test_recordings_differ_by_seed():
    assert clones.recording(1) == clones.recording(1) != clones.recording(2)


@pytest.mark.slow
def test_the_encoding_program_runs_until_it_is_terminated():
    mine, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(
        target=clones.encode, args=(directory("qwen3_tts", "tiny-base"), 100.0, theirs)
    )
    process.start()
    theirs.close()
    assert mine.recv() == "encoding" and process.is_alive()
    process.terminate()
    process.join()


def test_a_run_of_one_part_keeps_the_results_of_the_others(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    runs = {"1x": {"goodput_requests_per_s": 2.0}, "2x": {"goodput_requests_per_s": 1.9}}
    monkeypatch.setitem(under_load.PARTS, "overload", lambda options: {"runs": runs})
    monkeypatch.setitem(under_load.PARTS, "start", lambda options: {"part_of_cold": 0.2})
    for part in ("overload", "start"):
        monkeypatch.setattr(sys, "argv", ["under_load.py", str(path), "--only", part])
        under_load.main()
    found = json.loads(path.read_text())
    assert found["overload"]["runs"] == runs and found["start"]["part_of_cold"] == 0.2
    assert found["start"]["model"] == "small_voice"
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


def test_the_simulated_costs_of_a_gpu_are_the_measured_ones():
    [measured] = simulated_gpu.read(RESULTS / "2026-11-22-h200-qwen3_tts.json")
    cost = measured.cost
    assert cost.step_s(64) == pytest.approx(7.457e-3) and cost.step_s(1) == cost.step_s(8)
    assert cost.prefill_alone_s(256) == pytest.approx(2.341e-3)
    # without a mixed launch in the result
    assert cost.prefill_s(256) == pytest.approx(2.341e-3 - cost.prefill_alone_s(16))
    assert cost.render_s(12, 25) == pytest.approx(54.593e-3)
    assert cost.render_s(14, 25) == pytest.approx(54.593e-3 + 10.453e-3)  # as two launches
    assert cost.render_s(6, 4) == pytest.approx(6.629e-3)  # padded to the next size
    assert cost.turn_s + 64 * cost.turn_slot_s == pytest.approx(3.6286e-3, rel=1e-3)
