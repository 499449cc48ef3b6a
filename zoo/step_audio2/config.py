"""config.json, flow.yaml and the shapes of hift.pt as frozen dataclasses. A missing or out-of-range value raises an
error that names file and key; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.checkpoint.config import (
    EPS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    ROPE_THETA,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)
from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.yaml_files import read_yaml
from zoo.nn.llama import LlamaConfig
from zoo.nn.s3.files import VOCODER_FILE, open_vocoder
from zoo.nn.s3.flow_config import heads_and_width
from zoo.nn.s3.sizes import (
    LOOKAHEAD,
    MELS,
    NUM_CODES,
    NUM_UP_LAYERS,
    TOKEN_FRAMES,
    EncoderSizes,
    VocoderSizes,
    vocoder_sizes,
)

MODEL, TITLE = "step_audio_2", "Step-Audio 2"
FOLDER, YAML = "token2wav", "flow.yaml"
TOKENIZER_FILE = "speech_tokenizer_v2_25hz.onnx"
SPEECH_HZ = 16_000
PIECE_SAMPLES = 25 * SPEECH_HZ  # a longer clip is heard in pieces
ADAPTOR_INNER = 2048
MAX_DEPTH = 64  # blocks of the estimator


@dataclass(frozen=True)
class LMConfig:
    stack: LlamaConfig
    vocab: int  # rows of the tables, of which the last have no token
    max_positions: int

    @classmethod
    def read(cls, block: ConfigBlock) -> LMConfig:
        block.expect_none("rope_scaling", "use_sliding_window")
        kv_heads = block.integer("num_attention_groups", *HEADS)
        heads = block.integer("num_attention_heads", *HEADS, step=kv_heads)
        hidden = block.integer("hidden_size", *WIDTH, step=2 * heads)
        if not HEAD_DIM[0] <= hidden // heads <= HEAD_DIM[1]:
            raise block.refuse("hidden_size", f"{heads} heads of {HEAD_DIM[0]} to {HEAD_DIM[1]} are possible")
        stack = LlamaConfig(
            hidden=hidden,
            inner=block.integer("intermediate_size", *WIDTH),
            layers=block.integer("num_hidden_layers", *LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            eps=block.number("rms_norm_eps", *EPS),
            rope_theta=block.number("rope_theta", *ROPE_THETA),
            scaling=None,
        )
        positions = block.integer("max_position_embeddings", 64, POSITIONS[1])
        return cls(stack, block.integer("vocab_size", *VOCABULARY), positions)


@dataclass(frozen=True)
class ListenerConfig:
    """The sizes of the audio encoder, which is that of Qwen2-Audio, and of the adaptor behind it."""

    mels: int
    width: int
    heads: int
    layers: int
    positions: int
    hidden: int  # of the LM

    @classmethod
    def read(cls, block: ConfigBlock, hidden: int) -> ListenerConfig:
        block.expect(kernel_size=3, adapter_stride=2)
        if block.integer("llm_dim", *WIDTH) != hidden:
            raise block.refuse("llm_dim", f"the language model is {hidden} wide")
        heads = block.integer("n_audio_head", *HEADS)
        return cls(
            mels=block.integer("n_mels", 1, 1024),
            width=block.integer("n_audio_state", *WIDTH, step=heads),
            heads=heads,
            layers=block.integer("n_audio_layer", *LAYERS),
            positions=block.integer("n_audio_ctx", 1252, POSITIONS[1]),  # those of 25 s, at least
            hidden=hidden,
        )


@dataclass(frozen=True)
class FlowConfig(EncoderSizes):
    """The sizes of the flow, as the yaml gives them. hidden, depth: of the estimator."""

    hidden: int
    depth: int
    estimator_heads: int
    head_dim: int
    estimator_inner: int
    guidance: float

    @classmethod
    def read(cls, block: ConfigBlock) -> FlowConfig:
        block.expect(output_size=MELS, vocab_size=NUM_CODES)
        encoder, decoder = block.block("encoder"), block.block("decoder")
        encoder.expect(
            input_layer="linear",
            pos_enc_layer_type="rel_pos_espnet",
            selfattention_layer_type="rel_selfattn",
            normalize_before=True,
            key_bias=True,
            pre_lookahead_len=LOOKAHEAD,
            num_up_blocks=NUM_UP_LAYERS,
            up_stride=TOKEN_FRAMES,
            up_scale_factor=TOKEN_FRAMES,
        )
        estimator = decoder.block("estimator")
        estimator.expect(in_channels=4 * MELS, out_channels=MELS)
        heads, width = heads_and_width(block)
        hidden = estimator.integer("hidden_size", *WIDTH)
        return cls(
            num_codes=NUM_CODES,
            width=width,
            heads=heads,
            inner=encoder.integer("linear_units", *WIDTH),
            layers=encoder.integer("num_blocks", *LAYERS),
            speaker=block.integer("spk_embed_dim", *WIDTH),
            hidden=hidden,
            depth=estimator.integer("depth", 1, MAX_DEPTH),
            estimator_heads=estimator.integer("num_heads", *HEADS),
            head_dim=estimator.integer("head_dim", *HEAD_DIM),
            estimator_inner=int(hidden * estimator.number("mlp_ratio", 1 / hidden, 64.0)),
            guidance=decoder.number("inference_cfg_rate", 0.0, 100.0),
        )


@dataclass(frozen=True)
class Config:
    lm: LMConfig
    listener: ListenerConfig
    flow: FlowConfig
    vocoder: VocoderSizes

    @classmethod
    def read(cls, directory: Path) -> Config:
        """Read the configs of a directory. Raises ValueError."""
        block = ConfigBlock(read_json(directory / "config.json"))
        block.expect(model_type=MODEL)
        lm = LMConfig.read(block.block("text_config"))
        listener = ListenerConfig.read(block.block("audio_encoder_config"), lm.stack.hidden)
        root = ConfigBlock(read_yaml(directory / FOLDER / YAML), file=f"{FOLDER}/{YAML}")
        return cls(lm, listener, FlowConfig.read(root.block("flow")), read_vocoder(directory / FOLDER))


def read_vocoder(folder: Path) -> VocoderSizes:
    """Return HiFT's sizes from the shapes in its file, or the published ones without the file. Raises ValueError."""
    if not (folder / VOCODER_FILE).exists():
        return vocoder_sizes()
    file, prefix = open_vocoder(folder)

    def size(name: str, axis: int) -> int:
        header = file.headers.get(f"{prefix}{name}")
        if header is None or len(header.shape) <= axis or not 1 <= header.shape[axis] <= WIDTH[1]:
            what = "nothing" if header is None else f"{list(header.shape)}"
            raise ValueError(f"{file.path} has {what} as {prefix}{name}; a tensor of HiFT is needed")
        return header.shape[axis]

    channels = size("conv_pre.bias", 0)
    if channels % 8:
        raise ValueError(f"{file.path}: conv_pre.bias has {channels} values; a multiple of 8 is needed")
    return vocoder_sizes(
        channels, size("m_source.l_linear.weight", 1), size("f0_predictor.classifier.weight", 1)
    )
