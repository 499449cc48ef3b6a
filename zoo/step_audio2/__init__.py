"""Step-Audio 2 mini (StepFun, Apache-2.0): speech or text to text and 24 kHz speech, 25 codes per second. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.nn.s3.hift import Vocoder
    from zoo.step_audio2.config import Config
    from zoo.step_audio2.flow import Flow
    from zoo.step_audio2.lm import Published
    from zoo.step_audio2.model import StepAudio2

NAME = "step_audio2"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`. Raises ValueError for a config.json that cannot be
    read."""
    from zoo.checkpoint.json_files import read_config
    from zoo.step_audio2.config import MODEL

    return read_config(path).get("model_type") == MODEL


def load(
    directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
) -> StepAudio2:
    """Return the family with its weights: the LM in `dtype`, all else in fp32. Raises ValueError."""
    import torch

    from zoo.checkpoint import loading
    from zoo.nn.s3 import files
    from zoo.nn.s3.campplus import CamPlus
    from zoo.nn.s3.names import campplus
    from zoo.nn.s3.tokenizer import S3Tokenizer
    from zoo.step_audio2 import voices, weights
    from zoo.step_audio2.config import FOLDER, TOKENIZER_FILE
    from zoo.step_audio2.listener import Ear
    from zoo.step_audio2.model import StepAudio2
    from zoo.step_audio2.prompt import PromptWriter
    from zoo.step_audio2.vocabulary import Vocabulary
    from zoo.voices.recordings import read_clip

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    vocabulary = Vocabulary(directory, config.lm.vocab)
    published, flow, vocoder = build(config)
    table = weights.published(config.lm, config.listener)
    loading.load(published, table, directory, device, dtype, fp32="listener")
    published.lm.stack.prepare()
    folder, fp32 = directory / FOLDER, torch.float32
    loading.load(flow, weights.flow(config.flow), folder / files.FLOW_FILE, device, fp32)
    flow.prepare()
    file, prefix = files.open_vocoder(folder)
    table = weights.vocoder(config.vocoder, prefix)
    loading.load_weight_normed(vocoder, table, file, device, is_weight_normed=weights.is_weight_normed)
    vocoder.prepare()
    file, s3_config = files.open_tokenizer(folder / TOKENIZER_FILE)
    with torch.device("meta"):
        tokenizer, speaker = S3Tokenizer(s3_config), CamPlus()
    loading.load_file(tokenizer, files.s3_tokenizer(s3_config), file, device, fp32)
    loading.load_file(speaker, campplus(), files.open_speaker(folder), device, fp32)
    writer = PromptWriter(vocabulary, Ear(published.listener.eval(), device), config.lm.max_positions)
    cloner = voices.Cloner(tokenizer.eval(), speaker.eval(), device)
    own = {name: read_clip(path) for name, path in voices.find(directory).items()}
    family = StepAudio2(config, spec, published, flow, vocoder, writer, cloner, own)
    return family.eval().requires_grad_(False)


def build(config: Config) -> tuple[Published, Flow, Vocoder]:
    """Return the model's networks, the flow and the vocoder on the `meta` device: names and shapes, no memory."""
    import torch

    from zoo.nn.s3.hift import Vocoder
    from zoo.step_audio2.flow import Flow
    from zoo.step_audio2.lm import Published

    with torch.device("meta"):
        return Published(config.lm, config.listener), Flow(config.flow), Vocoder(config.vocoder)


def describe(directory: Path) -> tuple[Config, Spec]:
    """Return Config and Spec. Of the weights only the shapes in hift.pt are read. Raises ValueError."""
    from dataclasses import replace

    import torch

    from zoo.contract import KV, Spec
    from zoo.nn.s3.hift import Plan
    from zoo.nn.s3.sizes import FRAME_SAMPLES, RATE_HZ
    from zoo.step_audio2 import voices
    from zoo.step_audio2.config import TITLE, Config
    from zoo.step_audio2.prompt import HINTS, OPTIONS
    from zoo.step_audio2.strategy import MAX_FRAMES, WINDOW

    config = Config.read(directory)
    stack, own = config.lm.stack, tuple(voices.find(directory))
    spec = Spec(
        family=NAME,
        variant="mini",
        frame_shape=(1,),
        frame_dtype=torch.int64,
        frame_samples=FRAME_SAMPLES,
        sample_rate_hz=RATE_HZ,
        kv=KV(stack.layers, stack.kv_heads, stack.head_dim),
        width=stack.hidden,
        max_frames=min(MAX_FRAMES, config.lm.max_positions),
        max_positions=config.lm.max_positions,
        window=replace(WINDOW, hold_samples=Plan.of(config.vocoder).lag),
        voices=own,
        modes=("voice", "clone") if own else ("clone",),
        reference_s=voices.REFERENCE_S,
        options=OPTIONS,
        hints=HINTS,
        name=TITLE,
        steps_per_frame=2,  # 1.25 while it also writes
        listens=True,
        answers=True,
        keeps_answers=True,
        takes_tools=True,
        outputs=("speech", "text", "transcript"),
    )
    return config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters, weights unread."""
    config, spec = describe(directory)
    return spec, sum(p.numel() for module in build(config) for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout. Raises ValueError, OSError."""
    import torch

    from zoo.step_audio2.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
