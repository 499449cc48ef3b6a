"""Zonos v0.1, the transformer (Zyphra): text to 44.1 kHz speech, nine codes per 11.6 ms, with emotion, speed
and other conditions, and a voice from a recording. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.zonos.codec import Codec
    from zoo.zonos.config import CodecConfig, Config
    from zoo.zonos.model import Backbone, Zonos

NAME = "zonos"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`. Raises ValueError if config.json cannot be
    read."""
    from zoo.checkpoint.json_files import read_config

    # The hybrid is claimed too, so that `load` can refuse it with a clear message.
    return {"backbone", "prefix_conditioner"} <= read_config(path).keys()


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> Zonos:
    """Return the family with its weights: the LM in `dtype`, codec and speaker encoder in fp32. Raises
    ValueError."""
    import torch

    from zoo.checkpoint import loading
    from zoo.zonos import speaker, weights
    from zoo.zonos.clone import Cloner
    from zoo.zonos.config import SPEAKER, find_codec
    from zoo.zonos.model import Zonos
    from zoo.zonos.phonemes import Phonemizer
    from zoo.zonos.prompt import PromptWriter

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    phonemize = Phonemizer()
    config, codec_config, spec = describe(directory)
    backbone, codec = build(config, codec_config)
    change = weights.Rearranged(config)
    loading.load(backbone, weights.model(config), directory, device, dtype, change=change)
    codec_folder = find_codec(directory)
    loading.load(codec, weights.codec(codec_config), codec_folder, device, torch.float32)
    backbone.prefix.prepare()
    codec.prepare()
    for module in (backbone, codec):
        module.eval().requires_grad_(False)
    folder = speaker.find(directory, codec_folder)
    encoder = None
    if folder is not None:
        width = config.condition(SPEAKER).num_values
        encoder = speaker.load(speaker.build(folder, width), folder, device)
    writer = PromptWriter(config, phonemize, Cloner(codec, encoder, device))
    return Zonos(config, spec, backbone, codec, writer).eval()


def build(config: Config, codec_config: CodecConfig) -> tuple[Backbone, Codec]:
    """Return the LM and the codec on `meta`: names and shapes, no memory."""
    import torch

    from zoo.zonos.codec import Codec
    from zoo.zonos.model import Backbone

    with torch.device("meta"):
        return Backbone(config), Codec(codec_config)


def describe(directory: Path) -> tuple[Config, CodecConfig, Spec]:
    """Return both configs and the Spec, from the JSON files alone. Raises ValueError."""
    import torch

    from zoo.contract import KV, Spec
    from zoo.zonos import speaker
    from zoo.zonos.clone import REFERENCE_S
    from zoo.zonos.config import BOOKS, SAMPLE_RATE_HZ, find_codec, read_configs
    from zoo.zonos.phonemes import SPOKEN
    from zoo.zonos.prompt import HINTS, MAX_FRAMES, MAX_POSITIONS, PIECE_S, VOICE, options
    from zoo.zonos.strategy import WINDOW

    config, codec_config = read_configs(directory)
    clones = speaker.find(directory, find_codec(directory)) is not None
    missing = f"clones need {speaker.REPOSITORY}; put it into MODEL/{speaker.FOLDER}"
    stack = config.stack
    spec = Spec(
        family=NAME,
        variant="transformer",
        frame_shape=(BOOKS,),
        frame_dtype=torch.int64,
        frame_samples=codec_config.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(stack.layers, stack.kv_heads, stack.head_dim),
        width=stack.hidden,
        max_frames=MAX_FRAMES,
        max_positions=MAX_POSITIONS,
        window=WINDOW,
        lanes=2,
        voices=(VOICE,),
        languages=SPOKEN,
        modes=("voice", "clone") if clones else ("voice",),
        reference_s=REFERENCE_S if clones else None,
        options=options(config),
        hints=HINTS if clones else HINTS | {"references": missing},
        name="Zonos v0.1",
        piece_s=PIECE_S,
        keeps_voice=True,
    )
    return config, codec_config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters of LM and codec, weights unread."""
    config, codec_config, spec = describe(directory)
    modules = build(config, codec_config)
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout, codec and speaker encoder in their folders. Raises
    ValueError, OSError."""
    import torch

    from zoo.zonos.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
