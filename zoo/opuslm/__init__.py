"""OpusLM (ESPnet): text to 16 kHz speech, nine ids per 20 ms, in a random voice or behind a voice prompt. See
README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.opuslm.codec import Decoder
    from zoo.opuslm.config import CodecConfig, Config
    from zoo.opuslm.model import Backbone, OpusLM

NAME = "opuslm"
LICENCE = "not stated by the model's repositories; the codec is CC BY 4.0"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`: an ESPnet speech LM with delayed streams."""
    from zoo.opuslm.config import is_opuslm

    return is_opuslm(path)


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> OpusLM:
    """Return the family with its weights: the LM in `dtype`, the codec in fp32. Raises ValueError."""
    from zoo.checkpoint import loading
    from zoo.checkpoint.tensor_files import open_file
    from zoo.opuslm import voices, weights
    from zoo.opuslm.config import CodecFiles, find_tokenizer, find_weights
    from zoo.opuslm.model import OpusLM
    from zoo.opuslm.prompt import PromptWriter
    from zoo.opuslm.vocabulary import TextTokenizer

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, codec_config, spec = describe(directory)
    tokenize = TextTokenizer(find_tokenizer(directory), config.vocabulary)
    known = {name: voices.read(path, config.vocabulary) for name, path in voices.find(directory).items()}
    backbone, codec = build(config, codec_config)
    file = weights.trimmed(open_file(find_weights(directory)), config)
    loading.load_file(backbone, weights.lm(config), file, device, dtype)
    path = CodecFiles.find(directory).weights
    codec_file = open_file(path)
    unused = weights.codec_unused(path, codec_file)
    table = weights.codec(codec_config)
    loading.load_weight_normed(codec, table, codec_file, device, unused, weights.is_normed)
    backbone.prepare()
    for module in (backbone, codec):
        module.eval().requires_grad_(False)
    return OpusLM(config, spec, backbone, codec, PromptWriter(config, tokenize, known)).eval()


def build(config: Config, codec_config: CodecConfig) -> tuple[Backbone, Decoder]:
    """Return the LM and the codec on `meta`: names and shapes, no memory."""
    import torch

    from zoo.opuslm.codec import Decoder
    from zoo.opuslm.model import Backbone

    with torch.device("meta"):
        return Backbone(config), Decoder(codec_config)


def describe(directory: Path) -> tuple[Config, CodecConfig, Spec]:
    """Return both configs and the Spec, from the YAML and JSON files and the names of the voices. Raises
    ValueError."""
    from dataclasses import replace

    import torch

    from zoo.contract import KV, Spec
    from zoo.opuslm import voices
    from zoo.opuslm.codec import contexts
    from zoo.opuslm.config import SAMPLE_RATE_HZ, STREAMS, read_configs
    from zoo.opuslm.prompt import HINTS, MAX_FRAMES, OPTIONS, PIECE_S
    from zoo.opuslm.strategy import WINDOW

    config, codec_config = read_configs(directory)
    body, (_, context) = config.body, contexts(codec_config)
    spec = Spec(
        family=NAME,
        variant="olmo2" if config.is_olmo else "smollm2",
        frame_shape=(STREAMS,),
        frame_dtype=torch.int64,
        frame_samples=codec_config.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(body.layers, body.kv_heads, body.head_dim),
        width=body.hidden,
        max_frames=min(MAX_FRAMES, config.max_positions),
        max_positions=config.max_positions,
        window=replace(WINDOW, lookahead=context, left=context),
        voices=(voices.DEFAULT, *voices.find(directory)),
        modes=("voice",),
        options=OPTIONS,
        hints=HINTS,
        name="OpusLM",
        licence=LICENCE,
        piece_s=PIECE_S,
        keeps_voice=True,
    )
    return config, codec_config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters of LM and codec's decoder, weights unread."""
    config, codec_config, spec = describe(directory)
    modules = build(config, codec_config)
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout, with the codec, the tokenizer and a voice in their
    folders. Raises ValueError, OSError."""
    import torch

    from zoo.opuslm.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
