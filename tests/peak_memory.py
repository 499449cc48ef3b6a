"""Load DIRECTORY and print how far the peak memory exceeded the model's size, in bytes.

This is a separate program because `VmHWM`, the peak of resident memory, belongs to a whole process. It
includes mapped files.
"""

import re
import sys
from pathlib import Path

import torch
from torch import nn

from zoo.checkpoint.loading import load

NUM_SHARDS, NUM_TENSORS, ROWS = 4, 4, 2048  # 64 MB a shard, 16 MB a tensor


def build() -> nn.ModuleList:
    with torch.device("meta"):
        return nn.ModuleList(nn.Linear(ROWS, ROWS, bias=False) for _ in range(NUM_SHARDS * NUM_TENSORS))


def table() -> dict[str, str]:
    return {f"layers.{i}.weight": f"{i}.weight" for i in range(NUM_SHARDS * NUM_TENSORS)}


def status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, field
    return int(found[1]) << 10


def measure(directory: Path) -> int:
    # run the operators of `load` once, so that their code is in memory before the measurement
    torch.stack(torch.ones(2).copy_(torch.zeros(2)).aminmax()).isfinite().all()
    model, before = build(), status_bytes("VmRSS")
    load(model, table(), directory, torch.device("cpu"), torch.float32)
    own = sum(tensor.nbytes for tensor in model.parameters())
    return status_bytes("VmHWM") - before - own


if __name__ == "__main__":
    print(measure(Path(sys.argv[1])))
