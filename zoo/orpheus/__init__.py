"""Orpheus TTS 3B (Canopy Labs): text to 24 kHz speech, seven tokens of a Llama 3.2 for each 85.3 ms. See
README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.orpheus.config import Config, SnacConfig
    from zoo.orpheus.model import Llama, Orpheus
    from zoo.orpheus.snac import Snac

NAME = "orpheus"
LICENCE = "Apache-2.0 by its model card; derived from Llama 3.2 (Llama 3.2 Community License). SNAC: MIT"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`: a Llama with Orpheus' vocabulary, by its
    published size or, if it has other words, by its tokens.

    Raises ValueError for a config.json that cannot be read.
    """
    from zoo.checkpoint.json_files import read_config
    from zoo.orpheus.config import MODEL
    from zoo.orpheus.tokens import VOCABULARY

    config, tokenizer = read_config(path), path / "tokenizer.json"
    if config.get("model_type") != MODEL:
        return False
    if config.get("vocab_size") == VOCABULARY:
        return True
    return tokenizer.is_file() and b'"<custom_token_28683>"' in tokenizer.read_bytes()


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> Orpheus:
    """Return the family with its weights: the LM in `dtype`, the codec in fp32. Raises ValueError."""
    from zoo.checkpoint import loading
    from zoo.checkpoint.tensor_files import contents, open_file
    from zoo.orpheus import weights
    from zoo.orpheus.clone import Cloner
    from zoo.orpheus.config import find_codec
    from zoo.orpheus.model import Orpheus
    from zoo.orpheus.prompt import PromptWriter

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, codec_config, spec = describe(directory)
    has_head = weights.HEAD in contents(directory)
    if not has_head and not config.is_tied:
        untied = "config.json does not set tie_word_embeddings to true"
        raise ValueError(f"{directory} has no {weights.HEAD}, and {untied}: the model has no head")
    lm, codec = build(config, codec_config, has_head)
    loading.load(lm, weights.lm(config, has_head), directory, device, dtype)
    [path] = {header.path for header in contents(find_codec(directory)).values()}
    loading.load_weight_normed(codec, weights.codec(codec_config), open_file(path), device)
    lm.prepare()
    codec.prepare()
    for module in (lm, codec):
        module.eval().requires_grad_(False)
    writer = PromptWriter(config, directory, Cloner(codec_config, codec, device))
    return Orpheus(config, spec, lm, codec, writer).eval()


def build(config: Config, codec_config: SnacConfig, has_head: bool) -> tuple[Llama, Snac]:
    """Return the LM and the codec on `meta`: names and shapes, no memory."""
    import torch

    from zoo.orpheus.model import Llama
    from zoo.orpheus.snac import Snac

    with torch.device("meta"):
        return Llama(config, has_head), Snac(codec_config)


def describe(directory: Path) -> tuple[Config, SnacConfig, Spec]:
    """Return both configs and the Spec, from the JSON files alone. Raises ValueError."""
    import torch

    from zoo.contract import KV, Spec
    from zoo.orpheus.clone import MAX_REFERENCES, REFERENCE_S
    from zoo.orpheus.config import NO_VOICE, SAMPLE_RATE_HZ, read_configs
    from zoo.orpheus.prompt import HINTS, OPTIONS, PIECE_S, is_pretrained, voices_of
    from zoo.orpheus.strategy import WINDOW
    from zoo.orpheus.tokens import PLACES

    config, codec_config = read_configs(directory)
    clones = is_pretrained(config, directory)
    stack = config.stack
    spec = Spec(
        family=NAME,
        variant="pretrained" if clones else "finetuned",
        frame_shape=(PLACES,),
        frame_dtype=torch.int64,
        frame_samples=codec_config.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(stack.layers, stack.kv_heads, stack.head_dim),
        width=stack.hidden,
        max_frames=config.max_positions // PLACES,
        max_positions=config.max_positions,
        steps_per_frame=PLACES,
        window=WINDOW,
        voices=(*voices_of(config, directory), NO_VOICE),
        modes=("voice", "clone") if clones else ("voice",),
        reference_s=REFERENCE_S if clones else None,
        max_references=MAX_REFERENCES if clones else 1,
        needs_transcript=True,
        options=OPTIONS,
        hints=HINTS,
        name="Orpheus 3B",
        licence=LICENCE,
        piece_s=PIECE_S,
        keeps_voice=clones,
    )
    return config, codec_config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters, weights unread. A tied head is counted once."""
    config, codec_config, spec = describe(directory)
    modules = build(config, codec_config, has_head=not config.is_tied)
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout, the codec in its folder. Raises ValueError,
    OSError."""
    import torch

    from zoo.orpheus.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
