"""Which of several ways to compute the same is the fastest on this device: measured while a model warms up, and kept in
the entry of the compile cache (artifacts.py) that is open then, a file for each device.

What was not measured is not measured later, while somebody listens: `fastest` knows nothing of it then.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

SUFFIX = ".choices"  # of a file, which may change while its entry does not
Ways = Mapping[str, Callable[[], object]]

_known: dict[tuple[str, str], str] = {}  # of a device's name and a key
_measuring = ContextVar("measuring", default=False)
_assumed = ContextVar[str | None]("assumed", default=None)


def fastest(key: str, ways: Ways) -> str | None:
    """The name of the fastest way; None where that was never measured. key: what is computed, and of which shape."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    whose = device_name(), key
    if _known.get(whose) not in ways and _measuring.get() and not torch.cuda.is_current_stream_capturing():
        _known[whose] = min(ways, key=lambda name: time_us(ways[name]))
    way = _known.get(whose)
    return way if way in ways else None


def time_us(way: Callable[[], object]) -> float:
    """Of one launch whose tensors are not in the L2 cache."""
    from triton.testing import do_bench

    return 1e3 * float(do_bench(way, warmup=5, rep=20, return_mode="median"))


def at_most(rows: int) -> int:
    """The next power of two: shapes whose number of rows has the same are one."""
    return 1 << max(0, rows - 1).bit_length()


def device_name() -> str:
    return torch.cuda.get_device_name()


@contextmanager
def kept_in(directory: Path) -> Iterator[None]:
    """Within it what is not known is measured. What the directory's file says of this device is taken, and what is
    measured is added to it. On a CPU there is nothing to choose."""
    if not torch.cuda.is_available():
        yield
        return
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
    """Nothing where there is no such file, or one that cannot be read: then it is measured again."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(content, dict) and all(isinstance(way, str) for way in content.values())
    return content if is_whole else {}


def write(file: Path, ways: Mapping[str, str]) -> None:
    """There as a whole or not at all: others may read it meanwhile."""
    making = file.with_suffix(f".{os.getpid()}{SUFFIX}")
    making.write_text(json.dumps(ways, indent=1, sort_keys=True) + "\n")
    making.replace(file)


@contextmanager
def assumed(way: str) -> Iterator[None]:
    """Here this way is the fastest, whatever is computed: nothing is measured, and nothing kept."""
    token = _assumed.set(way)
    try:
        yield
    finally:
        _assumed.reset(token)
