"""Faults that need a GPU, on a CPU that emulates one (tests/masquerade.py), and faults of launches that fail.

Each row runs the tests of that name in a separate process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.attack.report import Row
from tests.attack.target import ROOT

ENGINE = "tests/serving/engine"
TESTS = {
    "a device without memory for one request": f"{ENGINE}/test_out_of_memory.py",
    "recordings that take memory to encode": f"{ENGINE}/test_memory_plan.py -k encod",
    "three models on recorded launches": f"{ENGINE}/test_recorded.py -k several",
    "whole files next to others": f"{ENGINE}/test_recorded.py -k reproducible_windows",
}


def attack(directory: Path) -> Iterator[Row]:
    for name, chosen in TESTS.items():
        command = [sys.executable, "-m", "pytest", "-m", "not slow", *chosen.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        passed, failed = (count(done.stdout, how) for how in ("passed", "failed"))
        is_lost = not passed and not failed
        yield Row(name, passed + failed, failed + is_lost, f"emulated GPU, {passed} tests passed")


def count(said: str, how: str) -> int:
    found = re.search(rf"(\d+) {how}", said)
    return int(found[1]) if found else 0
