"""Qwen3-TTS 12 Hz (Qwen team, Apache-2.0): text to 24 kHz speech, 16 codes per 80 ms frame. See README.md in
this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.qwen3_tts.model import Qwen3TTS

NAME = "qwen3_tts"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`. Raises ValueError if config.json cannot be
    read."""
    from zoo.checkpoint.json_files import read_config

    config = read_config(path)
    # A directory that holds only a codec is claimed too, so that `load` can refuse it with a clear message.
    codecs = ("qwen3_tts_tokenizer_12hz", "qwen3_tts_tokenizer_25hz")
    known = ("qwen3_tts", *codecs)
    return config.get("model_type") in known or config.get("architectures") == [
        "Qwen3TTSForConditionalGeneration"
    ]


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> Qwen3TTS:
    """Return the family with its weights: the talker in `dtype`, the codec and the speaker encoder in fp32.
    Raises ValueError that names the file and the problem."""
    import torch

    from zoo.checkpoint import loading
    from zoo.qwen3_tts import weights
    from zoo.qwen3_tts.clone import Cloner
    from zoo.qwen3_tts.model import Qwen3TTS
    from zoo.qwen3_tts.prompt import PromptWriter

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, defaults, codec_configs, spec = describe(directory)
    talker, codec = build(config, codec_configs)
    loading.load(talker, weights.root(config), directory, device, dtype)
    skip = "encoder" if talker.speaker is None else None
    loading.load(
        codec, weights.codec(*codec_configs), directory / "speech_tokenizer", device, torch.float32, skip
    )
    codec.decoder.prepare()
    if talker.speaker is None:
        codec.encoder = None  # only references need it; `loading.load` checked its tensors
        cloner = None
    else:
        cloner = Cloner(talker.speaker.float().eval(), codec, device)
    return (
        Qwen3TTS(config, defaults, spec, talker, codec, PromptWriter(config, directory, cloner))
        .eval()
        .requires_grad_(False)
    )


def build(config, codec_configs):
    """Return talker and codec on the `meta` device, where tensors have names and shapes but no memory."""
    import torch

    from zoo.qwen3_tts.codec import Codec
    from zoo.qwen3_tts.model import Talker

    with torch.device("meta"):
        return Talker(config), Codec(*codec_configs)


def describe(directory: Path):
    """Return config, defaults, codec configs and Spec. Only the JSON files are read."""
    import torch

    from zoo.checkpoint.json_files import read_json
    from zoo.contract import KV, Spec
    from zoo.qwen3_tts.clone import reference_s
    from zoo.qwen3_tts.codec import DecoderConfig
    from zoo.qwen3_tts.config import Config, Defaults
    from zoo.qwen3_tts.encoder import CODEC_FILE, EncoderConfig
    from zoo.qwen3_tts.prompt import PIECE_S, SIZES, hints, options
    from zoo.qwen3_tts.strategy import WINDOW

    config = Config.read(read_json(directory / "config.json"))
    defaults = Defaults.read(read_json(directory / "generation_config.json"))
    codec = read_json(directory / "speech_tokenizer" / "config.json")
    decoder, encoder = DecoderConfig.from_json(codec), EncoderConfig.from_json(codec)
    config.check_codes(decoder.codebooks, decoder.codebook_size, f"{CODEC_FILE}: decoder_config")
    config.check_codes(encoder.used, encoder.codebook_size, f"{CODEC_FILE}: encoder_config")
    longest_s = defaults.max_new_tokens * decoder.frame_samples / decoder.rate_hz
    spec = Spec(
        family=NAME,
        variant=config.variant,
        frame_shape=(config.codebooks,),
        frame_dtype=torch.int64,
        frame_samples=decoder.frame_samples,
        sample_rate_hz=decoder.rate_hz,
        kv=KV(config.talker.layers, config.talker.kv_heads, config.talker.head_dim),
        width=config.talker.hidden,
        max_frames=defaults.max_new_tokens - 1,  # the reference counts the token that ends the prefill
        max_positions=config.max_positions,
        window=WINDOW,
        voices=tuple(sorted(config.voices)),
        languages=("auto", *sorted(name for name in config.languages if "dialect" not in name)),
        modes=config.modes,
        reference_s=reference_s(config.speaker) if config.speaker else None,
        options=options(config, defaults),
        hints=hints(config),
        name=f"Qwen3-TTS {SIZES.get(config.size, config.size)} {config.variant}",
        feeds=defaults.feeds,
        mixes=config.variant != "voice_design",
        # A designed voice would change from pass to pass, and the model cannot clone the first one.
        piece_s=None if config.variant == "voice_design" else min(PIECE_S, max(1.0, longest_s / 3)),
    )
    return config, defaults, (decoder, encoder), spec


def survey(directory: Path):
    """Return the Spec and the number of parameters without reading the weights."""
    config, _, codec_configs, spec = describe(directory)
    modules = build(config, codec_configs)
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout and return its directory. Raises ValueError or
    OSError."""
    import torch

    from zoo.qwen3_tts.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
