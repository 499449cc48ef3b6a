"""Fish Audio S2 Pro and OpenAudio S1-mini (Fish Audio, non-commercial licences): text to 44.1 kHz speech, 10
codes per 46.4 ms frame. See README.md in this folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.fish_s2.codec import Codec
    from zoo.fish_s2.config import CodecConfig, Config
    from zoo.fish_s2.model import DualAR, FishFamily

NAME = "fish_s2"
LICENCE = (
    "Fish Audio Research License (2026-03-07): only research and non-commercial use; state 'Built with Fish "
    "Audio'; outputs may not train other foundation models"
)


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`. Raises ValueError if config.json cannot be
    read."""
    from zoo.checkpoint.json_files import read_config
    from zoo.fish_s2.config import DRAMA, MODEL, S1

    known = (MODEL, S1, DRAMA)  # DRAMA is claimed so that `load` can refuse it with a clear message
    return read_config(path).get("model_type") in known


def load(
    directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
) -> FishFamily:
    """Return the family with its weights: both stacks in `dtype`, the codec in fp32. Raises ValueError that
    names the file and the problem."""
    from zoo.checkpoint import loading
    from zoo.checkpoint.tensor_files import open_file
    from zoo.fish_s2 import weights
    from zoo.fish_s2.clone import Cloner
    from zoo.fish_s2.config import CODEC_FILE
    from zoo.fish_s2.model import FishS2
    from zoo.fish_s2.prompt import PromptWriter
    from zoo.fish_s2.s1 import LineWriter, OpenAudioS1, open_lm

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, codec_config, spec = describe(directory)
    logging.getLogger(__name__).info("%s: %s", spec.name, spec.licence)
    lm, codec = build(config, codec_config)
    if config.is_s1:
        loading.load_file(lm, weights.lm(config), open_lm(directory), device, dtype)
    else:
        loading.load(lm, weights.lm(config), directory, device, dtype)
    file = open_file(directory / CODEC_FILE)
    unused = frozenset(name for name in file.headers if name.endswith(weights.UNUSED))
    loading.load_weight_normed(
        codec, weights.codec(codec_config), file, device, unused, weights.is_weight_normed
    )
    lm.prepare()
    codec.prepare()
    for module in (lm, codec):
        module.eval().requires_grad_(False)
    cloner = Cloner(codec, device)
    if config.is_s1:
        return OpenAudioS1(config, spec, lm, codec, LineWriter(config, directory, cloner)).eval()
    return FishS2(config, spec, lm, codec, PromptWriter(config, directory, cloner)).eval()


def build(config: Config, codec_config: CodecConfig) -> tuple[DualAR, Codec]:
    """Return both stacks and the codec on the `meta` device, where tensors have names and shapes but no
    memory."""
    import torch

    from zoo.fish_s2.codec import Codec
    from zoo.fish_s2.model import DualAR

    with torch.device("meta"):
        return DualAR(config), Codec(codec_config)


def read_configs(directory: Path) -> Config:
    """Read the LM's config from the JSON files. Raises ValueError."""
    from zoo.checkpoint.json_files import read_json
    from zoo.fish_s2 import s1
    from zoo.fish_s2.config import S1, Config

    values = read_json(directory / "config.json")
    if values.get("model_type") == S1:
        return s1.read_config(values, read_json(directory / s1.SPECIAL_FILE))
    return Config.read(values)


def describe(directory: Path) -> tuple[Config, CodecConfig, Spec]:
    """Return Config, the codec's sizes and Spec, from the JSON files and the tensor shapes of codec.pth."""
    from zoo.checkpoint.tensor_files import open_file
    from zoo.fish_s2.config import CODEC_FILE, CodecConfig

    config = read_configs(directory)
    if (directory / "codec.safetensors").exists() and not (directory / CODEC_FILE).exists():
        needed = f"use the published files with {CODEC_FILE}"
        raise ValueError(f"{directory} is a conversion with codec.safetensors; {needed}")
    headers = open_file(directory / CODEC_FILE).headers
    codec_config = CodecConfig.read({name: header.shape for name, header in headers.items()})
    config.check_codec(codec_config)
    return config, codec_config, specify(config, codec_config)


def specify(config: Config, codec_config: CodecConfig) -> Spec:
    import torch

    from zoo.contract import KV, Spec
    from zoo.fish_s2.clone import MAX_REFERENCES, REFERENCE_S
    from zoo.fish_s2.config import MAX_FRAMES, SAMPLE_RATE_HZ
    from zoo.fish_s2.prompt import DEFAULT_VOICE, HINTS, OPTIONS, PIECE_S, SPEAKER
    from zoo.fish_s2.s1 import LICENCE as S1_LICENCE
    from zoo.fish_s2.s1 import OPTIONS as S1_OPTIONS
    from zoo.fish_s2.s1 import S1_HINTS
    from zoo.fish_s2.strategy import WINDOW

    return Spec(
        family=NAME,
        variant="s1-mini" if config.is_s1 else "pro",
        frame_shape=(config.codebooks,),
        frame_dtype=torch.int64,
        frame_samples=codec_config.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(config.slow.layers, config.slow.kv_heads, config.slow.head_dim),
        width=config.slow.hidden,
        max_frames=min(MAX_FRAMES, config.max_positions - 1),
        max_positions=config.max_positions,
        window=WINDOW,
        voices=(DEFAULT_VOICE,),
        modes=("voice", "clone"),
        reference_s=REFERENCE_S,
        max_references=MAX_REFERENCES,
        options=S1_OPTIONS if config.is_s1 else OPTIONS,
        hints=S1_HINTS if config.is_s1 else HINTS,
        name="OpenAudio S1-mini" if config.is_s1 else "Fish Audio S2 Pro",
        licence=S1_LICENCE if config.is_s1 else LICENCE,
        piece_s=PIECE_S,
        keeps_voice=True,
        unsplit=SPEAKER.pattern,  # a text with several speakers is spoken turn by turn
    )


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters without reading the weights."""
    config, codec_config, spec = describe(directory)
    return spec, sum(p.numel() for module in build(config, codec_config) for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout and return its directory. Raises ValueError or
    OSError."""
    import torch

    from zoo.fish_s2.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
