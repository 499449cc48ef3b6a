"""A zoo of speech language models: `load` one from a directory or the Hugging Face Hub, then `generate`
speech.

    family = zoo.load("Qwen3-TTS-12Hz-1.7B-CustomVoice")
    speech = zoo.generate(family, zoo.Request(text="Good morning.", voice="vivian"))

torch is imported with the first model, not with the package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from zoo.contract import Family, FamilyFolder, Speech
    from zoo.loop import generate
    from zoo.request import AudioClip, Option, Reference, Request, RequestError, Turn

__all__ = [
    "SMALL_VOICE",
    "AudioClip",
    "Family",
    "Reference",
    "Request",
    "RequestError",
    "Speech",
    "Turn",
    "families",
    "generate",
    "inspect",
    "load",
]
DTYPES = ("float32", "bfloat16")
# the subpackages that are not families; some import torch
ROOMS = frozenset({"align", "checkpoint", "contract", "kernels", "nn", "text", "voices"})
# a small checkpoint that comes with the package and speaks English
SMALL_VOICE = Path(__file__).parent / "small_voice"


def __getattr__(name: str) -> Any:
    if name in ("AudioClip", "Reference", "Request", "RequestError", "Turn"):
        return getattr(importlib.import_module("zoo.request"), name)
    if name in ("Family", "Speech"):
        return getattr(importlib.import_module("zoo.contract"), name)
    if name == "generate":
        return importlib.import_module("zoo.loop").generate
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")


def families() -> dict[str, FamilyFolder]:
    """Return the families: all subpackages except ROOMS."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    names = [name for name in names if name not in ROOMS]
    return {name: cast("FamilyFolder", importlib.import_module(f"zoo.{name}")) for name in names}


def find(model: str | Path) -> tuple[FamilyFolder, Path]:
    """Return the family that claims a model, and the model's directory. Raises ValueError.

    model: a directory, which never needs the network, or ORG/NAME or ORG/NAME@REVISION, which `zoo.hub`
    fetches. Both may be followed by +ADAPTER, a directory.
    """
    from zoo.checkpoint.json_files import read_config
    from zoo.hub import local_directory, split_adapter

    path = local_directory(split_adapter(model)[0])
    known = families()
    for family in known.values():
        if family.claims(path):
            return family, path
    names = f"known families: {', '.join(known)}"
    if not (path / "config.json").exists():
        lacking = "it has no config.json, nor the files of a family without one"
        raise ValueError(f"{path} is not a model: {lacking}; {names}")
    raise ValueError(f"{path} has model_type {read_config(path).get('model_type')!r}; {names}")


def load(
    model: str | Path,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    keeps_bf16: bool = False,
    device_map: Mapping[str, str] | None = None,
    chunked: bool = False,
) -> Family:
    """Load a model (see `find`) with its weights. Raises ValueError.

    device None: the GPU if there is one. dtype: float32 or bfloat16, as a torch dtype or by name; None:
    bfloat16 on a GPU, float32 on a CPU. In MODEL+ADAPTER, the adapter is a directory of LoRA weights, for
    families that take one. keeps_bf16: a float32 model on a CPU keeps large weights that are published in
    bf16 as they are. It computes the same numbers with half the memory, and is slow until
    `zoo.nn.pack.pack`. device_map: layers (`serving.engine.memory.device_map.layers`) that lie on another
    device, such as {"talker.layers.3": "cpu"}, and are copied to the model's before they run. chunked: see
    `Family.render_in_chunks`.
    """
    import torch

    from zoo.checkpoint.loading import bf16_kept
    from zoo.checkpoint.placement import dispatch, placing
    from zoo.hub import split_adapter

    base, adapter = split_adapter(model)
    family, path = find(base)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:  # it lists devices that no model here runs on
        raise ValueError(f"device {device!r} is not available; use cpu or cuda") from None
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} is not available: {reason}; use cpu or cuda") from None
    if dtype is None:
        dtype = "float32" if where.type == "cpu" else "bfloat16"
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not possible; possible: {', '.join(DTYPES)}")
    # fp32 means fp32: a reference's codes can depend on the last bits
    torch.backends.cudnn.allow_tf32 = False
    arguments = getattr(torch, name), adapter
    # an adapter changes weights, which then have more bits
    is_kept = keeps_bf16 and where.type != "cuda" and adapter is None
    with bf16_kept() if is_kept else nullcontext():
        if not device_map:
            loaded = family.load(path, where, *arguments)
        else:
            with placing(family.load(path, torch.device("meta"), *arguments), device_map):
                loaded = family.load(path, where, *arguments)
            dispatch(loaded, where, device_map)
    if chunked:
        loaded.render_in_chunks()
    if path == SMALL_VOICE:  # its format would call it a model of 0.6B
        loaded.spec = replace(loaded.spec, name="the small voice")
    return loaded


def inspect(model: str | Path, device: str | None = None) -> dict[str, Any]:
    """Return the facts about a model (see `find`) without loading its weights, and the backend that computes
    its attention on `device` (None: the GPU if there is one). Raises ValueError."""
    import torch

    from zoo.nn import attention

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r} is not possible; use cpu or cuda") from None
    family, path = find(model)
    spec, parameters = family.survey(path)
    token_bytes = spec.kv.token_bytes(torch.bfloat16)
    return {
        "family": spec.family,
        "variant": spec.variant,
        "parameters": parameters,
        "sample_rate_hz": spec.sample_rate_hz,
        "frame_rate_hz": spec.frame_rate_hz,
        "frame_shape": list(spec.frame_shape),
        "voices": list(spec.voices),
        "languages": list(spec.languages),
        "modes": list(spec.modes),
        "reference_s": list(spec.reference_s or ()),
        "max_references": spec.max_references if spec.reference_s else 0,
        "options": {option.name: _facts(option) for option in spec.options},
        "licence": spec.licence,
        "max_audio_s": spec.max_frames / spec.frame_rate_hz,
        "piece_s": spec.piece_s,
        "kv_bytes_per_audio_s": round(token_bytes * spec.frame_rate_hz * spec.steps_per_frame),
        "weight_bytes_bf16": 2 * parameters,
        "attention": attention.backend(where),
    }


def _facts(option: Option) -> dict[str, Any]:
    return {"possible": option.possible, "default": option.default, "help": option.help}
