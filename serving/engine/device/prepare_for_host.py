"""Prepare loaded families to run as fast as this machine can."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import structlog

import zoo
from compile_cache import artifacts, store, threads
from compile_cache.artifacts import Entry
from zoo import kernels
from zoo.contract import Family
from zoo.nn import fp8, frame_stack, residual
from zoo.nn.pack import num_in_int8, pack

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES, LARGEST_KEPT_BYTES = 1 << 30, 32 << 20  # glibc refuses a larger second one


def keep_freed_memory() -> None:
    """Give back the memory of replaced weights, then keep the memory that a render frees for the next one, if
    the C library is glibc. Left to itself it goes back to the system, and every page of it is taken, and
    zeroed, anew: 110,000 in a window of seven streams of CosyVoice 2 (benchmarks/LOG.md)."""
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)  # other systems have none
    if mallopt is not None:
        library.malloc_trim(0)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


WEIGHTS = ("published", "int8", "fp8")
DEPTHS = ("layers", "whole")

log = structlog.get_logger()


def prepare_for_host(
    *families: Family, compile: bool = True, weights: str = "published", depth: str = "layers"
) -> None:
    """Set the threads for the largest family, lay matrices out for the CPU, build its kernels, and keep
    freed memory. Call it once for all of a process, before anything is compiled. Raises ValueError if
    something is to be compiled and its place cannot be written, if the C++ compiler is missing, or if no
    family has weights that can be rounded as wanted.

    weights: one of WEIGHTS. The others round large matrices of bf16 weights: "int8" needs a CPU's kernels,
    "fp8" a GPU that multiplies it.
    depth: one of DEPTHS. "whole" runs each pass of a code predictor in one launch of a GPU.
    """
    check_weights(families, compile, weights)
    check_depth(families, depth)
    device = families[0].device.type
    largest = max(families, key=lambda family: sum(tensor.nbytes for tensor in family.parameters()))
    threads.set_num_threads(largest, is_compiled=compile)
    if device != "cpu":
        if weights == "fp8":
            with artifacts.opened(artifacts.place("fp8", "choices", device)):
                for family in families:
                    fp8.round_weights(family)
        if depth == "whole":
            join_depth(families)
        return
    if not compile:
        for family in families:
            pack(family)
        keep_freed_memory()
        return
    with artifacts.opened(artifacts.place("kernels", kernels.key())) as entry:
        if not entry.is_found:
            sys.stderr.write("zoo: building the CPU's kernels, which takes up to a minute\n")
        kernels.build()
        for family in families:
            pack(family, is_int8=weights == "int8")
            residual.prepare(family)
    if weights == "int8":
        check_rounded(families)
    keep_freed_memory()


def join_depth(families: Sequence[Family]) -> None:
    """Run each pass of all code predictors in one launch. Raises ValueError if no family has one, or if a
    GPU cannot run it so. If only some have one, log the others."""
    left = [family.spec.name or family.spec.family for family in families if not frame_stack.join(family)]
    if len(left) == len(families):
        raise ValueError(
            f"depth whole is for code predictors, and {' and '.join(left)} has none: use depth layers"
        )
    for name in left:
        log.warning("a step runs layer by layer", model=name, why="the model has no code predictor")


def check_rounded(families: Sequence[Family]) -> None:
    """Raise ValueError if no family has weights that were rounded to int8. If only some have them, log the
    others."""
    left = [family.spec.name or family.spec.family for family in families if not num_in_int8(family)]
    if len(left) == len(families):
        names = " and ".join(left)
        raise ValueError(
            f"weights int8 round large matrices that are published in 16 bits, and {names} has none: "
            "use weights published"
        )
    for name in left:
        log.warning("weights are used as published", model=name, why="no large matrix has 16 bits")


def check_weights(families: Sequence[Family], compile: bool, weights: str) -> None:
    """Raise ValueError, which says what is possible, if families cannot have these weights."""
    device = families[0].device.type
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r} are not possible; possible: {', '.join(WEIGHTS)}")
    if weights == "int8" and not (compile and device == "cpu"):
        where = "without --no-compile" if device == "cpu" else f"on a CPU, and the model is on {device}"
        possible = "published" if device == "cpu" else "published or fp8"
        raise ValueError(f"weights int8 are computed by compiled kernels {where}: use weights {possible}")
    if weights == "fp8":
        possible = "published or int8" if device == "cpu" else "published"
        for why in filter(None, (fp8.why_not(family.device, family.dtype) for family in families)):
            raise ValueError(f"{why}: use weights {possible}")


def check_depth(families: Sequence[Family], depth: str) -> None:
    """Raise ValueError, which says what is possible, if families cannot have this depth."""
    if depth not in DEPTHS:
        raise ValueError(f"depth {depth!r} is not possible; possible: {', '.join(DEPTHS)}")
    if depth == "whole" and families[0].device.type == "cpu":
        raise ValueError("depth whole is for a GPU, and the model is on cpu: use depth layers")


@contextmanager
def cached(family: Family) -> Iterator[Entry]:
    """Open the family's place in the cache for code that is compiled within; after a new entry, prune the
    cache. Raises ValueError if its place cannot be written."""
    with artifacts.opened(cache_place(family)) as entry:
        yield entry
    if not entry.is_found:
        try:
            store.prune(artifacts.root_directory())
        except OSError as error:  # another user's old entries are no reason not to serve
            log.warning("old compiled code cannot be dropped", why=str(error))


def cache_place(family: Family) -> Path:
    """Return the place of the family's compiled code. Nothing in it depends on slots, on memory, on
    threads, on the name that it is served by, or on the models that it is served with."""
    here = Path(zoo.__file__).parent
    code = (Path(inspect.getfile(type(family))).parent, here / "nn", here / "kernels", here / "contract")
    # a configuration holds every number that the modules were made with
    facts = replace(family.spec, name="", options=(), hints={}), family.strategy, vars(family).get("config")
    return artifacts.place(family.spec.family, artifacts.digest(family, facts, code), family.device.type)
