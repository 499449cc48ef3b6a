"""Models from disk, and how many slots and how much KV memory they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import structlog
import torch

import zoo
from compile_cache import limits
from serving.engine.device.runner import narrow_codec
from serving.engine.memory.device_map import bytes_by_device, device_map, room_of_devices
from serving.engine.memory.memory_plan import SPARE_PART, fit, plan
from serving.settings import Settings
from zoo.contract import Family

CPU_SLOTS = 8
CPU_THROUGHPUT_SLOTS = 64  # at most, where no listener waits
PLACED_SLOTS = 4  # with a device map, slots and layers compete for memory, and each launch is slow
CPU_PART = 0.5  # of the host's memory, for a throughput engine without max_slots

log = structlog.get_logger()


def load(
    models: dict[str, str],
    device: str | None,
    dtype: str | None,
    progress: Callable[[float, str], None],
    devices: Mapping[str, str] | None = None,
    chunked: bool = False,
) -> dict[str, Family]:
    """Load all models or none. devices: see `placement`; chunked: see `zoo.load`. Raises ValueError, which
    names the directory to blame if there are several."""

    @contextmanager
    def of(name: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"model {name!r}: {error}" if len(models) > 1 else str(error)) from None

    for name, directory in models.items():
        with of(name):
            zoo.find(directory)  # check each before the first takes its minutes
    if device is None and torch.version.cuda is not None and not torch.cuda.is_available():
        log.info(f"torch was built for CUDA {torch.version.cuda} and finds no GPU: the CPU is used")
    families = {}
    for i, (name, directory) in enumerate(models.items()):
        progress(i / len(models), name if len(models) > 1 else "")
        with of(name):
            how: dict[str, Any] = {"keeps_bf16": True, "device_map": devices, "chunked": chunked}
            family = zoo.load(directory, device, dtype, **how)
            family.spec = replace(family.spec, name=f"model {name!r}")  # in messages to clients
            families[name] = family
        if chunked and not family.is_chunked:
            log.info(f"--chunked changes nothing for model {name!r}: it streams without it")
    return families


def sizes(settings: Settings) -> tuple[int, int | None]:
    """Return how many slots a model has, and the bytes of the KV cache. On a GPU, values that are not given
    follow from its free memory, before any of it is taken. Raises ValueError if it is too little."""
    device = settings.model.device or "cuda"
    given = settings.memory
    if not device.startswith("cuda") or not torch.cuda.is_available():  # loading says what else it may be
        return given.max_slots or cpu_slots(settings), given.kv_memory_bytes
    if settings.model.device_map is not None:
        return given.max_slots or PLACED_SLOTS, given.kv_memory_bytes
    room = int((1 - SPARE_PART) * torch.cuda.mem_get_info(torch.device(device))[0])
    shapes = shapes_of(settings, settings.model.dtype or "bfloat16")
    slots, kv_memory_bytes = fit(shapes, room, given.max_slots, given.kv_memory_bytes)
    return slots, kv_memory_bytes if given.kv_memory_bytes is None else given.kv_memory_bytes


def shapes_of(settings: Settings, dtype: str, keeps_bf16: bool = False) -> list[Family]:
    """Return the models without memory. Raises ValueError if one has no codec of the given format."""
    paths = settings.models.values()
    families = [zoo.load(path, "meta", dtype, keeps_bf16, chunked=settings.model.chunked) for path in paths]
    for family in families:
        narrow_codec(family, settings.model.codec)
    return families


def placement(settings: Settings, slots: int, kv_memory_bytes: int | None) -> dict[str, str]:
    """Return which layers lie on which other device, and log it; {} without --device-map. Raises
    ValueError."""
    how = settings.model
    if how.device_map is None:
        return {}
    device = torch.device(how.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        raise ValueError("--device-map needs a GPU: without one, all of a model lies on the host")
    if how.weights != "published":
        raise ValueError(
            f"--device-map copies published weights: --weights {how.weights} needs all on one GPU"
        )
    if how.depth != "layers":
        raise ValueError(f"--device-map copies weights: --depth {how.depth} needs all on one GPU")
    if len(settings.models) != 1:
        raise ValueError(f"--device-map is for one model, and {len(settings.models)} are given")
    [path] = settings.models.values()
    family = zoo.load(path, "meta", how.dtype or "bfloat16")
    made = plan(family, slots, kv_memory_bytes)
    devices = device_map(how.device_map, family, made, room_of_devices(device))
    parts = [f"{n / 2**30:.1f} GiB on {where}" for where, n in bytes_by_device(family, devices).items()]
    if parts:
        log.info(
            f"{len(devices)} layers lie elsewhere ({', '.join(parts)}) and are copied to {device} for each "
            "launch; such a model is neither compiled nor recorded"
        )
    return devices


def cpu_slots(settings: Settings) -> int:
    """Return the number of slots on a CPU. A step of many slots costs little more than a step of few, so the
    throughput policy uses many. Streams with listeners must all be made in real time, so they get fewer."""
    if settings.latency.policy != "throughput":
        return CPU_SLOTS
    dtype = settings.model.dtype or "float32"
    shapes = shapes_of(settings, dtype, keeps_bf16=True)
    try:
        slots, _ = fit(shapes, int(CPU_PART * limits.memory_bytes()))
    except ValueError:  # not even one: loading says what is possible
        return CPU_SLOTS
    return max(min(slots, CPU_THROUGHPUT_SLOTS), CPU_SLOTS)
