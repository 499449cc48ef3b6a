"""Which layers of a model lie on its GPU, on other GPUs, or on the host (`--device-map`).

Only the layers that `hidden` calls can lie elsewhere, because a launch runs each of them once, whole. The
first device holds everything else. accelerate then gives the layers, in order, the rest of that device, the
other GPUs, and the host.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_cache import limits
from serving.engine.memory.memory_plan import PREFILL_TOKENS, SPARE_PART, MemoryPlan, num_bytes, prefill_batch
from zoo.contract import Family

HOST = "cpu"
HOST_PART = 0.8  # of the host's memory, for layers
AUTO, BALANCED = "auto", "balanced"


def layers(family: Family[Any]) -> dict[str, nn.Module]:
    """Return the layers of a family on `meta` that can lie elsewhere, by name, in the order in which they
    run: the elements of lists that `hidden` calls."""
    names = {
        f"{name}.{i}": layer
        for name, part in family.named_modules()
        if isinstance(part, nn.ModuleList)
        for i, layer in enumerate(part)
    }
    called: dict[str, nn.Module] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _, name=name: called.update({name: layer}))
        for name, layer in names.items()
    ]
    inputs = torch.empty(PREFILL_TOKENS, family.spec.width, dtype=family.dtype, device="meta")
    with torch.inference_mode():
        family.hidden(inputs, prefill_batch(family))
    for hook in hooks:
        hook.remove()
    return {
        name: layer for name, layer in called.items() if not any(name.startswith(f"{up}.") for up in called)
    }


def device_map(how: str, family: Family[Any], plan: MemoryPlan, room: Mapping[str, int]) -> dict[str, str]:
    """Return the layers that lie elsewhere -> their devices.

    how: "auto" fills one device after the other, "balanced" gives the GPUs equal parts; else a JSON file of
    such a mapping. family: on `meta`. plan: its memory. room: the bytes of each device, first the one that
    runs the model; the last is the host. Raises ValueError for a file that cannot be read, and if the layers
    do not fit.
    """
    movable = layers(family)
    if how not in (AUTO, BALANCED):
        return _read(Path(how), movable)
    main, *others = room
    fixed = plan.total - num_bytes([tensor for layer in movable.values() for tensor in layer.parameters()])
    if fixed > room[main]:
        raise ValueError(
            f"{main} has {room[main]} bytes to give, and {fixed} are needed besides the layers, which "
            "--device-map can put elsewhere: serve with fewer slots"
        )
    left = {main: room[main] - fixed} | {other: room[other] for other in others}
    return _dealt(how, movable, left)


def _dealt(how: str, movable: Mapping[str, nn.Module], left: Mapping[str, int]) -> dict[str, str]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    model = nn.ModuleDict({name.replace(".", "/"): layer for name, layer in movable.items()})
    kinds = sorted({type(layer).__name__ for layer in movable.values()})
    names = [name for name in left if name != HOST]
    memory: dict[int | str, int] = {
        names.index(name) if name in names else HOST: n for name, n in left.items()
    }
    if how == BALANCED:
        memory = get_balanced_memory(model, max_memory=memory, no_split_module_classes=kinds)
    dealt = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=kinds)
    if "" in dealt:
        dealt = dict.fromkeys(model, dealt[""])
    if "disk" in dealt.values():
        raise ValueError(f"the layers do not fit into {sum(left.values())} bytes of GPUs and host together")
    where = {name.replace("/", "."): HOST if at == HOST else names[int(at)] for name, at in dealt.items()}
    return {name: device for name, device in where.items() if device != next(iter(left))}


def _read(path: Path, movable: Mapping[str, nn.Module]) -> dict[str, str]:
    try:
        devices = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--device-map {path}: {error}; auto, balanced or a JSON file is possible") from None
    if not isinstance(devices, dict) or not all(isinstance(device, str) for device in devices.values()):
        raise ValueError(f'--device-map {path}: an object such as {{"talker.layers.3": "cpu"}} is possible')
    for name in devices:
        if name not in movable:
            raise ValueError(
                f"--device-map {path}: {name!r} cannot be placed; possible: {', '.join(movable)}"
            )
    return devices


def room_of_devices(device: torch.device) -> dict[str, int]:
    """Return the bytes that each device has to give: the model's first, then other GPUs, then the host."""
    room = {}
    if device.type == "cuda":
        main = device.index or 0
        for index in (main, *(i for i in range(torch.cuda.device_count()) if i != main)):
            room[f"cuda:{index}"] = int((1 - SPARE_PART) * torch.cuda.mem_get_info(index)[0])
    return room | {HOST: int(HOST_PART * limits.memory_bytes())}


def bytes_by_device(family: Family[Any], devices: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of layers on each device of a device map."""
    movable, found = layers(family), Counter[str]()
    for name, device in devices.items():
        found[device] += num_bytes(movable[name].parameters())
    return dict(found)
