"""Loaded families -> the same families, as fast as this machine runs them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import zoo
from compile_cache import artifacts, store, threads
from compile_cache.artifacts import Entry
from zoo.contract import Family
from zoo.nn import kernels, residual
from zoo.nn.packed import pack


def prepare_for_host(*families: Family, compile: bool = True) -> None:
    """Threads for the largest, matrices laid out for the CPU and kernels of its own. Call it once for all of a
    process, before anything is compiled. Raises ValueError if something is to be compiled and its place cannot be
    written, or there is no C++ compiler."""
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
    if compile and families[0].device.type == "cpu":
        with artifacts.opened(artifacts.place("kernels", kernels.key())):
            kernels.build()
        for family in families:
            residual.prepare(family)


@contextmanager
def cached(family: Family) -> Iterator[Entry]:
    """What is compiled within is this family's, prepared; after a new entry, the cache is pruned. Raises ValueError if
    its place cannot be written."""
    with artifacts.opened(cache_place(family)) as entry:
        yield entry
    if not entry.is_found:
        store.prune(artifacts.root_directory())


def cache_place(family: Family) -> Path:
    """Where the family's compiled code is kept. Nothing in it depends on slots, on memory, on threads, or on the
    models that it is served with."""
    here = Path(zoo.__file__).parent
    code = (Path(inspect.getfile(type(family))).parent, here / "nn", here / "contract.py")
    # a configuration holds every number that the modules were made with
    facts = replace(family.spec, options=(), hints={}), family.strategy, vars(family).get("config")
    return artifacts.place(family.spec.family, artifacts.digest(family, facts, code))
