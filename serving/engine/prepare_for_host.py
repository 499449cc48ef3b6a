"""Loaded families -> the same families, as fast as this machine runs them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import zoo
from compile_cache import artifacts, threads
from zoo.contract import Family
from zoo.nn import kernels
from zoo.nn.packed import pack


def prepare_for_host(*families: Family, compile: bool = True) -> Path:
    """Threads for the largest, matrices laid out for the CPU and kernels of its own, and a place where
    compiled code is kept, the first one's -> that place. Call it once for all of a process, before anything
    is compiled. Raises ValueError if the place cannot be written, or if something is to be compiled and there
    is no C++ compiler."""
    threads.set_num_threads(
        max(
            families,
            key=lambda family: sum(
                parameter.numel() * parameter.itemsize for parameter in family.parameters()
            ),
        )
    )
    for family in families:
        pack(family)
    place = use_cache_dir(families[0])
    if compile and families[0].device.type == "cpu":
        kernels.build()
    return place


def use_cache_dir(family: Family) -> Path:
    """What is compiled from now on is this family's -> the place where it is kept. Raises ValueError if the
    place cannot be written."""
    here = Path(zoo.__file__).parent
    code = (Path(inspect.getfile(type(family))).parent, here / "nn", here / "contract.py")
    return artifacts.use_cache_dir(
        family.spec.family, family, (replace(family.spec, options=(), hints={}), family.strategy), code
    )
