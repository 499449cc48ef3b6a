"""Keep inductor's Triton kernels for a pretended card, count them as if launched, and build them."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch import Tensor
from torch._inductor import async_compile, codecache
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map
from triton.runtime.jit import JITFunction, MockTensor

from benchmarks.rehearsal.launches import Log, arithmetic, tensor_bytes, tensors_of
from zoo.kernels import triton_whole_stack

RESULTS = {"out", "log_sums", "grown"}  # arguments that our kernels write
# FLOPs of kernels whose arithmetic may take longer than their bytes, from their arguments
WORK: dict[str, Callable[[dict[str, Any]], int]] = {
    "_swiglu_linear": lambda given: 2 * given["rows"] * given["weight"].numel(),
    "_convolve_rows": lambda given: 2 * given["rows"] * given["weight"].numel(),
    "_attend_stretch": lambda given: 4 * given["q"].numel() * (given["capacity"] + given["num"]),
    "_run_stack": lambda given: 2 * given["x"].shape[:2].numel() * _stack_weights(given),
}
# Phases after the first one of kernels whose programs wait for each other
FURTHER_PHASES: dict[str, Callable[[dict[str, Any]], int]] = {
    "_run_stack": lambda given: triton_whole_stack.PHASES * given["layers"] - 1,
}
# Bytes of an argument if a kernel touches less than all of it. Of a cache, that is the streams' rows in one
# layer, as far as they can be full, or their new positions.
TOUCHED: dict[tuple[str, str], Callable[[dict[str, Any]], int]] = {
    ("_attend_stretch", "arena"): lambda given: _past_bytes(given["k"], given["capacity"]),
    ("_write", "kv"): lambda given: tensor_bytes(given["k"]) + tensor_bytes(given["v"]),
    ("_keep_stretch", "arena"): lambda given: tensor_bytes(given["k"]) + tensor_bytes(given["v"]),
    # a table of addresses stands for the weights, and half of a frame's cache is filled on average
    ("_run_stack", "table"): lambda given: _stack_weights(given) * given["x"].itemsize,
    ("_run_stack", "cache"): lambda given: tensor_bytes(given["cache"]) // 2,
}


def _past_bytes(keys: Tensor, capacity: int) -> int:
    """Return the bytes of keys and values of so many places for each row of keys [B, Q, D]."""
    return 2 * keys.shape[0] * capacity * keys.shape[2] * keys.itemsize


def _stack_weights(given: dict[str, Any]) -> int:
    """Return the number of weights in the matrices of a `whole_stack`."""
    heads = (2 * given["GROUP"] + 2) * given["KV_HEADS"] * given["DIM"]  # queries twice: qkv and out
    return int(given["layers"] * given["WIDTH"] * (heads + 3 * given["INNER"]))


class Kernel:
    """A stand-in for a compiled kernel: `run` logs what would have been launched."""

    def __init__(self, name: str, source: str, log: Log):
        self.name, self.log = name, log
        signature = re.search(r"'signature': \{([^}]*)\}", source)
        assert signature is not None, f"{name} has no signature"
        kinds = re.findall(r"'(\w+)': '([^']+)'", signature[1])
        self.arguments = [argument for argument, kind in kinds if kind != "constexpr"]
        self.num_loads = Counter(re.findall(r"tl\.load\((\w+)", source))
        self.sizes = {key: int(value) for key, value in re.findall(r"^    (\w*numel) = (\d+)$", source, re.M)}

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        given = dict(zip(self.arguments, args, strict=False))
        sizes = {name: int(value) for name, value in given.items() if name.endswith("numel")} | self.sizes
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        # A pointwise kernel or a reduction touches a tensor at each load at most once per element (for a
        # lookup table, less).
        elements = math.prod(sizes.values()) if sizes else math.inf
        touched = {
            name: (
                tensor,
                int(
                    min(tensor_bytes(tensor), elements * max(1, self.num_loads[name]) * tensor.element_size())
                ),
            )
            for name, tensor in tensors.items()
        }
        reads = [one for name, one in touched.items() if not name.startswith("out_ptr")]
        writes = [one for name, one in touched.items() if name.startswith(("out_ptr", "in_out_ptr"))]
        with self.log.of("triton"):
            self.log.add(self.name, reads, writes)


@dataclass
class Kernels:
    """Kernels to build.

    sources: inductor's, name and source, keyed by the source without its name, because each graph counts
    names from 0. ours: our own, each with a compiler for the arguments of its call."""

    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    ours: dict[str, partial[Any]] = field(default_factory=dict)


@contextmanager
def lowering(log: Log) -> Iterator[Kernels]:
    """Let inductor compile for the card, and run its output over fake tensors.

    Each launch is counted as often as it happens, launches inside regions included."""
    kernels = Kernels()
    load = codecache.PyCodeCache.load_by_key_path.__func__  # type: ignore[attr-defined]

    def keep(cls: Any, key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        module = load(cls, key, path, *args, **kwargs)
        if "call" in vars(module):
            module.call = _logged(module.call, log)
        return module

    def make(self: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        kernels.sources.setdefault(source.replace(name, ""), (name, source))
        return Kernel(name, source, log)

    compile_ours = JITFunction.run

    def launch(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        given = dict(zip(function.arg_names, args, strict=False)) | kwargs
        # Each tensor counts once: a call may pass one again for an argument that is not read.
        tensors = {id(value): name for name, value in given.items() if isinstance(value, Tensor)}
        touched = {}
        for name in tensors.values():
            part = TOUCHED.get((function.__name__, name))
            touched[name] = log.touched(given[name]) if part is None else (given[name], part(given))
        is_written = RESULTS if function.__name__ != "_keep_stretch" else {"arena"}
        reads = [one for name, one in touched.items() if name not in is_written]
        writes = [one for name, one in touched.items() if name in is_written]
        flops = WORK[function.__name__](given) if function.__name__ in WORK else 0
        factors = tensors_of(given.get("x", given))
        log.add(function.__name__, reads, writes, flops, arithmetic(factors) if flops else "fp32")
        further = FURTHER_PHASES[function.__name__](given) if function.__name__ in FURTHER_PHASES else 0
        with log.of("phase"):  # its bytes are those of the launch
            for _ in range(further):
                log.add("phase", ())
        mocked, named = tree_map(_without_values, (args, kwargs))
        compiler = partial(compile_ours, function, *mocked, grid=grid, warmup=True, **named)
        kernels.ours.setdefault(f"{function.__name__} {named} {[str(one) for one in mocked]}", compiler)

    patches = [
        (JITFunction, "run", launch),
        (async_compile.AsyncCompile, "triton", make),
        (codecache.PyCodeCache, "load_by_key_path", classmethod(keep)),
        (torch._C._dynamo.guards, "_empty_strided_cuda", _empty),
        (torch._C._dynamo.guards, "_reinterpret_tensor", _reinterpret),
        (ShapeEnv, "transfer_symbols_from_foreign_shape_env", _own_symbols),
    ]
    with ExitStack() as stack:
        # shape_padding measures products, so it needs a device
        options: dict[str, Any] = {
            "compile_threads": 1,
            "fx_graph_cache": False,
            "shape_padding": False,
            "use_static_triton_launcher": False,
        }
        stack.enter_context(torch._inductor.config.patch(**options))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        for where, name, value in patches:
            if not hasattr(where, name):  # torch 2.11 lacks some
                continue
            stack.enter_context(mock.patch.object(where, name, value))
        yield kernels


def _without_values(value: Any) -> Any:
    return MockTensor(value.dtype) if isinstance(value, Tensor) else value


def _logged(call: Any, log: Log) -> Any:
    def logged(*args: Any) -> Any:
        with log.of("extern"):
            return call(*args)

    return logged


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _own_symbols(
    env: Any,
    size: Any,
    stride: Any,
    offset: Any,
    source: Any,
    *,
    symbolic_context: Any = None,
    hint_overrides: Any = None,
) -> Any:
    """Create symbols for the marked sizes of a fake input.

    Dynamo would keep the sizes of a fake input as they are, but ours stand for real inputs."""
    return env._create_symbolic_sizes_strides_storage_offset(
        size,
        stride,
        offset,
        [False] * len(size),
        source,
        symbolic_context=symbolic_context,
        hint_overrides=hint_overrides,
    )


@dataclass
class Built:
    """The results of ptxas. spilled: names of kernels whose registers spill to memory."""

    num_kernels: int = 0
    max_registers: int = 0
    max_shared_bytes: int = 0
    spilled: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


SPILLED_BYTES = 256  # bytes of stack a thread; functions such as sin and cos use less than this


def build(kernels: Kernels) -> Built:
    """Build every kernel to a cubin with triton's ptxas, in the first of the configurations between which a device
    would choose. Failures are kept by name."""
    compilers = [(name, partial(_compile, name, source)) for name, source in kernels.sources.values()]
    compilers += [(name, partial(_compile_ours, compiler)) for name, compiler in kernels.ours.items()]
    built = Built(num_kernels=len(compilers))
    for name, compiler in compilers:
        try:
            compiled = compiler()
        except Exception as error:  # whatever the compiler raises is a result
            built.failed[name] = str(error).strip().splitlines()[-1]
            continue
        registers, stack = _resources(compiled.asm["cubin"])
        built.max_registers = max(built.max_registers, registers)
        built.max_shared_bytes = max(built.max_shared_bytes, compiled.metadata.shared)
        if stack > SPILLED_BYTES and name not in built.spilled:
            built.spilled.append(name)
    return built


def _compile(name: str, source: str) -> Any:
    kernel = async_compile._load_triton_kernel_from_source(name, source)
    if kernel.configs is not None:  # this process has not built the same source before
        del kernel.configs[1:]
        kernel.precompile(warm_cache_only=True)
    return kernel.compile_results[0].kernel


def _compile_ours(compiler: partial[Any]) -> Any:
    compiler.args[0].device_caches.clear()  # cached for another card
    return compiler()


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
