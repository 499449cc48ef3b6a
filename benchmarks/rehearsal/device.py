"""Answers from a table to every question that PyTorch and Triton ask a device.

Works with a CPU build of torch and the `triton` wheel that its CUDA build requires.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dynamo import device_interface
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.rehearsal.cards import CARDS, Card

aten = torch.ops.aten


@contextmanager
def pretend(name: str = "h100") -> Iterator[Card]:
    """Make torch and Triton believe in one GPU while the context is active."""
    _build_guard()
    card = CARDS[name]
    with ExitStack() as stack:
        for key, value in _answers(card).items():
            stack.enter_context(mock.patch.object(torch.cuda, key, value))
            if key in dir(device_interface.CudaInterface):
                stack.enter_context(
                    mock.patch.object(device_interface.CudaInterface, key, staticmethod(value))
                )
        for where, key, value in _patches():
            stack.enter_context(mock.patch.object(where, key, value, create=True))
        stack.enter_context(_triton_for(card))
        stack.enter_context(_attention_as_on_cuda())
        yield card


@cache
def _build_guard() -> ctypes.CDLL | None:
    """Build a device guard for CUDA (3 s), or return None if torch has one.

    A CPU build of torch has none, and indexing a fake CUDA tensor asks for one."""
    if torch.version.cuda is not None:
        return None
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "guard.so"
        source, flags = (
            Path(__file__).with_name("guard.cpp"),
            ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include"],
        )
        subprocess.run(["g++", *flags, source, "-o", library, f"-L{root}/lib", "-lc10"], check=True)
        return ctypes.CDLL(str(library))


class Graph:
    """A stand-in for torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        raise AssertionError("a pretended device records nothing, so it cannot replay a graph")


class Event:
    """A stand-in for torch.cuda.Event that is always complete."""

    def __init__(self, **kwargs: Any): ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """A stand-in for torch.cuda.Stream; all streams share one order."""

    def __init__(self, device: Any = None, priority: int = 0): ...

    def wait_event(self, event: Event) -> None: ...


def _answers(card: Card) -> dict[str, Any]:
    """Return replacements by their names in torch.cuda, and in the interface that Dynamo uses."""
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: types.SimpleNamespace(cuda_stream=0),
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name,
        "get_arch_list": lambda: [f"sm_{card.capability}"],
        "mem_get_info": lambda device=None: (card.total_memory, card.total_memory),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_tf32_supported": lambda: True,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "get_rng_state": lambda device="cuda": state,
        "set_rng_state": lambda state, device="cuda": None,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }


def _patches() -> list[tuple[Any, str, Any]]:
    deduce = joint_graph.UniformValueConstantFolder._deduce_value

    def deduce_here(self: Any, node: Any) -> Any:
        with _OnCpu():
            return deduce(self, node)

    return [
        (torch.version, "cuda", "13.0"),
        (torch._C, "_cuda_getCurrentRawStream", lambda device=0: 0),
        (torch.cuda.random, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8)),
        (device_interface.CudaInterface, "get_raw_stream", staticmethod(lambda device=0: 0)),
        # PyTorch's own support for fake CUDA tensors without a GPU asks whether a GPU exists. It must not see
        # the pretended one.
        (fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (triton_helpers, "set_driver_to_gpu", lambda: None),  # it looks for libcuda
        # Fake memory has no address. A clone has its own storage as well.
        (torch, "from_dlpack", torch.clone),
        # Inductor folds constants by computing them on the device.
        (joint_graph.UniformValueConstantFolder, "_deduce_value", deduce_here),
    ]


class _OnCpu(TorchDispatchMode):
    """A mode in which tensors for the GPU are created on the CPU and stay there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            is_cuda = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_cuda else value

        return func(*tree_map(here, args), **tree_map(here, kwargs or {}))


@contextmanager
def _triton_for(card: Card) -> Iterator[None]:
    before = driver._active
    driver.set_active(_driver(card))
    _forget_devices()
    try:
        yield
    finally:
        driver._active = before
        _forget_devices()


def _forget_devices() -> None:
    device_interface.caching_worker_device_properties.pop("cuda", None)
    DeviceProperties.create.cache_clear()


def _driver(card: Card) -> Any:
    """Return a stand-in for Triton's driver that answers Triton's compiler and inductor's heuristics."""
    limits = {
        "max_shared_mem": card.shared_memory_per_block_optin,
        "max_num_regs": card.regs_per_multiprocessor,
        "multiprocessor_count": card.multi_processor_count,
        "warpSize": card.warp_size,
    }
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", card.capability, card.warp_size),
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: types.SimpleNamespace(
            current_device=lambda: 0, synchronize=lambda: None
        ),
        is_active=lambda: True,
        utils=types.SimpleNamespace(get_device_properties=lambda device: limits),
    )


@contextmanager
def _attention_as_on_cuda() -> Iterator[None]:
    """Choose the attention operator as a CUDA device would, while the context is active.

    Without a device, both builds of torch compute scaled_dot_product_attention as plain products."""
    attention, key = aten.scaled_dot_product_attention.default, DispatchKey.CompositeImplicitAutograd
    attention.py_impl(key)(attend)
    try:
        yield
    finally:
        del attention.py_kernels[key]
        attention._dispatch_cache.clear()


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute scaled_dot_product_attention with the operator that CUDA chooses.

    That is flash attention without a mask, the memory-efficient kernel with one, and plain products for
    shapes that neither takes. Source: pytorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
    rest = (dropout_p, is_causal)
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if q.dim() == 4 and attn_mask is None and is_half and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        return aten._scaled_dot_product_flash_attention(q, k, v, *rest, scale=scale)[0]
    if q.dim() == 4 and q.shape[-1] % (8 if is_half else 4) == 0:
        bias = None if attn_mask is None else _aligned(attn_mask, q, k)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, *rest, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, attn_mask, *rest, scale=scale)[0]


def _aligned(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a mask [..., n] as a bias whose rows begin at multiples of 16, as the kernel requires."""
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    short = -bias.shape[-1] % 16
    if short:
        bias = torch.nn.functional.pad(bias, (0, short))[..., : bias.shape[-1]]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
