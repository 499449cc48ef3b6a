"""The parts of device.py: a process for each, one alone at a time, cut off in time, and continued by a later call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shell import ROOT

from benchmarks import device_parts

# A part that says its name, measures alone if asked to, and starts a compiler that outlives it.
PART = """
import json, subprocess, sys, time
part = sys.argv[-1]
def put(name, value): print(json.dumps({name: value}), flush=True)
put("pids", [__import__("os").getpid(), subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid])
if "alone" in part:
    put("is alone", True)
    time.sleep(0.3)
    put("is alone", False)
if "fails" in part:
    put("error", "no memory")
elif "hangs" in part:
    time.sleep(60)
elif "dies" in part:
    sys.exit(3)
else:
    put("seconds", 0.1)
"""


def run(out: Path, parts: list[str], result: dict | None = None, limit_s: float = 20.0) -> dict:
    result = {"calls": [{}]} if result is None else result
    device_parts.run_all([sys.executable, "-c", PART], parts, result, out, time.monotonic() + limit_s, 8)
    assert json.loads(out.read_text()) == result
    return result


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids) -> bool:
    """Return whether all processes end: the kernel needs a moment for one that was killed."""
    for _ in range(100):
        if not any(map(is_running, pids)):
            return True
        time.sleep(0.05)
    return False


def test_findings_stay_and_no_process_does(tmp_path):
    result = run(tmp_path / "r.json", ["a", "fails", "dies"])
    assert result["a"]["seconds"] == 0.1 and "error" not in result["a"]
    assert result["fails"]["error"] == "no memory"
    assert result["dies"]["error"] == "the part did not end by itself: status 3"
    assert all_end([pid for part in ("a", "fails", "dies") for pid in result[part]["pids"]])


def test_a_part_that_is_cut_off_says_so_and_keeps_its_findings(tmp_path):
    result = run(tmp_path / "r.json", ["a", "hangs"], limit_s=1.0)
    assert result["a"]["seconds"] == 0.1
    assert result["hangs"]["error"] == "the part did not end by itself: it was cut off by --limit-s"
    assert all_end(result["hangs"]["pids"])


def test_the_others_go_on_after_one_was_alone(tmp_path):
    result = run(tmp_path / "r.json", ["alone 1", "alone 2", "a"])
    assert all("seconds" in result[part] for part in ("alone 1", "alone 2", "a"))


def test_a_later_call_runs_what_is_open(tmp_path):
    out = tmp_path / "r.json"
    run(out, ["figures=a", "figures=fails", "dies"])
    result = device_parts.continued(out, {"device": "H100"})
    parts = ["figures=a", "figures=fails", "dies", "checks=b"]
    assert device_parts.to_run(parts, result, []) == ["figures=fails", "dies", "checks=b"]
    assert device_parts.to_run(parts, result, ["figures"]) == parts
    assert device_parts.to_run(parts, result, ["figures=a"]) == parts
    assert result["device"] == "H100" and len(result["calls"]) == 2
    before = result["figures=fails"]
    again = run(out, ["figures=fails", "dies"], result)
    assert again["figures=fails"]["pids"] != before["pids"] and again["figures=fails"]["in_calls"] == [1, 2]
    assert again["figures=a"]["in_calls"] == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_no_process(tmp_path, number):
    out = tmp_path / "r.json"
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks import device_parts\n"
        f"from pathlib import Path\n"
        f"device_parts.run_all([sys.executable, '-c', {PART!r}], ['hangs', 'alone hangs'], {{'calls': [0]}},\n"
        f"    Path({str(out)!r}), time.monotonic() + 60, 8)\n"
    )
    process = subprocess.Popen([sys.executable, script])
    pids: list[int] = []
    while len(pids) < 4:
        time.sleep(0.05)
        if out.exists():
            found = json.loads(out.read_text() or "{}")
            pids = [pid for part in ("hangs", "alone hangs") for pid in found.get(part, {}).get("pids", ())]
    os.kill(pids[0], signal.SIGSTOP)  # as if another measured
    process.send_signal(number)
    process.wait()
    assert all_end(pids)


def test_everything_compiled_lies_in_one_folder(tmp_path):
    places = device_parts.environment(tmp_path)
    assert {str(Path(place).relative_to(tmp_path)) for place in places.values() if place != "0"} == {
        *(".", "zoo", "inductor", "triton", "flashinfer")
    }
    assert device_parts.environment(None) == {}


@pytest.mark.slow
def test_parts_start_in_order_and_only_so_many_run_at_once(tmp_path):
    out = tmp_path / "r.json"
    result = {"calls": [{}]}
    parts = ["hangs", "ends", "hangs too", "last"]
    command = [sys.executable, "-c", PART]
    device_parts.run_all(command, parts, result, out, time.monotonic() + 4, 2)
    assert result["ends"]["seconds"] == 0.1
    assert "cut off" in result["hangs"]["error"] and "cut off" in result["hangs too"]["error"]
    assert result["last"]["error"] == "the part did not end by itself: --limit-s came before its start"
