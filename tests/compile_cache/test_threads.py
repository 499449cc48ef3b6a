"""Helper threads of the threads in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_cache import threads

TEAMS = """
import os, sys
from threading import Thread
import torch
from compile_cache import threads

def compute():
    square = torch.ones(512, 512)
    return square @ square, square.bfloat16() @ square.bfloat16(), torch.ones(1 << 20).exp()

def count():
    return len(os.listdir("/proc/self/task"))

def other():
    if sys.argv[1] == "alone":
        threads.use_one_thread()
    compute()
    print(count() - before, torch.get_num_threads())

compute()
before = count()
thread = Thread(target=other)
thread.start()
thread.join()
print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir() or os.cpu_count() == 1,
    reason="needs two cores, and counts threads in /proc",
)
@pytest.mark.parametrize(("how", "num"), [("alone", 1), ("with helpers", 2)])
def test_a_thread_without_helpers_starts_no_team(how, num):
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", TEAMS, how], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    grown, in_it, in_ours = map(int, ran.stdout.split())
    assert (grown, in_it) == (num, num), "the thread itself and its helpers"
    assert in_ours == 2


@pytest.mark.parametrize(
    ("device", "is_small", "is_compiled", "num"),
    [
        ("meta", False, True, 1),  # as on a GPU
        ("cpu", False, True, 16),
        ("cpu", False, False, 16),
        ("cpu", True, True, 2),
        ("cpu", True, False, 1),
    ],
)
def test_the_number_of_threads_follows_device_and_size(device, is_small, is_compiled, num, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(threads.limits, "cores", lambda: None)
    side = 8 if is_small else 1 + int((threads.SMALL_BYTES / 4) ** 0.5)
    threads.set_num_threads(nn.Linear(side, side, device=device), is_compiled)
    assert asked == [num]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_thread_in_the_background_gives_way_to_the_others_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1, initializer=threads.work_in_background) as pool:
        assert pool.submit(niceness).result() == threads.NICENESS
        assert pool.submit(torch.get_num_threads).result() == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with ThreadPoolExecutor(1, initializer=threads.work_in_background) as pool:
        assert pool.submit(niceness).result() == niceness()


CORES = """
import os
from concurrent.futures import ThreadPoolExecutor
import torch
from compile_cache import threads

torch.ones(512, 512) @ torch.ones(512, 512)
print(threads.keep_team_on_cores())
team = [cpus for cpus in (os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")) if len(cpus) == 1]
print(len(team), len(set.union(*team)))
with ThreadPoolExecutor(1, initializer=threads.work_in_background) as pool:
    print(pool.submit(os.sched_getaffinity, 0).result() == threads.allowed_cpus())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or len(threads.one_cpu_of_each_core(threads.allowed_cpus())) < 2,
    reason="needs two cores, and GNU's OpenMP",
)
def test_each_thread_of_a_team_has_a_core_and_threads_in_the_background_have_all():
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", CORES], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    assert ran.stdout.split() == ["True", "2", "2", "True"]


def test_cpus_that_share_a_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        place = tmp_path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(siblings)
    assert threads.one_cpu_of_each_core({0, 1, 2, 3}) == [0, 1]
    assert threads.one_cpu_of_each_core({2, 3}) == [2, 3]
    assert threads.one_cpu_of_each_core({4, 5}) == [4, 5]  # unknown: each is a core
