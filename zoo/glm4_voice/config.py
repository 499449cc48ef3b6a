"""The configs of the three checkpoints as frozen dataclasses. A missing or out-of-range value raises an error that
names file and key; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo.checkpoint.config import (
    EPS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)
from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.yaml_files import read_yaml
from zoo.hub import codec_directory
from zoo.nn.llama import LlamaConfig
from zoo.nn.s3.flow_config import heads_and_width
from zoo.nn.s3.hift_config import read_vocoder
from zoo.nn.s3.sizes import MELS, VocoderSizes

MODEL = "chatglm"
TITLE = "GLM-4-Voice"
TOKENIZER, DECODER = "glm-4-voice-tokenizer", "glm-4-voice-decoder"  # directories, and names on the Hub
OWNER = "zai-org"
YAML = "config.yaml"
THETA = 10_000.0
RATE_HZ, MEL_SAMPLES = 22_050, 256
MEL_FRAMES, PER_TOKENS = 441, 64  # 441 mel frames for every 64 tokens
FRAME_SAMPLES = 1764  # of a token, on average
SPEECH_HZ = 16_000
PIECE_SAMPLES = 30 * SPEECH_HZ  # a longer clip is encoded in pieces
TOKEN_SAMPLES = 1280  # of the clip
MEL_HOP = 160
CONTEXT = 8192  # the most positions that are offered


def mel_frames(tokens: int) -> int:
    """Return the mel frames of this many tokens."""
    return MEL_FRAMES * tokens // PER_TOKENS


@dataclass(frozen=True)
class LMConfig:
    stack: LlamaConfig
    vocab: int  # rows of the tables, of which the last have no token
    max_positions: int
    stops: tuple[int, ...]

    @classmethod
    def read(cls, block: ConfigBlock) -> LMConfig:
        block = block.with_defaults({"seq_length": CONTEXT})
        block.expect(model_type=MODEL, rmsnorm=True, post_layer_norm=True, multi_query_attention=True)
        block.expect(add_bias_linear=False, add_qkv_bias=True, original_rope=True)
        vocab = block.integer("padded_vocab_size", *VOCABULARY)
        kv_heads = block.integer("multi_query_group_num", *HEADS)
        stack = LlamaConfig(
            hidden=block.integer("hidden_size", *WIDTH),
            inner=block.integer("ffn_hidden_size", *WIDTH),
            layers=block.integer("num_layers", *LAYERS),
            heads=block.integer("num_attention_heads", *HEADS, step=kv_heads),
            kv_heads=kv_heads,
            head_dim=block.integer("kv_channels", *HEAD_DIM, step=4),
            eps=block.number("layernorm_epsilon", *EPS),
            rope_theta=THETA * block.number("rope_ratio", 1e-3, 1e6),
            scaling=None,
        )
        positions = min(block.integer("seq_length", 64, POSITIONS[1]), CONTEXT)
        return cls(stack, vocab, positions, block.integers("eos_token_id", 0, vocab - 1))


@dataclass(frozen=True)
class ListenerConfig:
    """The sizes of the speech tokenizer: Whisper's encoder up to the layer whose output is quantized."""

    mels: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    block: int  # positions that see each other
    pool: int
    codes: int

    @classmethod
    def read(cls, directory: Path) -> ListenerConfig:
        block = ConfigBlock(read_json(directory / "config.json"), file=f"{directory.name}/config.json")
        block.expect(
            model_type="whisper",
            activation_function="gelu",
            scale_embedding=False,
            encoder_causal_convolution=True,
            encoder_causal_attention=False,
            quantize_causal_encoder=False,
            quantize_encoder_only=True,
            pooling_type="avg",
            pooling_kernel_size=TOKEN_SAMPLES // (2 * MEL_HOP),
        )
        layers = block.integer("quantize_position", 1, block.integer("encoder_layers", *LAYERS))
        block.expect(pooling_position=layers)
        heads = block.integer("encoder_attention_heads", *HEADS)
        config = cls(
            mels=block.integer("num_mel_bins", 1, 1024),
            width=block.integer("d_model", *WIDTH, step=heads),
            layers=layers,
            heads=heads,
            inner=block.integer("encoder_ffn_dim", *WIDTH),
            positions=block.integer(
                "max_source_positions", PIECE_SAMPLES // (2 * MEL_HOP), POSITIONS[1], step=4
            ),
            block=block.integer("quantize_causal_block_size", 1, POSITIONS[1]),
            pool=block.get("pooling_kernel_size"),
            codes=block.integer("quantize_vocab_size", *VOCABULARY),
        )
        name = "preprocessor_config.json"
        features = ConfigBlock(read_json(directory / name), file=f"{directory.name}/{name}")
        features.expect(feature_size=config.mels, sampling_rate=SPEECH_HZ, n_fft=400, hop_length=MEL_HOP)
        return config


@dataclass(frozen=True)
class FlowConfig:
    codes: int
    width: int  # of the encoder
    heads: int
    inner: int
    layers: int
    block: int  # tokens that see each other
    speaker: int
    channels: int  # of the estimator
    estimator_heads: int
    head_dim: int
    num_blocks: int
    num_mid: int
    guidance: float

    @classmethod
    def read(cls, block: ConfigBlock) -> FlowConfig:
        block.expect(output_size=MELS, input_frame_rate=12.5)
        encoder, decoder = block.block("encoder"), block.block("decoder")
        encoder.expect(normalize_before=True, input_layer="linear", pos_enc_layer_type="rel_pos_espnet")
        encoder.expect(
            selfattention_layer_type="block_rel_selfattn", use_cnn_module=False, macaron_style=False
        )
        block.block("length_regulator").expect(channels=MELS, sampling_ratios=[1, 1, 1, 1])
        decoder.expect(in_channels=3 * MELS)
        cfm, estimator = decoder.block("cfm_params").block("content"), decoder.block("estimator")
        cfm.expect(solver="euler", t_scheduler="cosine")
        estimator.expect(in_channels=4 * MELS, out_channels=MELS, act_fn="gelu")
        heads, width = heads_and_width(block)
        channels = estimator.integers("channels", *WIDTH, lengths=(2, 2))
        if channels[0] != channels[1] or channels[0] % 8:
            raise estimator.refuse("channels", "two equal multiples of 8 are supported")
        return cls(
            codes=block.integer("vocab_size", *VOCABULARY),
            width=width,
            heads=heads,
            inner=encoder.integer("linear_units", *WIDTH),
            layers=encoder.integer("num_blocks", *LAYERS),
            block=encoder.integer("block_size", 1, 1000),
            speaker=block.integer("spk_embed_dim", *WIDTH),
            channels=channels[0],
            estimator_heads=estimator.integer("num_heads", *HEADS),
            head_dim=estimator.integer("attention_head_dim", *HEAD_DIM),
            num_blocks=estimator.integer("n_blocks", *LAYERS),
            num_mid=estimator.integer("num_mid_blocks", *LAYERS),
            guidance=cfm.number("inference_cfg_rate", 0.0, 100.0),
        )


@dataclass(frozen=True)
class Config:
    lm: LMConfig
    listener: ListenerConfig
    flow: FlowConfig
    vocoder: VocoderSizes

    @classmethod
    def read(cls, directory: Path) -> Config:
        """Read the configs of the LM's directory and of the two that belong to it. Raises ValueError."""
        lm = LMConfig.read(ConfigBlock(read_json(directory / "config.json")))
        listener = ListenerConfig.read(find(directory, TOKENIZER))
        root = ConfigBlock(read_yaml(find(directory, DECODER) / YAML), file=f"{DECODER}/{YAML}")
        root.expect(sample_rate=RATE_HZ)
        flow = FlowConfig.read(root.block("flow"))
        if flow.codes != listener.codes:
            raise root.block("flow").refuse("vocab_size", f"the tokenizer has {listener.codes} codes")
        return cls(lm, listener, flow, read_vocoder(root.block("hift"), RATE_HZ, MEL_SAMPLES, num_stages=2))


def find(directory: Path, folder: str) -> Path:
    """Return the directory of the tokenizer or of the decoder. Raises ValueError that says where it may lie."""
    return codec_directory(directory, folder, f"{OWNER}/{folder}", TITLE)
