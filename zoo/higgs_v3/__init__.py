"""Higgs Audio V3 TTS (Boson AI): text to 24 kHz speech, 8 codes per 40 ms frame. See README.md in this
folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.higgs_v3.model import HiggsV3

NAME = "higgs_v3"
LICENCE = "Boson Higgs Audio v3 Research and Non-Commercial License (2026-05-21): commercial use needs a separate licence"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`. Raises ValueError if config.json cannot be
    read."""
    from zoo.checkpoint.json_files import read_config
    from zoo.higgs_v3.config import CODEC_ALONE, MODEL, V2

    # These are claimed too, so that `load` can refuse them with a clear message.
    refused = (*V2, CODEC_ALONE)
    return read_config(path).get("model_type") in (MODEL, *refused)


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> HiggsV3:
    """Return the family with its weights: the LM in `dtype`, the codec in fp32. Raises ValueError that names
    the file and the problem."""
    from zoo.checkpoint import loading, tensor_files
    from zoo.higgs_v3 import weights
    from zoo.higgs_v3.clone import Cloner
    from zoo.higgs_v3.model import HiggsV3
    from zoo.higgs_v3.prompt import PromptWriter

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    if any(name.startswith(("audio_embedding.", "audio_head.")) for name in tensor_files.contents(directory)):
        raise ValueError(
            f"{directory} has the tensor names of fine-tuning tools (audio_embedding.*, model.*) and no codec; use a "
            "checkpoint with the published names (body.*, tied.embedding.*)"
        )
    module = build(config)
    loading.load(
        module,
        weights.table(config),
        directory,
        device,
        dtype,
        skip="unread",
        fp32="codec",
        optional=frozenset(weights.HEADS),
    )
    module.codec.prepare()
    module.eval().requires_grad_(False)
    writer = PromptWriter(config, directory, Cloner(config, module.codec, device))
    return HiggsV3(config, spec, module.backbone, module.codec, writer).eval().requires_grad_(False)


def build(config):
    """Return the checkpoint's modules on the `meta` device, where tensors have names and shapes but no
    memory."""
    import torch

    from zoo.higgs_v3.weights import Checkpoint

    with torch.device("meta"):
        return Checkpoint(config)


def describe(directory: Path):
    """Return Config and Spec. Only config.json is read."""
    import torch

    from zoo.checkpoint.json_files import read_json
    from zoo.contract import KV, Spec
    from zoo.higgs_v3.clone import REFERENCE_S
    from zoo.higgs_v3.config import MAX_ROWS, SAMPLE_RATE_HZ, Config
    from zoo.higgs_v3.prompt import HINTS, LEAD, OPTIONS, PIECE_S, VOICE
    from zoo.higgs_v3.strategy import WINDOW

    config = Config.read(read_json(directory / "config.json"))
    spec = Spec(
        family=NAME,
        variant="tts",
        frame_shape=(config.codebooks,),
        frame_dtype=torch.int64,
        frame_samples=config.codec.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(config.stack.layers, config.stack.kv_heads, config.stack.head_dim),
        width=config.stack.hidden,
        max_frames=min(MAX_ROWS, config.max_positions) - config.delay,
        max_positions=config.max_positions,
        window=WINDOW,
        voices=(VOICE,),
        modes=("voice", "clone"),
        reference_s=REFERENCE_S,
        options=OPTIONS,
        hints=HINTS,
        name="Higgs Audio V3",
        licence=LICENCE,
        piece_s=PIECE_S,
        keeps_voice=True,
        lead=LEAD,
    )
    return config, spec


def survey(directory: Path):
    """Return the Spec and the number of parameters without reading the weights. The heads are copies of the
    embeddings and are not counted."""
    config, spec = describe(directory)
    module = build(config)
    return spec, sum(p.numel() for part in (module.backbone, module.codec) for p in part.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout and return its directory. Raises ValueError or
    OSError."""
    import torch

    from zoo.higgs_v3.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
