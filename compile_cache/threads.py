"""Set how many threads a model uses on a CPU, and stop other threads from starting helpers."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from compile_cache import limits

SMALL_BYTES = 64 << 20
NICENESS = 10  # of a thread in the background: it gets a tenth of a core that a step's thread wants, too
TOPOLOGY = Path("/sys/devices/system/cpu")
BINDINGS = "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"


def set_num_threads(model: nn.Module, is_compiled: bool) -> int:
    """Set the number of threads and return it. Call this before anything is compiled.

    On a GPU the host gets one thread, because it has little to compute. On a CPU a model gets the current
    number, limited by the CPU quota, and one under SMALL_BYTES at most two threads. A small model
    that is not compiled gets one: its operators are so short that threads would mostly wait for each other. Next
    to a busy program, `zoo say` took thirty times as long with two (benchmarks/LOG.md).
    """
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    num = threads_of_quota(torch.get_num_threads())
    if size < SMALL_BYTES:
        num = min(num, 2 if is_compiled else 1)
    torch.set_num_threads(num if next(model.parameters()).device.type == "cpu" else 1)
    return torch.get_num_threads()


def threads_of_quota(num: int) -> int:
    """Limit a number of threads to the container's CPU quota, unless OMP_NUM_THREADS is set.

    Threads that wait for each other spin, and spinning uses up the quota. The whole process then stands still
    until the next tenth of a second. With two threads on the time of one core, the mid-size Qwen3-TTS
    generated a fifth of the audio that it generated with one thread (benchmarks/LOG.md).
    """
    cores = limits.cores()
    if cores is None or "OMP_NUM_THREADS" in os.environ:
        return num
    return max(1, min(num, int(cores)))


def work_in_background() -> None:
    """Make the calling thread compute alone and give way to the process's other threads.

    A step's threads wait for each other at every product. If an encoder takes the core of one of them, all of
    them wait (benchmarks/LOG.md). A GPU's steps have no such threads, and the one that launches them may wait
    for this one, so it keeps its priority there. Only Linux knows priorities of threads.
    """
    use_one_thread()
    if sys.platform == "linux" and not torch.cuda.is_available():
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
            os.sched_setaffinity(0, allowed_cpus())  # a thread of a team on cores may have started this one


def allowed_cpus() -> set[int]:
    """Return the CPUs that the process's first thread could use when this was first called."""
    if not _allowed:
        _allowed.update(os.sched_getaffinity(os.getpid()))
    return _allowed


_allowed: set[int] = set()


def keep_team_on_cores() -> bool:
    """Keep each thread of the caller's OpenMP team on its own core, and return whether that was done.

    The threads of a team wait for each other at every product. While a thread in the background has one core,
    the system may put two of a team on another one, where each waits for the other's share of time. Next to an
    encoder, the slowest step in a hundred then took three times as long (benchmarks/LOG.md). This needs
    Linux, GNU's OpenMP and a core for each thread. Threads stay as they are if the environment binds them to
    cores.
    """
    if sys.platform != "linux" or any(name in os.environ for name in BINDINGS):
        return False
    library, cores = _gnu_openmp(), one_cpu_of_each_core(allowed_cpus())
    if library is None or not 1 < torch.get_num_threads() <= len(cores):
        return False
    team: dict[int, int] = {}

    def note(_: object) -> None:
        team[library.omp_get_thread_num()] = threading.get_native_id()

    library.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(note), None, 0, 0)
    try:
        for number, thread in team.items():
            os.sched_setaffinity(thread, {cores[number]})
    except OSError:  # a sandbox may forbid it
        return False
    return True


def one_cpu_of_each_core(cpus: Iterable[int]) -> list[int]:
    """Return one of the CPUs that share a core, for each core."""
    of_core: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        of_core.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(of_core.values())


def _gnu_openmp() -> ctypes.CDLL | None:
    """Return torch's GNU OpenMP, or None if torch was built with another one."""
    path = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
    return None if path is None else ctypes.CDLL(str(path))


def use_one_thread() -> None:
    """Make the calling thread compute without helper threads. Call this before the thread computes anything.

    A second team of OpenMP threads slows down the first one for good. libgomp then counts more threads than
    cores, and puts waiting threads to sleep immediately: a step of Qwen3-TTS took twice as long
    (benchmarks/LOG.md). `torch.set_num_threads` does not help, because MKL and torch each keep that number
    once per process.
    """
    torch.get_num_threads()  # the first query sets up the thread and would overwrite the numbers below
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if hasattr(library, name):  # a build without MKL, or with another OpenMP, lacks one of them
            getattr(library, name)(1)
