"""GLM-4-Voice 9B (Zhipu AI): speech or text to text and 22.05 kHz speech, 12.5 codes per second. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.glm4_voice.config import Config
    from zoo.glm4_voice.flow import Flow
    from zoo.glm4_voice.listener import Listener
    from zoo.glm4_voice.lm import Lm
    from zoo.glm4_voice.model import Glm4Voice
    from zoo.nn.s3.held_pitch import Vocoder

NAME = "glm4_voice"
LICENCE = "GLM-4 model licence: free for research; registration for commercial use"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`: a GLM-4 whose tokenizer has audio tokens.

    Raises ValueError for a config.json that cannot be read.
    """
    from zoo.checkpoint.json_files import read_config
    from zoo.glm4_voice.config import MODEL
    from zoo.glm4_voice.vocabulary import TOKENS, audio

    if read_config(path).get("model_type") != MODEL or not (path / TOKENS).is_file():
        return False
    return audio(0) in (path / TOKENS).read_text(encoding="utf-8", errors="replace")


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> Glm4Voice:
    """Return the family with its weights: the LM in `dtype`, all else in fp32. Raises ValueError."""
    import torch

    from zoo.checkpoint import loading
    from zoo.checkpoint.tensor_files import open_file
    from zoo.glm4_voice import weights
    from zoo.glm4_voice.config import DECODER, TOKENIZER, find
    from zoo.glm4_voice.listener import Ear
    from zoo.glm4_voice.lm import reordered
    from zoo.glm4_voice.model import MOST_MEL, Glm4Voice
    from zoo.glm4_voice.prompt import PromptWriter
    from zoo.glm4_voice.vocabulary import Vocabulary

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    vocabulary = Vocabulary(directory, config.lm.vocab, config.flow.codes)
    lm, flow, vocoder, listener = build(config)

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return reordered(config.lm.stack, name, value)

    optional = frozenset([weights.ANGLES])
    table = weights.lm(config.lm)
    loading.load(lm, table, directory, device, dtype, skip="unread", optional=optional, change=change)
    del lm.unread
    lm.stack.prepare()
    decoder, fp32 = find(directory, DECODER), torch.float32
    loading.load(flow, weights.flow(config.flow), decoder / weights.FLOW_FILE, device, fp32)
    flow.prepare(MOST_MEL)
    file, table = open_file(decoder / weights.VOCODER_FILE), weights.vocoder(config.vocoder)
    loading.load_weight_normed(vocoder, table, file, device, is_weight_normed=weights.is_weight_normed)
    vocoder.prepare()
    table = weights.listener(config.listener)
    loading.load(listener, table, find(directory, TOKENIZER), device, fp32, skip="unread")
    del listener.unread
    writer = PromptWriter(vocabulary, Ear(listener.eval(), device), config.lm.max_positions)
    family = Glm4Voice(config, spec, lm, flow, vocoder, listener, writer)
    return family.eval().requires_grad_(False)


def build(config: Config) -> tuple[Lm, Flow, Vocoder, Listener]:
    """Return LM, flow, vocoder and speech tokenizer on the `meta` device: names and shapes, no memory."""
    import torch

    from zoo.glm4_voice.flow import Flow
    from zoo.glm4_voice.listener import Listener
    from zoo.glm4_voice.lm import Lm
    from zoo.nn.s3.held_pitch import Vocoder

    with torch.device("meta"):
        return Lm(config.lm), Flow(config.flow), Vocoder(config.vocoder), Listener(config.listener)


def describe(directory: Path) -> tuple[Config, Spec]:
    """Return Config and Spec. Only the text files are read. Raises ValueError."""
    from dataclasses import replace

    import torch

    from zoo.contract import KV, Spec
    from zoo.glm4_voice.config import FRAME_SAMPLES, MEL_SAMPLES, RATE_HZ, TITLE, Config
    from zoo.glm4_voice.prompt import HINTS, OPTIONS
    from zoo.glm4_voice.strategy import MAX_FRAMES, WINDOW
    from zoo.nn.s3.hift import Plan

    config = Config.read(directory)
    stack, hold_samples = config.lm.stack, Plan.of(config.vocoder).lag + MEL_SAMPLES
    spec = Spec(
        family=NAME,
        variant="9b",
        frame_shape=(1,),
        frame_dtype=torch.int64,
        frame_samples=FRAME_SAMPLES,
        sample_rate_hz=RATE_HZ,
        kv=KV(stack.layers, stack.kv_heads, stack.head_dim),
        width=stack.hidden,
        max_frames=min(MAX_FRAMES, config.lm.max_positions),
        max_positions=config.lm.max_positions,
        window=replace(WINDOW, hold_samples=hold_samples),
        options=OPTIONS,
        hints=HINTS,
        name=TITLE,
        steps_per_frame=2,  # 1.5 while it also writes
        listens=True,
        answers=True,
        keeps_answers=True,
        licence=LICENCE,
    )
    return config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters, weights unread."""
    config, spec = describe(directory)
    modules = build(config)
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout, next to its tokenizer and decoder. Raises ValueError,
    OSError."""
    import torch

    from zoo.glm4_voice.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
