"""Where compiled code is kept between processes: in a directory of its own for everything that the compiler's own key leaves out."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def keep(root: str | Path | None = None) -> Path:
    """Keep what is compiled from now on below `root` (else ZOO_CACHE_DIR, else ~/.cache/speechzoo) and find what was kept -> the place.

    Inductor's key does not hold the instruction set: code for AVX-512 read on a machine without it gives NaN. So the path does.
    Raises ValueError if the directory cannot be written.
    """
    root = Path(root or os.environ.get("ZOO_CACHE_DIR") or Path.home() / ".cache" / "speechzoo")
    if torch.cuda.is_available():
        target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    else:
        target = f"{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '_')}-{torch.get_num_threads()}-threads"
    directory = root / "compiled" / f"torch-{torch.__version__}" / target
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{directory} cannot hold compiled code: {error.strerror}") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    return directory
