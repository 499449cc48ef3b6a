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
    from zoo.opuslm.listener import Ear, Encoders, XeusFiles
    from zoo.opuslm.model import Backbone, OpusLM

NAME = "opuslm"
LICENCE = "not stated by the model's repositories; the codec is CC BY 4.0"
LICENCE_OF_XEUS = "; XEUS, which reads recordings, is CC BY-NC-SA 4.0"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`: an ESPnet speech LM with delayed streams."""
    from zoo.opuslm.config import is_opuslm

    return is_opuslm(path)


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> OpusLM:
    """Return the family with its weights: the LM in `dtype`, the codec and XEUS in fp32. Raises ValueError."""
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
    is_converted = config.is_converted
    file = weights.open_converted(directory) if is_converted else open_file(find_weights(directory))
    loading.load_file(backbone, weights.lm(config), weights.trimmed(file, config), device, dtype)
    path = CodecFiles.find(directory).weights
    codec_file = open_file(path)
    unused = weights.codec_unused(path, codec_file)
    table = weights.codec(codec_config)
    loading.load_weight_normed(codec, table, codec_file, device, unused, weights.is_normed)
    backbone.prepare()
    encoders, ear = hearing(directory, config, codec_config, codec, device)
    writer = PromptWriter(config, tokenize, known, ear)
    family = OpusLM(config, spec, backbone, codec, encoders, writer)
    return family.eval().requires_grad_(False)


def hearing(
    directory: Path, config: Config, codec_config: CodecConfig, codec: Decoder, device: torch.device
) -> tuple[Encoders | None, Ear | None]:
    """Return what reads recordings, or nothing if XEUS is not there. Raises ValueError."""
    import torch

    from zoo.checkpoint import loading
    from zoo.checkpoint.tensor_files import open_file
    from zoo.opuslm import weights, xeus
    from zoo.opuslm.config import CodecFiles
    from zoo.opuslm.listener import Ear, XeusFiles

    files = XeusFiles.find(directory)
    if files is None:
        return None, None
    encoders = build_encoders(files, codec_config)
    file = open_file(CodecFiles.find(directory).weights)
    table, unused = weights.encoder(codec_config), weights.encoder_unused(file)
    loading.load_weight_normed(encoders.encoder, table, file, device, unused, weights.is_normed)
    file = xeus.of_parts(open_file(files.weights))
    loading.load_file(encoders.xeus, xeus.names(encoders.xeus), file, device, torch.float32)
    encoders.read_centers(files.clusters, config.vocabulary.num_clusters)
    encoders.eval().requires_grad_(False)
    return encoders, Ear(encoders, codec.tables, device)


def build(config: Config, codec_config: CodecConfig) -> tuple[Backbone, Decoder]:
    """Return the LM and the codec on `meta`: names and shapes, no memory."""
    import torch

    from zoo.opuslm.codec import Decoder
    from zoo.opuslm.model import Backbone

    with torch.device("meta"):
        return Backbone(config), Decoder(codec_config)


def build_encoders(files: XeusFiles, codec_config: CodecConfig) -> Encoders:
    """Return the networks that read recordings, on `meta`. Raises ValueError."""
    import torch

    from zoo.checkpoint.yaml_files import read_yaml
    from zoo.opuslm.encoder import Encoder
    from zoo.opuslm.listener import CONFIG, Encoders
    from zoo.opuslm.xeus import Xeus, XeusConfig

    config = XeusConfig.read(read_yaml(files.config), CONFIG)
    with torch.device("meta"):
        return Encoders(Encoder(codec_config), Xeus(config))


def describe(directory: Path) -> tuple[Config, CodecConfig, Spec]:
    """Return both configs and the Spec, from the YAML and JSON files and the names of the voices. Raises
    ValueError."""
    from dataclasses import replace

    import torch

    from zoo.contract import KV, Spec
    from zoo.opuslm import prompt, voices
    from zoo.opuslm.codec import contexts
    from zoo.opuslm.config import SAMPLE_RATE_HZ, read_configs
    from zoo.opuslm.ids import STREAMS
    from zoo.opuslm.listener import CLIP_S, MISSING, XeusFiles
    from zoo.opuslm.strategy import WINDOW

    config, codec_config = read_configs(directory)
    body, (_, context), hears = config.body, contexts(codec_config), XeusFiles.find(directory) is not None
    spec = Spec(
        family=NAME,
        variant="olmo2" if config.is_olmo else "smollm2",
        frame_shape=(STREAMS,),
        frame_dtype=torch.int64,
        frame_samples=codec_config.frame_samples,
        sample_rate_hz=SAMPLE_RATE_HZ,
        kv=KV(body.layers, body.kv_heads, body.head_dim),
        width=body.hidden,
        max_frames=min(prompt.MAX_FRAMES, config.max_positions),
        max_positions=config.max_positions,
        window=replace(WINDOW, lookahead=context, left=context),
        voices=(voices.DEFAULT, *voices.find(directory)),
        languages=("auto", "english"),
        modes=("voice", "clone") if hears else ("voice",),
        reference_s=CLIP_S if hears else None,
        options=prompt.OPTIONS,
        hints=prompt.HINTS | ({} if hears else {"references": MISSING}),
        name="OpusLM",
        licence=LICENCE + (LICENCE_OF_XEUS if hears else ""),
        piece_s=prompt.PIECE_S,
        keeps_voice=True,
        outputs=("speech", "text", "continuation", *(("transcript",) if hears else ())),
    )
    if config.is_dialogue:
        spec = replace(
            spec,
            variant=f"{spec.variant} dialogue",
            options=prompt.DIALOGUE_OPTIONS,
            hints=prompt.DIALOGUE_HINTS | ({} if hears else {"references": MISSING}),
            name="OpusLM-Dialogue",
            piece_s=None,
            keeps_voice=False,
            outputs=("speech", "text"),
            listens=True,
            answers=True,
        )
    return config, codec_config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters of LM, codec's decoder and encoders, weights unread."""
    from torch import nn

    from zoo.opuslm.listener import XeusFiles

    config, codec_config, spec = describe(directory)
    modules: list[nn.Module] = [*build(config, codec_config)]
    if (files := XeusFiles.find(directory)) is not None:
        modules.append(build_encoders(files, codec_config))
    return spec, sum(p.numel() for module in modules for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout, with the codec, the tokenizer and a voice in their
    folders. Raises ValueError, OSError."""
    import torch

    from zoo.opuslm.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
