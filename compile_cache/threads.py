"""How many threads a model on a CPU is worth."""

from __future__ import annotations

import torch
from torch import nn

SMALL_BYTES = 64 << 20


def fit(model: nn.Module) -> int:
    """One thread for a model of less than SMALL_BYTES, else as many as there were -> the number. Call before anything is compiled.

    Waking a second thread takes longer than the products of a small model: a step of 8 streams of the tiny Qwen3-TTS took 20 ms with two
    threads and 4 ms with one (benchmarks/LOG.md).
    """
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    if size < SMALL_BYTES and next(model.parameters()).device.type == "cpu":
        torch.set_num_threads(1)
    return torch.get_num_threads()
