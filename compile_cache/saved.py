"""Save compiled functions to files, so that another process can load them without tracing them again.

This uses torch's `aot_compile` (experimental; used with 2.11 and 2.13), which keeps the output of Dynamo and
Inductor. Most guards are left out, because their number grows with the model. The name of the file's entry
(artifacts.py) covers what they would check.

    on a CPU     step.saved                   one graph, which holds for every size that varies (`any_size`)
    on a GPU     step-5f0c….saved             one graph for each kind of arguments, named by what cannot vary in them
                 mixed-…, prefill-…, render-tf32-…
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import structlog
import torch
from torch import Tensor, _dynamo, nn

from compile_cache import choices
from compile_cache.artifacts import MAKING, Entry
from compile_cache.lower import may_vary, traced

log = structlog.get_logger()

MAX_MESSAGE_CHARS = 1000


class Counted:
    """The number of functions since the process began."""

    found = 0
    compiled = 0


class Saved:
    """A method whose graphs are kept in an entry of the cache. A call takes the graph of its kind of arguments from
    there, or compiles one and adds it.

    name: of its files. The method is traced as usual if its graph cannot be saved or does not hold for a size. Each
    call looks at all arguments, so this is for launches that are then recorded.
    """

    def __init__(self, method: Callable[..., Any], name: str, entry: Entry):
        self.method, self.name, self.entry, self.traced = bound(method), name, entry, traced(method)
        self.graphs: dict[str, Any] = {}
        self.varying: dict[str, set[int]] = {}

    def __call__(self, *args: object) -> Any:
        kind = kind_of(args, self.varying)
        if kind not in self.graphs:
            self.graphs[kind] = self._graph(f"{self.name}-{kind}.saved", args)
        graph = self.graphs[kind]
        if graph is not None and graph.guard_check(self.method.__self__, *args):
            try:
                return graph.fn(self.method.__self__, *args)
            except AssertionError as error:  # Inductor's check of inputs: a size is a constant of the graph
                log.warning("a saved graph holds for one size only", name=self.name, why=str(error))
        return self.traced(*args)

    def _graph(self, name: str, args: tuple[object, ...]) -> Any:
        def make(file: Path) -> Any:
            graph = _compile(self.method, args, checks_sizes=True)
            graph.save_compiled_function(str(file))
            Counted.compiled += 1
            return graph

        return taken(self.entry, name, _load, make)


def taken(entry: Entry, name: str, load: Callable[[Path], Any], make: Callable[[Path], Any]) -> Any:
    """Return what a file of an entry holds. A file that is missing or useless is made and added. Returns None
    if that is impossible. Several processes may add a file at once: each writes a complete one."""
    file = entry.directory / name
    found = _tried(lambda: load(file), name) if entry.has(name) else None
    if found is not None:
        return found
    making = file.with_name(f"{name}.{os.getpid()}{MAKING}")
    made = _tried(lambda: make(making), name)
    if made is None:
        making.unlink(missing_ok=True)
    else:
        making.replace(file)
        entry.add(name)
    return made


def _tried(work: Callable[[], Any], name: str) -> Any:
    try:
        return work()
    except Exception as error:  # this part of torch is experimental, and a graph can still be traced
        why = shortened(f"{type(error).__name__}: {error}")
        log.warning("a graph cannot be loaded or saved", name=name, why=why)
        return None


def shortened(message: str) -> str:
    """Return the beginning and the end of a long message: a compiler's may have its whole input."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} [...] {message[-half:]}"


def compiled(method: Callable[..., Any], examples: tuple[object, ...], file: Path) -> Callable[..., Any]:
    """Compile a method into one graph for such arguments and save it. Raises the compiler's errors."""
    made = _compile(bound(method), examples, checks_sizes=False)
    made.save_compiled_function(str(file))
    Counted.compiled += 1
    return MethodType(made.fn, bound(method).__self__)


def loaded(method: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Load a method that `compiled` saved for an equal object."""
    return MethodType(_load(file).fn, bound(method).__self__)


def bound(method: Callable[..., Any]) -> MethodType:
    assert isinstance(method, MethodType), f"{method} is not a method; its object is an argument of the graph"
    return method


def _compile(method: MethodType, examples: tuple[object, ...], checks_sizes: bool) -> Any:
    """Return torch's compiled function. checks_sizes: whether `guard_check` tells for which sizes it holds."""
    plain = method.__func__
    assert isinstance(plain, FunctionType), f"{plain} is not a Python function"

    def kept(guards: list[Any]) -> list[bool]:
        return [checks_sizes and guard.guard_type == "SHAPE_ENV" for guard in guards]

    with (
        # torch.compile leaves inference mode while it compiles, but aot_compile does not
        _dynamo.utils.maybe_disable_inference_mode(),
        _dynamo.utils.maybe_disable_inference_mode_for_fake_prop(),
        _dynamo.config.patch(enable_aot_compile=True),  # torch 2.11 needs this already for torch.compile
    ):
        options: dict[str, Any] = {"cpp.threads": 1, "guard_filter_fn": kept}
        lowered: Any = torch.compile(plain, fullgraph=True, dynamic=False, options=options)
        return lowered.aot_compile(((method.__self__, *examples), {}))


def _load(file: Path) -> Any:
    with file.open("rb") as bytes:
        made: Any = torch.compiler.load_compiled_function(bytes)
    Counted.found += 1
    return made


def kind_of(args: tuple[object, ...], varying: dict[str, set[int]]) -> str:
    """Return a name for all calls of a method that may share a graph. Their device, dtypes and plain values are equal,
    and so are the sizes that do not vary.

    varying: the dims of each tensor that vary, by its name. Those that are marked in this call are added. The graph for
    a size of 1 is another one.
    """
    facts = [choices.device_name()]
    for name, value in _leaves("", args):
        if isinstance(value, Tensor):
            dims = varying.setdefault(name, set())
            dims |= may_vary(value)
            sizes = ["*" if i in dims and size > 1 else str(size) for i, size in enumerate(value.shape)]
            value = f"{value.dtype} {' '.join(sizes)}"
        facts.append(f"{name} {value!r}")
    return blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the tensors and plain values of an argument with their names, except for modules, which the name of the
    entry covers."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, Mapping):
        parts = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(str(i), one) for i, one in enumerate(value)]
    elif isinstance(value, Tensor) or (own := getattr(value, "__dict__", None)) is None:
        yield name, value
        return
    else:
        parts = sorted(own.items())
    for key, one in parts:
        yield from _leaves(f"{name}.{key}", one)
