"""Count the device memory that a model needs before it is loaded. The tensors have no memory (`meta`), so
this takes seconds and reads no weights."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile_cache import limits
from serving.engine.device.arena import PAGE_TOKENS, chunk_bytes, paged_past, token_bytes
from serving.engine.device.page_table import INT
from serving.engine.device.staging import recorded_rows
from zoo.contract import Batch, Family, State, View
from zoo.nn import residual
from zoo.request import AudioClip, Reference, Request, RequestError

aten = torch.ops.aten

PAST_S = 8.0  # of each stream's past, for which the KV cache has room: few streams are at their ends at once
SPARE_PART = 0.1  # of a GPU's memory, for what is not counted: the context, libraries, fragments
SLOTS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # that are tried without --max-slots
PREFILL_TOKENS = 256  # of the launch that is counted


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. launch: temporary memory of the largest prefill and the largest render, which run at the same
    time. encoder: of encoding the longest reference, which runs next to them."""

    slots: int
    weights: int
    state: int  # of all slots: tapes, the decoder's past
    launch: int
    kv_cache: int
    encoder: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.state + self.launch + self.encoder + self.kv_cache


def plan(
    family: Family[Any], slots: int, kv_memory_bytes: int | None = None, is_for_cpu: bool = False
) -> MemoryPlan:
    """family: on `meta` or any other device; kv_memory_bytes None: `usual_kv_bytes`; is_for_cpu: with what
    its kernels read of the weights."""
    weights = num_bytes([*family.parameters(), *family.buffers()])
    if is_for_cpu:
        weights += residual.prepare(family)
    one, two = (num_bytes(state_tensors(family.state(n))) for n in (1, 2))
    state = one + (slots - 1) * (two - one)
    is_counted = family.device.type == "meta"
    return MemoryPlan(
        slots,
        weights,
        state,
        launch_bytes(family, slots) if is_counted else 0,
        usual_kv_bytes(family, slots) if kv_memory_bytes is None else kv_memory_bytes,
        encoder_bytes(family) if is_counted else 0,
    )


def usual_kv_bytes(family: Family[Any], slots: int) -> int:
    """Return room for 1,024 positions and PAST_S of the past a slot, and for one request of the model's
    longest."""
    spec = family.spec
    tokens = max(1024 * slots, spec.max_frames * spec.steps_per_frame + 1024) + 2 * PAGE_TOKENS
    return spec.lanes * tokens * token_bytes(family) + usual_past_bytes(family, slots)


def usual_past_bytes(family: Family[Any], slots: int) -> int:
    """Return PAST_S of the past a slot, and at least all that one stream can have; 0 without pages."""
    past = paged_past(family)
    if past is None:
        return 0
    chunks = slots * past.chunks(round(PAST_S * family.spec.frame_rate_hz))
    return max(chunks, past.max_chunks) * chunk_bytes(family)


def usual_swap_bytes(kv_memory_bytes: int) -> int:
    """Return the host's bytes for the pages of paused streams."""
    return min(5 * kv_memory_bytes, limits.memory_bytes() // 4)


def resident_bytes() -> int:
    """Return the bytes that this process has in memory; 0 if the system does not tell."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


def fit(
    families: Iterable[Family[Any]],
    room: int,
    max_slots: int | None = None,
    kv_memory_bytes: int | None = None,
) -> tuple[int, int]:
    """Return how many slots each family on `meta` may have (`max_slots` if it is given), and the bytes of
    the KV cache: the rest of `room` after weights, states, launches and encoders. Raises ValueError if
    that is too little: less than `usual_kv_bytes`, or than a smaller `kv_memory_bytes` for all families.
    """
    families = list(families)
    share = None if kv_memory_bytes is None else kv_memory_bytes // len(families)
    for slots in SLOTS if max_slots is None else (max_slots,):
        usual = [usual_kv_bytes(family, slots) for family in families]
        least = usual if share is None else [min(kv, share) for kv in usual]
        plans = [plan(family, slots, kv) for family, kv in zip(families, least, strict=True)]
        left = room - sum(one.total - one.kv_cache for one in plans)
        if left >= sum(one.kv_cache for one in plans):
            return slots, left
    needed = ", ".join(
        f"{family.spec.family} {one.total}" for family, one in zip(families, plans, strict=True)
    )
    raise ValueError(
        f"the device has {room} bytes to give; with max_slots {slots} these are needed: {needed}: serve "
        "with fewer slots, fewer models or another dtype"
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage once; a tensor in the layout of a CPU's library counts
    its numbers.
    """
    known, packed = [], 0
    for tensor in tensors:
        if tensor.is_mkldnn:
            packed += tensor.numel() * tensor.itemsize
        else:
            known.append(tensor)
    storages = {id(s := tensor.untyped_storage()): s for tensor in known}
    return packed + sum(storage.nbytes() for storage in storages.values())


def state_tensors(thing: object) -> list[Tensor]:
    """Return the tensors of a state and of its members."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, nn.Module) or not (
        isinstance(thing, State) or type(thing).__module__.startswith("zoo.")
    ):
        return []
    else:
        parts = list(vars(thing).values())
    return [tensor for part in parts for tensor in state_tensors(part)]


class Peak(TorchDispatchMode):
    """Measures the peak of bytes of tensors made within."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in before:
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.now -= size


def launch_bytes(family: Family[Any], slots: int) -> int:
    """Return the temporary bytes of the largest prefill and the largest render."""
    state = family.state(slots)
    window = family.spec.window
    length = window.lengths[-1] if window.lengths else 0
    rows = meta(np.zeros(recorded_rows(family, window.sizes[-1], slots), INT))
    view = View(rows, rows, rows, rows.bool(), window.sizes[-1], length)
    if (past := paged_past(family)) is not None:
        page_values = -(-past.values // past.row_values) * past.row_values
        state.arena = torch.empty(1, page_values, dtype=family.dtype, device="meta")
        view.pages = torch.empty(len(rows), past.max_chunks + 1, dtype=torch.int64, device="meta")
    inputs = torch.empty(PREFILL_TOKENS, family.spec.width, dtype=family.dtype, device="meta")
    return peak_bytes(lambda: family.hidden(inputs, prefill_batch(family))) + peak_bytes(
        lambda: family.render(state, view)
    )


class OnHost(TorchDispatchMode):
    """Gives zeros for values of `meta` tensors that the host asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        packet = func.overloadpacket
        if is_meta and packet in (aten.item, aten._local_scalar_dense):
            return 0
        device = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)), None)
        if is_meta and packet in (aten.to, aten._to_copy) and device == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


_encoders = weakref.WeakKeyDictionary[Family[Any], int]()  # a family keeps what it has encoded


def encoder_bytes(family: Family[Any]) -> int:
    """Return the temporary bytes of building a prompt with the longest reference; 0 without references."""
    if family.spec.reference_s is None:
        return 0
    if family not in _encoders:
        _encoders[family] = _encoder_bytes(family, family.spec.reference_s[1])
    return _encoders[family]


def _encoder_bytes(family: Family[Any], longest_s: float) -> int:
    spec = family.spec
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, int(longest_s * spec.sample_rate_hz))
    clip = AudioClip(noise.astype(np.float32), spec.sample_rate_hz)
    request = Request(text="Hello.", references=(Reference(clip, "Hello."),))

    def build() -> None:
        # A tiny model has no positions for so long a reference, which is encoded by then.
        with OnHost(), suppress(RequestError):
            next(family.passes(request))

    return peak_bytes(build)


def peak_bytes(launch: Callable[[], object]) -> int:
    with torch.inference_mode(), Peak() as peak:
        launch()
    return peak.most


def prefill_batch(family: Family[Any]) -> Batch:
    """One prompt."""
    kv, tokens = family.spec.kv, np.arange(PREFILL_TOKENS, dtype=INT)
    pages = -(-PREFILL_TOKENS // PAGE_TOKENS)
    rows = pages * 2 * kv.num_layers * PAGE_TOKENS
    return Batch(
        slots=meta(tokens[:1]),
        positions=meta(tokens),
        kv_write_index=meta(tokens),
        page_table=meta(tokens[None, :pages]),
        kv_lens=meta(tokens[:1]),
        cu_seqlens=meta(tokens[:2]),
        kv=torch.empty(rows, kv.num_heads, kv.head_dim, dtype=family.dtype, device="meta"),
        page=meta(tokens[:PAGE_TOKENS]),
        is_audio=meta(tokens.astype(bool)),
    )


def meta(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.copy()).to("meta")
