"""CSM 1B (Sesame): text and a conversation's context to 24 kHz speech, 32 codes per 80 ms frame. See
README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.contract import Spec
    from zoo.csm.config import Config
    from zoo.csm.model import Csm, Lm
    from zoo.csm.weights import Codec

NAME = "csm"
LICENCE = "Apache-2.0; the text tokenizer is Llama 3.2's. Mimi: CC-BY 4.0"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`. Raises ValueError if config.json cannot be
    read."""
    from zoo.checkpoint.json_files import read_config
    from zoo.csm.config import MODEL

    return read_config(path).get("model_type") == MODEL


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> Csm:
    """Return the family with its weights: the LM in `dtype`, the codec in fp32. Raises ValueError."""
    from zoo.csm.clone import Cloner, Encoder
    from zoo.csm.layouts import fill
    from zoo.csm.model import Csm
    from zoo.csm.prompt import PromptWriter
    from zoo.csm.voices import read

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    lm, codec = build(config)
    files = fill(lm, codec, config, directory, device, dtype)
    for module in (lm, codec):
        module.eval().requires_grad_(False)
    cloner = Cloner(Encoder(config.codec, config.rate_hz, files, device), codec)
    writer = PromptWriter(config, directory, cloner, read(directory))
    return Csm(config, spec, lm, codec.decoder, writer).eval()


def build(config: Config) -> tuple[Lm, Codec]:
    """Return the LM and the codec on the `meta` device: names and shapes, no memory."""
    import torch

    from zoo.csm.model import Lm
    from zoo.csm.weights import Codec

    with torch.device("meta"):
        return Lm(config), Codec(config.codec)


def describe(directory: Path) -> tuple[Config, Spec]:
    """Return Config and Spec. Only config.json is read, and the names of the voices' files. Raises ValueError."""
    import torch

    from zoo.checkpoint.json_files import read_json
    from zoo.contract import KV, Spec
    from zoo.csm.clone import MAX_REFERENCES, REFERENCE_S
    from zoo.csm.config import Config
    from zoo.csm.prompt import HINTS, OPTIONS, PIECE_S
    from zoo.csm.strategy import WINDOW
    from zoo.csm.voices import RANDOM, find

    config = Config.read(read_json(directory / "config.json"))
    stack = config.backbone
    spec = Spec(
        family=NAME,
        variant="1b",
        frame_shape=(config.codebooks,),
        frame_dtype=torch.int64,
        frame_samples=config.codec.frame_samples,
        sample_rate_hz=config.rate_hz,
        kv=KV(stack.layers, stack.kv_heads, stack.head_dim),
        width=stack.hidden,
        max_frames=config.max_positions - 1,
        max_positions=config.max_positions,
        window=WINDOW,
        voices=(RANDOM, *find(directory)),
        languages=("auto", "english"),
        modes=("voice", "clone"),
        reference_s=REFERENCE_S,
        max_references=MAX_REFERENCES,
        needs_transcript=True,
        options=OPTIONS,
        hints=HINTS,
        name="CSM 1B",
        licence=LICENCE,
        listens=True,
        shares_turns=True,
        piece_s=PIECE_S,
        keeps_voice=True,
    )
    return config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters, weights unread."""
    config, spec = describe(directory)
    return spec, sum(p.numel() for module in build(config) for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout. Raises ValueError, OSError."""
    import torch

    from zoo.csm.demo import write

    return write(directory, size, seed, dtype or torch.float32)
