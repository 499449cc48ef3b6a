"""Choose the fastest of several ways to compute the same result on this device.

The ways are measured while a model warms up. The open entry of the compile cache (artifacts.py) keeps the
choices, in a file for each device. After the warm-up nothing is measured, so that no listener waits for it:
`fastest` returns None for what was not measured.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from compile_cache import processor

TRIES = 5  # on a CPU
CACHE_BYTES = 64 << 20  # zeroed before each try, more than the caches of most CPUs hold
SUFFIX = ".choices"  # such a file may change without changing its entry, so no manifest lists it
Ways = Mapping[str, Callable[[], object]]

_known: dict[tuple[str, str], str] = {}  # (device name, key) -> name of the fastest way
_measuring = ContextVar("measuring", default=False)
_assumed = ContextVar[str | None]("assumed", default=None)


def fastest(key: str, ways: Ways) -> str | None:
    """Return the name of the fastest way, or None if it was not measured. key: the computation and shape."""
    if (assumed := _assumed.get()) is not None:
        return assumed if assumed in ways else None
    if known(key) not in ways and is_measuring():
        _known[device_name(), key] = min(ways, key=lambda name: time_us(ways[name]))
    way = known(key)
    return way if way in ways else None


def known(key: str) -> str | None:
    """Return the name of the fastest way that was measured on this device, or None."""
    return _assumed.get() or _known.get((device_name(), key))


def is_measuring() -> bool:
    """Return whether `fastest` measures now."""
    return _measuring.get() and not is_recording()


def is_recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def time_us(way: Callable[[], object]) -> float:
    """Return the time of one launch with cold caches: the median on a GPU, the least of TRIES on a CPU."""
    if not torch.cuda.is_available():
        return min(cold_us(way) for _ in range(TRIES))
    from triton.testing import do_bench

    return 1e3 * float(do_bench(way, warmup=5, rep=20, return_mode="median"))


def cold_us(way: Callable[[], object]) -> float:
    """Return the time of one call while the CPU's caches hold none of the data that it reads."""
    torch.zeros(CACHE_BYTES, dtype=torch.uint8)
    began_s = time.perf_counter()
    way()
    return 1e6 * (time.perf_counter() - began_s)


def at_most(rows: int) -> int:
    """Round a number of rows up to a power of two. Shapes that round to the same number share a choice."""
    return 1 << max(0, rows - 1).bit_length()


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor.model()} {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def kept_in(directory: Path) -> Iterator[None]:
    """Measure unknown choices in this context. Choices for this device are read from a file in the directory,
    and new ones are added to it."""
    file = directory / f"{re.sub('[^a-z0-9]+', '-', device_name().lower())}{SUFFIX}"
    found = read(file)
    _known.update({(device_name(), key): way for key, way in found.items()})
    token = _measuring.set(True)
    try:
        yield
    finally:
        _measuring.reset(token)
    now = {key: way for (device, key), way in _known.items() if device == device_name()}
    if now != found:
        write(file, now)


def read(file: Path) -> dict[str, str]:
    """Return the choices in a file, or none if it is missing or unreadable; they are then measured again."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(content, dict) and all(isinstance(way, str) for way in content.values())
    return content if is_whole else {}


def write(file: Path, ways: Mapping[str, str]) -> None:
    """Write the choices atomically, because other processes may read the file meanwhile."""
    making = file.with_suffix(f".{os.getpid()}{SUFFIX}")
    making.write_text(json.dumps(ways, indent=1, sort_keys=True) + "\n")
    making.replace(file)


@contextmanager
def assumed(way: str) -> Iterator[None]:
    """Pretend in this context that a way is the fastest for everything. Nothing is measured or kept."""
    token = _assumed.set(way)
    try:
        yield
    finally:
        _assumed.reset(token)
