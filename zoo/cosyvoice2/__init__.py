"""CosyVoice 2 (FunAudioLLM, Apache-2.0): text to 24 kHz speech, with one code per 40 ms, flow matching and a
HiFT vocoder. See README.md in this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.cosyvoice2.model import CosyVoice2

NAME = "cosyvoice2"
OTHERS = {"cosyvoice.yaml": "CosyVoice 1", "cosyvoice3.yaml": "Fun-CosyVoice 3"}


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`.

    The yaml file decides, because config.json is empty. CosyVoice 1 and Fun-CosyVoice 3 are claimed too, so
    that `describe` can refuse them by name.
    """
    return any((path / name).exists() for name in ("cosyvoice2.yaml", *OTHERS))


def load(
    directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
) -> CosyVoice2:
    """Load the family: language model and flow in `dtype`, the rest in fp32.

    Raises ValueError that names the file and what is wrong with it.
    """
    import torch

    from zoo.checkpoint import loading
    from zoo.cosyvoice2 import weights
    from zoo.cosyvoice2.clone import Cloner
    from zoo.cosyvoice2.config import BLANK
    from zoo.cosyvoice2.model import CosyVoice2
    from zoo.cosyvoice2.prompt import PromptWriter
    from zoo.cosyvoice2.voices import read_voices
    from zoo.nn.s3.campplus import CamPlus
    from zoo.nn.s3.tokenizer import S3Tokenizer

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    writer = PromptWriter(config.lm, directory / BLANK)
    lm, flow, vocoder = build(config)
    optional = frozenset([weights.TEXT_HEAD])
    loading.load(
        lm,
        weights.lm(config.lm),
        directory / weights.LM_FILE,
        device,
        dtype,
        skip="text_head",
        optional=optional,
    )
    lm.text_head = None
    loading.load(flow, weights.flow(config.flow), directory / weights.FLOW_FILE, device, dtype)
    file, prefix = weights.open_vocoder(directory)
    table = weights.vocoder(config.vocoder, prefix)
    is_weight_normed = weights.is_weight_normed
    loading.load_weight_normed(vocoder, table, file, device, is_weight_normed=is_weight_normed)
    flow.prepare()
    vocoder.prepare()

    file, s3_config = weights.open_tokenizer(directory)
    with torch.device("meta"):
        tokenizer, speaker = S3Tokenizer(s3_config), CamPlus()
    loading.load_file(tokenizer, weights.s3_tokenizer(s3_config), file, device, torch.float32)
    loading.load_file(speaker, weights.campplus(), weights.open_speaker(directory), device, torch.float32)
    voices = read_voices(directory, config, device)
    cloner = Cloner(tokenizer.eval(), speaker.eval(), device)
    return CosyVoice2(config, spec, lm, flow, vocoder, writer, voices, cloner).eval().requires_grad_(False)


def build(config):
    """Return language model, flow and vocoder on the `meta` device: names and shapes, no memory."""
    import torch

    from zoo.cosyvoice2.flow import Flow
    from zoo.cosyvoice2.model import SpeechLM
    from zoo.nn.s3.hift import Vocoder

    with torch.device("meta"):
        return SpeechLM(config.lm), Flow(config.flow), Vocoder(config.vocoder)


def describe(directory: Path):
    """Return Config and Spec, read from the text files and the list of voices. Raises ValueError."""
    import torch

    from zoo.contract import KV, Spec
    from zoo.cosyvoice2.clone import REFERENCE_S
    from zoo.cosyvoice2.config import YAML, Config
    from zoo.cosyvoice2.flow import past_of
    from zoo.cosyvoice2.prompt import HINTS, PIECE_S, TAGS, options
    from zoo.cosyvoice2.strategy import MAX_FRAMES, WINDOW
    from zoo.cosyvoice2.voices import read_voices
    from zoo.nn.s3.hift import Plan
    from zoo.nn.s3.sizes import FRAME_SAMPLES, MEL_SAMPLES, MELS, RATE_HZ, TOKEN_FRAMES

    if not (directory / YAML).exists():
        other = next(name for marker, name in OTHERS.items() if (directory / marker).exists())
        raise ValueError(f"{directory} is {other}, which is not supported; supported: CosyVoice 2 ({YAML})")
    config = Config.read(directory)
    voices = tuple(sorted(read_voices(directory, config, torch.device("cpu"))))
    spec = Spec(
        family=NAME,
        variant="0.5b",
        frame_shape=(1,),
        frame_dtype=torch.int64,
        frame_samples=FRAME_SAMPLES,
        sample_rate_hz=RATE_HZ,
        kv=KV(config.lm.layers, config.lm.kv_heads, config.lm.head_dim),
        width=config.lm.hidden,
        max_frames=min(MAX_FRAMES, config.lm.max_positions),
        max_positions=config.lm.max_positions,
        window=replace(WINDOW, hold_samples=Plan.of(config.vocoder).lag),
        past=past_of(config.flow),
        # per mel frame: the flow's starting noise, then the noise of the vocoder's source
        noise_shape=(TOKEN_FRAMES, MELS + MEL_SAMPLES * config.vocoder.harmonics),
        voices=voices,
        modes=("voice", "instruct", "clone") if voices else ("instruct", "clone"),
        reference_s=REFERENCE_S,
        options=options(config),
        hints={key: hint for key, hint in HINTS.items() if key != "voice" or not voices},
        name="CosyVoice 2",
        feeds=True,
        mixes=True,
        tags=TAGS,
        piece_s=PIECE_S,
    )
    return config, spec


def survey(directory: Path):
    """Return the Spec and the number of parameters without reading any weights."""
    config, spec = describe(directory)
    (*modules,) = build(config)
    modules[0].text_head = None
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout. Raises ValueError and OSError."""
    import torch

    from zoo.cosyvoice2.demo import write

    return write(directory, size, seed, dtype or torch.float32)
