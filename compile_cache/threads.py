"""How many threads a model on a CPU is worth, and which of the process's threads may have them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import nn

from compile_cache import limits

SMALL_BYTES = 64 << 20


def set_num_threads(model: nn.Module) -> int:
    """One thread for a model of less than SMALL_BYTES and for one on a GPU, else as many as there were, or as its cores' time
    is enough for -> the number. Call before anything is compiled.

    Waking a second thread takes longer than the products of a small model: a step of 8 streams of the tiny
    Qwen3-TTS took 20 ms with two threads and 4 ms with one (benchmarks/LOG.md). What is left to the host of a GPU is
    smaller still.
    """
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    is_small = size < SMALL_BYTES or next(model.parameters()).device.type != "cpu"
    torch.set_num_threads(1 if is_small else threads_of_quota(torch.get_num_threads()))
    return torch.get_num_threads()


def threads_of_quota(num: int) -> int:
    """Of so many threads, as many as a container's limit is enough for; all where OMP_NUM_THREADS says how many.

    Threads that wait for each other spin, and what they spin is of the quota too: when it is spent, all of the process
    stands still until the next tenth of a second. With two threads on one core's time the mid-size Qwen3-TTS made a fifth
    of the audio that it made with one (benchmarks/LOG.md).
    """
    cores = limits.cores()
    if cores is None or "OMP_NUM_THREADS" in os.environ:
        return num
    return max(1, min(num, int(cores)))


def use_one_thread() -> None:
    """The calling thread computes without helpers from now on, whatever the others do. Call it before the
    thread computes anything.

    A second team of OpenMP threads makes the first one slow for good: libgomp then counts more threads than
    cores, and lets those that wait for work sleep at once. A step of Qwen3-TTS took twice as long
    (benchmarks/LOG.md). `torch.set_num_threads` cannot say this: of MKL's number and of torch's own there is
    one a process.
    """
    torch.get_num_threads()  # torch sets up a thread when it is first asked
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if hasattr(library, name):  # a build without MKL, or with another OpenMP, has no second number
            getattr(library, name)(1)
