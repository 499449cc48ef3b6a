"""Where compiled code is kept between processes: one directory for everything that it depends on.

    ROOT/compiled / torch-2.13.0 / avx512-2-threads / qwen3_tts-5f0c…      by version, machine and threads, and by model
                                                                          (its tensors, its dtype, its strategy, its code)

Inductor's own key leaves some of that out: code for AVX-512 that is read on a machine without it gives NaN.
It compiles under a lock, so several processes may fill one directory at once; what one that was killed left
half written, the next one drops (`unfinished.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn

from compile_cache import unfinished


def use_cache_dir(
    name: str, model: nn.Module, facts: object, code: Iterable[Path], root: str | Path | None = None
) -> Path:
    """Keep what is compiled from now on below `root` (else ZOO_CACHE_DIR, else ~/.cache/speechzoo) and find
    what was kept -> the place.

    name: of the model, for the eye; facts: what else its graphs depend on (sizes, strategy), as something
    whose `repr` says it; code: the files and folders it is written in, beside this room.
    Raises ValueError if the directory cannot be written.
    """
    root = Path(root or os.environ.get("ZOO_CACHE_DIR") or Path.home() / ".cache" / "speechzoo")
    directory = (
        root / "compiled" / f"torch-{torch.__version__}" / target() / f"{name}-{digest(model, facts, code)}"
    )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.begin(directory)
    except OSError as error:
        raise ValueError(f"{directory} cannot hold compiled code: {error.strerror}") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    return directory


def target() -> str:
    """The machine as far as compiled code cares."""
    if torch.cuda.is_available():
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '_')}-{torch.get_num_threads()}-threads"


def digest(model: nn.Module, facts: object, code: Iterable[Path]) -> str:
    """Names the graphs of a model: the shapes, dtypes and layouts of its tensors, `facts`, and the code that
    they are traced from."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    lines = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.layout}" for name, tensor in tensors)
    files = [
        file
        for path in (*code, Path(__file__).parent)
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else (path,))
    ]
    sources = (part for file in files for part in (file.name.encode(), file.read_bytes()))
    return _hash(*(line.encode() for line in lines), repr(facts).encode(), *sources)


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
