"""The files of a Bagpiper checkpoint as frozen dataclasses: ESPnet's own YAML files next to a pickle, or the
config.json that a converter of ESPnet writes.

A key that is missing or out of range is an error that names it; unknown keys are ignored. ESPnet's files name
the repositories of the body, of the codec and of the audio encoder, and do not copy their sizes. Those of the
body come from backbone/config.json, or from the table of published ones. Those of codec and audio encoder
follow from the shapes of their tensors, or without weights from the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpoint.config import HEADS, LAYERS, POSITIONS, VOCABULARY, WIDTH, ConfigBlock
from zoo.checkpoint.json_files import read_config, read_json
from zoo.checkpoint.tensor_files import MAIN_FILES, contents
from zoo.checkpoint.yaml_files import read_yaml
from zoo.nn.llama import LlamaConfig

JSON, INFERENCE, BACKBONE = "config.json", "inference.yaml", "backbone"
MODELS = ("bagpiper", "speechlm")  # of a converted config.json; the second one is older
TITLE = "Bagpiper"
SAMPLE_RATE_HZ = 16_000
STREAMS = 8
DELAY = STREAMS - 1  # steps from a frame's first code to its last
# ids of special tokens, which are the same in all checkpoints
PAD, BOS, EOS, EOT, SYSTEM, USER, ASSISTANT, TEXT, AUDIO = range(9)
IDS = {
    "pad": PAD,
    "bos": BOS,
    "eos": EOS,
    "eot": EOT,
    "system": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "text": TEXT,
    "audio": AUDIO,
}
FIRST_WORD = 256
CODEC = "multimodal_io_dict.discrete_audio.codec_model"
TOWER = "multimodal_io_dict.continuous_audio.model.audio_tower"
# The published body, which a checkpoint names and does not copy
BODY: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
}
BODIES = ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B")
CODEC_TAG = "hf-audio/xcodec-hubert-general"
TOWER_TAG = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
HEAD_WIDTH = 64  # of the audio encoder, whose shapes do not say how many heads it has


@dataclass(frozen=True)
class CodecConfig:
    """The sizes of X-Codec's decoder."""

    num_codes: int
    width: int  # of a code's vector
    latent: int
    channels: int  # of the first block; each block halves them
    rates: tuple[int, ...]

    @property
    def frame_samples(self) -> int:
        found = 1
        for rate in self.rates:
            found *= rate
        return found

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> CodecConfig:
        """Return the sizes that follow from the shapes of the codec's tensors. Raises ValueError."""
        num_codes, width = _shape(shapes, f"{CODEC}.quantizer.quantizers.0.codebook.embed", 2)
        latent, _ = _shape(shapes, f"{CODEC}.fc2.weight", 2)
        channels, _, _ = _shape(shapes, f"{CODEC}.acoustic_decoder.conv1.weight", 3)
        kernels: list[int] = []
        while f"{CODEC}.acoustic_decoder.block.{len(kernels)}.conv_t1.weight" in shapes:
            name = f"{CODEC}.acoustic_decoder.block.{len(kernels)}.conv_t1.weight"
            kernels.append(_shape(shapes, name, 3)[2])
        if not 1 <= len(kernels) <= 8 or any(kernel < 4 or kernel % 2 for kernel in kernels):
            raise ValueError(f"the upsampling kernels of the codec are {kernels}; even ones are possible")
        return cls(num_codes, width, latent, channels, tuple(kernel // 2 for kernel in kernels))


PUBLISHED_CODEC = CodecConfig(num_codes=1024, width=1024, latent=256, channels=1024, rates=(8, 5, 4, 2))


@dataclass(frozen=True)
class TowerConfig:
    """The sizes of the audio encoder, which is Qwen3-Omni's."""

    mels: int
    width: int
    inner: int
    layers: int
    heads: int
    channels: int  # of the convolutions
    out: int
    chunk: int = 50  # half the mel frames that are convolved together
    seen: int = 800  # mel frames that see each other

    @property
    def bands(self) -> int:
        """Bands of mel behind the three convolutions, each of which halves them."""
        return -(-self.mels // 8)

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> TowerConfig:
        """Return the sizes that follow from the shapes of the encoder's tensors. Raises ValueError."""
        channels, *_ = _shape(shapes, f"{TOWER}.conv2d1.weight", 4)
        width, columns = _shape(shapes, f"{TOWER}.conv_out.weight", 2)
        out, _ = _shape(shapes, f"{TOWER}.proj2.weight", 2)
        inner, _ = _shape(shapes, f"{TOWER}.layers.0.fc1.weight", 2)
        layers = len(
            [name for name in shapes if re.fullmatch(rf"{re.escape(TOWER)}\.layers\.\d+\.fc1\.weight", name)]
        )
        if columns % channels or (width % HEAD_WIDTH and width > HEAD_WIDTH):
            raise ValueError(f"the audio encoder is {width} wide; heads of {HEAD_WIDTH} are possible")
        heads = max(1, width // HEAD_WIDTH)
        return cls(8 * (columns // channels), width, inner, layers, heads, channels, out)

    @classmethod
    def read(cls, block: ConfigBlock) -> TowerConfig:
        """Read `audio_config` of a converted config.json. Its `n_window` and `n_window_infer` are the converter's
        own, and not those of the native model, so they are not read. Raises ValueError."""
        block.expect(activation_function="gelu", scale_embedding=False)
        heads = block.integer("encoder_attention_heads", *HEADS)
        return cls(
            mels=block.integer("num_mel_bins", 8, 1024, step=8),
            width=block.integer("d_model", *WIDTH, step=2 * heads),
            inner=block.integer("encoder_ffn_dim", *WIDTH),
            layers=block.integer("encoder_layers", *LAYERS),
            heads=heads,
            channels=block.integer("downsample_hidden_size", 1, 1 << 12),
            out=block.integer("output_dim", *WIDTH),
        )


PUBLISHED_TOWER = TowerConfig(mels=128, width=1280, inner=5120, layers=32, heads=20, channels=480, out=2048)


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, axes: int) -> tuple[int, ...]:
    found = shapes.get(name)
    if found is None or len(found) != axes or not all(found):
        what = "is missing" if found is None else f"has shape {list(found)}"
        raise ValueError(f"{name} {what}; a tensor of {axes} axes is needed")
    return found


@dataclass(frozen=True)
class Phase:
    """How one phase of an answer is sampled, and its limits in steps."""

    temperature: float
    top_k: int
    min_steps: int  # before which no end is drawn
    max_steps: int


@dataclass(frozen=True)
class Sampling:
    text: Phase
    audio: Phase
    guidance: float

    @classmethod
    def read(cls, text: ConfigBlock, audio: ConfigBlock) -> Sampling:
        """Read the two blocks of inference.yaml. Raises ValueError."""
        text = text.with_defaults({"temperature": 0.6, "topk": 20, "min_step": 1, "max_step": 8192, "cfg": 1})
        audio = audio.with_defaults(
            {"temperature": 0.8, "topk": 20, "min_step": 50, "max_step": 2048, "cfg": 3}
        )
        if text.number("cfg", 0, 100) > 1:
            raise text.refuse("cfg", "guidance of text is not possible; 1 is")
        return cls(_phase(text), _phase(audio), max(1.0, float(audio.number("cfg", 0, 100))))


def _phase(block: ConfigBlock) -> Phase:
    most = block.integer("max_step", DELAY + 1, 1 << 16)
    return Phase(
        float(block.number("temperature", 0, 2)),
        block.integer("topk", 1, 1 << 20),
        block.integer("min_step", 0, most - 1),
        most,
    )


@dataclass(frozen=True)
class Config:
    body: LlamaConfig
    num_words: int  # rows of the text vocabulary
    max_positions: int
    codec: CodecConfig
    tower: TowerConfig | None  # None: the checkpoint has no audio encoder
    sampling: Sampling
    is_converted: bool

    @property
    def first_pad(self) -> int:
        """The id of the pad of stream 0, behind which are its codes and then those of the next stream."""
        return FIRST_WORD + self.num_words

    @property
    def num_ids(self) -> int:
        return self.first_pad + STREAMS * (self.codec.num_codes + 1)

    @classmethod
    def of(cls, directory: Path) -> Config:
        """Raises ValueError."""
        shapes = {name: header.shape for name, header in headers(directory).items()}
        codec = CodecConfig.of(shapes) if shapes else PUBLISHED_CODEC
        if read_config(directory).get("model_type") in MODELS:
            return _converted(directory, codec)
        return _native(directory, codec, shapes)


def _native(directory: Path, codec: CodecConfig, shapes: Mapping[str, tuple[int, ...]]) -> Config:
    path = find_yaml(directory)
    if path is None:
        raise ValueError(
            f"{directory} is no Bagpiper: config.json has no model_type of {' or '.join(MODELS)}, "
            "and no YAML is of a speech LM"
        )
    root = ConfigBlock(read_yaml(path), file=path.name)
    io = root.block("multimodal_io")
    kinds = [kind for kind in io.values if kind != "continuous_audio"]
    if kinds != ["text", "discrete_audio"]:
        raise root.refuse(
            "multimodal_io", "text and then discrete_audio are possible: ids follow their order"
        )
    speech = io.block("discrete_audio").with_defaults(
        {"ssl_choice": None, "codec_max_token_per_frame": STREAMS}
    )
    speech.expect(
        codec_choice="Xcodec", ssl_choice=None, delay_interleave=True, codec_max_token_per_frame=STREAMS
    )
    body, sizes = _body(directory, root.block("model"), path.name)
    tower = None
    if "continuous_audio" in io.values:
        io.block("continuous_audio").expect(encoder_hf_model_tag=TOWER_TAG)
        tower = TowerConfig.of(shapes) if shapes else PUBLISHED_TOWER
    sampling = _sampling(directory)
    positions = body.integer("max_position_embeddings", *POSITIONS)
    return Config(sizes, body.integer("vocab_size", *VOCABULARY), positions, codec, tower, sampling, False)


def _body(directory: Path, model: ConfigBlock, file: str) -> tuple[ConfigBlock, LlamaConfig]:
    """Return the block with the body's sizes, and the sizes."""
    model.with_defaults({"model_choice": "parallel"}).expect(model_choice="parallel")
    path = directory / BACKBONE / JSON
    if path.exists():
        block = ConfigBlock(read_json(path), file=f"{BACKBONE}/{JSON}")
        block.expect(model_type="qwen3")
        return block, _stack(block)
    tag = model.string("model_hf_tag")
    if tag not in BODIES:
        advice = f"put its config.json into {BACKBONE}/, or use one of {', '.join(BODIES)}"
        raise model.refuse("model_hf_tag", f"its sizes are not known: {advice}")
    block = ConfigBlock(BODY, file=tag)
    return block, _stack(block)


def _stack(block: ConfigBlock) -> LlamaConfig:
    block.with_defaults({"use_sliding_window": False}).expect(use_sliding_window=False)
    sizes = LlamaConfig.read(block.with_defaults({"head_dim": 128}))
    if sizes.scaling is not None:
        key = "rope_parameters" if "rope_parameters" in block.values else "rope_scaling"
        raise block.refuse(key, "only the default is known")
    return sizes


def _sampling(directory: Path) -> Sampling:
    """Return the settings of inference.yaml, or ESPnet's own without it."""
    path = directory / INFERENCE
    values = read_yaml(path) if path.exists() else {}
    root = ConfigBlock(values, file=INFERENCE).with_defaults({"text": {}, "audio": {}})
    return Sampling.read(root.block("text"), root.block("audio"))


def _converted(directory: Path, codec: CodecConfig) -> Config:
    root = ConfigBlock(read_json(directory / JSON))
    root.expect(num_stream=STREAMS, text_token_offset=FIRST_WORD)
    root.expect(codec_layer_size=codec.num_codes + 1, **{f"{name}_token_id": id for name, id in IDS.items()})
    text = root.block("text_config")
    sizes = _stack(text)
    first_pad = root.integer("codec_base_offset", FIRST_WORD + 1, VOCABULARY[1])
    config = Config(
        sizes,
        first_pad - FIRST_WORD,
        text.integer("max_position_embeddings", *POSITIONS),
        codec,
        TowerConfig.read(root.block("audio_config")),
        Sampling.read(*(_converted_phase(root, kind) for kind in ("text", "audio"))),
        True,
    )
    for block in (root, text):
        block.expect(vocab_size=config.num_ids, hidden_size=sizes.hidden)
    root.expect(text_token_end=first_pad, adaptor_input_dim=config.tower.out if config.tower else 0)
    return config


def _converted_phase(root: ConfigBlock, kind: str) -> ConfigBlock:
    keys = {f"{kind}_{theirs}": ours for theirs, ours in (("temperature", "temperature"), ("topk", "topk"))}
    return ConfigBlock({ours: root.values[theirs] for theirs, ours in keys.items() if theirs in root.values})


def find_yaml(directory: Path) -> Path | None:
    """Return the YAML that trained a speech LM with text and audio, or None."""
    lines = (rb"^job_type: *['\"]?speechlm['\"]?\s*$", rb"^multimodal_io:")
    for path in sorted(directory.glob("*.yaml")):
        text = path.read_bytes()
        if all(re.search(line, text, re.MULTILINE) for line in lines):
            return path
    return None


def is_bagpiper(directory: Path) -> bool:
    return read_config(directory).get("model_type") in MODELS or find_yaml(directory) is not None


def find_weights(directory: Path) -> Path | None:
    """Return ESPnet's pickle (model.pt, or the only .pt), the directory if it has safetensors, or None."""
    if any((directory / name).exists() for name in MAIN_FILES):
        return directory
    usual = directory / "model.pt"
    files = sorted(directory.glob("*.pt"))
    if usual in files:
        return usual
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{directory} has several checkpoints ({names}); name one of them {usual.name}")
    return files[0] if files else None


def headers(directory: Path) -> dict[str, Any]:
    """Return the headers of the weights, if there are weights. Raises ValueError."""
    path = find_weights(directory)
    return {} if path is None else dict(contents(path))


def find_tokenizer(directory: Path) -> Path:
    """Return the tokenizer's file, which ESPnet's checkpoints lack. Raises ValueError."""
    for folder in ("", "tokenizer", BACKBONE):
        path = directory / folder / "tokenizer.json"
        if path.is_file():
            return path
    advice = f"put tokenizer.json of {BODIES[0]} into {directory}"
    raise ValueError(f"the text tokenizer of {TITLE} is missing: {advice}")
