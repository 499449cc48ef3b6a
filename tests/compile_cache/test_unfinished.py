"""A process that is killed while it compiles does not break the starts after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compile_cache import unfinished

# A process that begins, compiles (or finds) a function, settles if it is told so, writes half a library, and
# waits to be killed.
PROCESS = """
import sys, time
from pathlib import Path
from compile_cache import unfinished
directory = Path(sys.argv[1])
unfinished.begin(directory)
(directory / "a").mkdir(exist_ok=True)
(directory / "a" / f"{sys.argv[2]}.so").write_bytes(b"whole")
if "settle" in sys.argv:
    time.sleep(1.5)
    unfinished.settle()
    time.sleep(1.5)
    (directory / "a" / "half.so").touch()
print("ready", flush=True)
if "stay" in sys.argv:
    time.sleep(60)
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(directory), *arguments], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def libraries(directory: Path) -> set[str]:
    return {file.name for file in directory.rglob("*.so")}


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(unfinished, "_marks", {})


def test_what_a_killed_process_left_is_dropped_with_one_line(tmp_path, capfd):
    killed = start(tmp_path, "half", "stay")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    unfinished.begin(tmp_path)
    assert libraries(tmp_path) == set()
    said = f"zoo: 1 compiled files in {tmp_path} were not finished when a process was killed; they are compiled again\n"
    assert capfd.readouterr().err == said


@pytest.mark.slow
def test_what_was_whole_before_stays(tmp_path, capfd):
    killed = start(tmp_path, "whole", "settle", "stay")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    unfinished.begin(tmp_path)
    assert libraries(tmp_path) == {"whole.so"} and "1 compiled files" in capfd.readouterr().err


def test_a_process_that_ends_well_leaves_its_files_and_no_mark(tmp_path, capfd):
    assert start(tmp_path, "whole").wait() == 0
    assert not list(tmp_path.glob("unfinished-*"))
    unfinished.begin(tmp_path)
    assert libraries(tmp_path) == {"whole.so"} and capfd.readouterr().err == ""


def test_a_process_that_lives_keeps_its_files(tmp_path):
    living = start(tmp_path, "whole", "stay")
    unfinished.begin(tmp_path)
    assert libraries(tmp_path) == {"whole.so"}
    living.kill()
    living.wait()


COMPILE = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from compile_cache import artifacts, lower, strategy
place = artifacts.use_cache_dir("probe", nn.Linear(2, 2), "facts", (), root=sys.argv[1])
double = lower.lower(lambda x: (x * 2).sin(), strategy.Whole())
print(float(double(torch.ones(3))[0]), place, flush=True)
if "stay" in sys.argv:
    time.sleep(60)
"""


@pytest.mark.compile
def test_an_empty_library_of_a_killed_process_is_compiled_again(tmp_path):
    """As it was found: the library is there, under its name, with nothing in it, and every start after it
    died."""
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    killed = subprocess.Popen([*command, "stay"], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    place = Path(killed.stdout.readline().split()[1])
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    [library, *_] = [file for file in place.rglob("*.so") if time.time() - file.stat().st_mtime < 120]
    os.truncate(library, 0)
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and again.stdout.startswith("0.909"), again.stderr[-2000:]
    assert f"compiled files in {place} were not finished" in again.stderr
