"""A loaded family -> the same family, as fast as this machine runs it."""

from __future__ import annotations

import inspect
from pathlib import Path

import zoo
from compile_cache import artifacts, threads
from zoo.contract import Family
from zoo.nn.packed import pack


def fit(family: Family) -> Path:
    """Threads for its size, matrices laid out for the CPU, and a place where its compiled code is kept -> that place. Call before it is
    compiled. Raises ValueError if the place cannot be written."""
    threads.fit(family)
    pack(family)
    here = Path(zoo.__file__).parent
    code = (Path(inspect.getfile(type(family))).parent, here / "nn", here / "contract.py")
    return artifacts.keep(family.spec.family, family, (family.spec, family.strategy), code)
