"""Bagpiper (ESPnet): a request in natural language to a plan, a caption and 16 kHz audio; and audio to text. See
README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.bagpiper.codec import Decoder
    from zoo.bagpiper.config import Config
    from zoo.bagpiper.listener import Ear
    from zoo.bagpiper.model import Backbone, Bagpiper
    from zoo.contract import Spec

NAME = "bagpiper"
LICENCE = "not stated by the model's repositories"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`: a speech LM of ESPnet with text and audio, as
    ESPnet or its converter writes it. Raises ValueError for a config.json that cannot be read."""
    from zoo.bagpiper.config import is_bagpiper

    return is_bagpiper(path)


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> Bagpiper:
    """Return the family with its weights: the LM in `dtype`, the codec and the audio encoder in fp32. Raises
    ValueError."""
    import torch

    from zoo.bagpiper import weights
    from zoo.bagpiper.config import find_tokenizer, find_weights
    from zoo.bagpiper.listener import Listener
    from zoo.bagpiper.model import Bagpiper
    from zoo.bagpiper.prompt import PromptWriter
    from zoo.bagpiper.vocabulary import TextTokenizer
    from zoo.checkpoint import loading

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    tokenize = TextTokenizer(find_tokenizer(directory), config)
    backbone, codec, ear = build(config)
    path = find_weights(directory)
    if path is None:
        raise ValueError(f"{directory} has no weights: model.pt, or safetensors, are needed")
    files = weights.Files(path, config)
    loading.load_file(backbone, weights.lm(config), files.lm(), device, dtype)
    loading.load_file(codec, weights.codec(config), files.codec(), device, torch.float32)
    backbone.prepare()
    codec.prepare()
    listener = None
    if ear is not None and config.tower is not None:
        loading.load_file(ear, weights.ear(config.tower), files.ear(), device, torch.float32)
        listener = Listener(ear, device)
    writer = PromptWriter(config, tokenize, listener)
    return Bagpiper(config, spec, backbone, codec, listener, writer).eval().requires_grad_(False)


def build(config: Config) -> tuple[Backbone, Decoder, Ear | None]:
    """Return LM, codec and audio encoder on `meta`: names and shapes, no memory."""
    import torch

    from zoo.bagpiper import weights
    from zoo.bagpiper.codec import Decoder
    from zoo.bagpiper.listener import Ear
    from zoo.bagpiper.model import Backbone

    tower = config.tower
    with torch.device("meta"):
        ear = None if tower is None else Ear(tower, weights.tower_shapes(tower), config.body.hidden)
        return Backbone(config), Decoder(config.codec), ear


def describe(directory: Path) -> tuple[Config, Spec]:
    """Return Config and Spec, from the text files and the headers of the weights. Raises ValueError."""
    from dataclasses import replace

    import torch

    from zoo.bagpiper.codec import Decoder
    from zoo.bagpiper.config import DELAY, SAMPLE_RATE_HZ, STREAMS, TITLE, Config
    from zoo.bagpiper.prompt import HINTS, options
    from zoo.bagpiper.strategy import WINDOW
    from zoo.contract import KV, Spec

    config = Config.of(directory)
    body = config.body
    with torch.device("meta"):
        context = Decoder(config.codec).context
    spec = Spec(
        family=NAME,
        variant="qwen3",
        frame_shape=(STREAMS,),
        frame_dtype=torch.int64,
        frame_samples=config.codec.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(body.layers, body.kv_heads, body.head_dim),
        width=body.hidden,
        max_frames=min(config.sampling.audio.max_steps - DELAY, config.max_positions),
        max_positions=config.max_positions,
        window=replace(WINDOW, lookahead=context, left=context),
        lanes=2,
        opens_late=True,
        options=options(config.sampling, config.max_positions),
        hints=HINTS,
        name=TITLE,
        licence=LICENCE,
        listens=True,
        answers=True,
        performs=True,
        outputs=("speech", "text"),
    )
    return config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters that are loaded, weights unread."""
    config, spec = describe(directory)
    modules = [module for module in build(config) if module is not None]
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout, with the body's config and the tokenizer. Raises
    ValueError, OSError."""
    import torch

    from zoo.bagpiper.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
