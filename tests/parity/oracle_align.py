"""Makes the fixtures of forced alignment from torchaudio's `forced_align`; see README.md in this folder.

Runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-align/bin/python tests/parity/oracle_align.py
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FIXTURES = Path(__file__).parent / "align"
# frames, columns, targets, the id of the blank, and how peaked the probabilities are
CASES = {
    "one_frame": (1, 3, 1, 0, 1.0),
    "as_many_frames_as_letters": (6, 8, 6, 0, 1.0),
    "two_letters": (9, 4, 2, 0, 1.0),
    "repeats": (30, 2, 8, 0, 1.0),
    "few_labels": (40, 3, 12, 0, 1.0),
    "last_is_blank": (50, 12, 20, 11, 1.0),
    "middle_is_blank": (50, 12, 20, 5, 2.0),
    "flat": (60, 32, 10, 0, 0.01),
    "peaked": (80, 32, 30, 0, 8.0),
    "tight": (70, 32, 60, 0, 2.0),
    "sentence": (150, 32, 40, 0, 4.0),
    "long": (400, 32, 120, 0, 4.0),
    "star": (120, 33, 25, 0, 4.0),
}


def functional():  # type: ignore[no-untyped-def]
    """Return torchaudio.functional. Its compiled parts are linked to CUDA's libraries, for which stubs stand
    (environments.sh)."""
    found = importlib.util.find_spec("torchaudio")
    assert found is not None and found.origin is not None, "torchaudio is not installed"
    for name in ("libcudart.so.13", "libc10_cuda.so", "libtorch_cuda.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    import torchaudio.functional

    return torchaudio.functional


def case(seed: int, frames: int, columns: int, count: int, blank: int, peak: float) -> tuple[Tensor, Tensor]:
    """Return emissions [1, T, V] and targets [1, L] that fit in them."""
    random = torch.Generator().manual_seed(seed)
    log_probs = (peak * torch.randn(1, frames, columns, generator=random)).log_softmax(-1)
    letters = torch.tensor([label for label in range(columns) if label != blank])
    targets = letters[torch.randint(len(letters), (1, count), generator=random)]
    return log_probs, targets


def main() -> None:
    align = functional().forced_align
    tensors: dict[str, Tensor] = {}
    for seed, (name, sizes) in enumerate(CASES.items()):
        log_probs, targets = case(seed, *sizes)
        if name == "star":  # as zoo.align.words.with_star
            log_probs[..., -1] = 0
        if name == "as_many_frames_as_letters":
            targets = torch.arange(1, sizes[2] + 1)[None]
        path, scores = align(log_probs, targets, blank=sizes[3])
        tensors |= {f"{name}.log_probs": log_probs[0], f"{name}.targets": targets[0]}
        tensors |= {f"{name}.path": path[0].long(), f"{name}.scores": scores[0]}
        tensors[f"{name}.blank"] = torch.tensor(sizes[3])
    FIXTURES.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, FIXTURES / "forced_align.safetensors"
    )


if __name__ == "__main__":
    main()
