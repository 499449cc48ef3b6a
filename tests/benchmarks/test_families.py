"""The table of all families: a row for each number of streams, with and without a reference."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.families import HEADER, bench_command, checkpoint, measured, rows

RUNS = [
    {"streams": 1, "audio_s_per_s": 1.5, "floor_fraction": 0.75, "speedup": 3.0},
    {"streams": 8, "audio_s_per_s": 4.0, "floor_fraction": 0.5, "speedup": 2.0},
]
RESULT = {"family": "csm", "runs": RUNS}


def test_a_row_has_our_speed_the_reference_and_the_floor():
    reference = {"runs": [{"audio_s_per_s": 0.5}, {"audio_s_per_s": 2.0}]}
    assert list(rows(RESULT | {"reference": reference})) == [
        "| csm | 1 | 1.50 | 0.50 | 3.0 | 75% |",
        "| csm | 8 | 4.00 | 2.00 | 2.0 | 50% |",
    ]


def test_a_row_without_a_reference_leaves_its_cells_empty():
    [row, _] = rows(RESULT)
    assert row == "| csm | 1 | 1.50 |  |  | 75% |"
    assert row.count("|") == HEADER.splitlines()[1].count("|")


def test_only_families_with_an_environment_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv-parity-csm").mkdir()
    assert "reference" in bench_command("csm", tmp_path, 5)
    assert "reference" not in bench_command("orpheus", tmp_path, 5)
    assert "throughput" in bench_command("cosyvoice2", tmp_path, 5)


def test_a_checkpoint_is_written_once(tmp_path, monkeypatch):
    written = []

    class Folder:
        @staticmethod
        def write_demo(place, size):
            written.append((place, size))
            place.mkdir()

    monkeypatch.setattr("benchmarks.families.zoo.families", lambda: {"csm": Folder})
    assert checkpoint("csm", tmp_path) == checkpoint("csm", tmp_path) == tmp_path / "csm-mid"
    assert written == [(tmp_path / "csm-mid", "mid")]


@pytest.mark.parametrize(
    "code, why",
    [
        ("import sys; sys.exit('zoo: it has no mouth')", "status 1: zoo: it has no mouth"),
        ("import os; os.kill(os.getpid(), 9)", "status -9: it wrote nothing"),
        ("import time; time.sleep(60)", "took longer than 0.5 s"),
    ],
)
def test_a_family_that_fails_says_why_and_the_others_go_on(code, why):
    assert why in measured("csm", [sys.executable, "-c", code], 0.5 if "sleep" in code else 20)


@pytest.mark.slow
def test_what_took_too_long_leaves_no_process(tmp_path):
    """A reference is a child of the command that is ended."""
    child = f"import time, os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert "took longer" in measured("csm", [sys.executable, "-c", code], 3)
    state, end_s = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat"), time.monotonic() + 20
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end_s, "it still runs"
        time.sleep(0.02)
