"""cosyvoice2.yaml and the language model's config.json as frozen dataclasses.

A missing or out-of-range value raises an error that names it. Values that the reference keeps in code and not
in a file (the encoder's width, its four upper layers) are constants here, checked against the shapes of the
tensors.

The yaml is HyperPyYAML, which constructs and calls whatever its tags name. Nothing is called here: the
content of a tag is read as plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zoo.checkpoint.config import (
    EPS,
    HEAD_DIM,
    HEADS,
    KERNEL,
    LAYERS,
    POSITIONS,
    ROPE_THETA,
    STRIDE,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)
from zoo.checkpoint.json_files import read_json
from zoo.nn.s3.sizes import (
    GRID,
    LOOKAHEAD,
    MEL_SAMPLES,
    MELS,
    NUM_CODES,
    RATE_HZ,
    TOKEN_FRAMES,
    FlowSizes,
    VocoderSizes,
)

YAML, LM_CONFIG = "cosyvoice2.yaml", "config.json"
BLANK = "CosyVoice-BlankEN"  # the directory of the text tokenizer and of the language model's config
NUM_STOPS = 3  # ids after the codes in the tables: the end, an unused one, and FILL
FILL = NUM_CODES + 2  # "more text", in interleaved speech
MAX_RAS_WINDOW = 100  # codes


class _PlainLoader(yaml.SafeLoader):
    """A loader that replaces every tag by its content: `!new:some.Class` with a block becomes that block."""


def _plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.ScalarNode)
    return loader.construct_scalar(node)


_PlainLoader.add_multi_constructor("!", _plain)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML object and resolve `!ref <name>` to top-level values. Raises ValueError."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)  # this loader constructs nothing
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a YAML object")
    return {key: _resolved(value, values) for key, value in values.items()}


def _resolved(value: Any, top: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(inner, top) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith("<") and value.endswith(">"):
        return top.get(value[1:-1], value)
    return value


@dataclass(frozen=True)
class LMConfig:
    """The sizes of the stack of Qwen2 blocks and of the tables around it."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    eps: float
    rope_theta: float
    text_vocab: int
    max_positions: int
    num_codes: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def num_outputs(self) -> int:
        return self.num_codes + NUM_STOPS

    @classmethod
    def read(cls, block: ConfigBlock, root: ConfigBlock) -> LMConfig:
        block.expect(hidden_act="silu", model_type="qwen2")
        block.expect_none("use_sliding_window")
        root.block("llm").expect(speech_token_size=NUM_CODES)
        kv_heads = block.integer("num_key_value_heads", *HEADS)
        heads = block.integer("num_attention_heads", *HEADS, step=kv_heads)
        hidden = block.integer("hidden_size", *WIDTH, step=2 * heads)
        for key in ("llm_input_size", "llm_output_size"):
            if root.integer(key, *WIDTH) != hidden:
                raise root.refuse(key, f"the language model's hidden_size is {hidden}")
        if not HEAD_DIM[0] <= hidden // heads <= HEAD_DIM[1]:
            raise block.refuse("hidden_size", f"{heads} heads of {HEAD_DIM[0]} to {HEAD_DIM[1]} are possible")
        return cls(
            hidden=hidden,
            inner=block.integer("intermediate_size", *WIDTH),
            layers=block.integer("num_hidden_layers", *LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            eps=block.number("rms_norm_eps", *EPS),
            rope_theta=block.number("rope_theta", *ROPE_THETA),
            text_vocab=block.integer("vocab_size", *VOCABULARY),
            max_positions=block.integer("max_position_embeddings", *POSITIONS),
            num_codes=NUM_CODES,
        )


@dataclass(frozen=True)
class Sampling:
    """The defaults of repetition-aware sampling (VALL-E 2, arXiv 2406.05370)."""

    top_p: float
    top_k: int
    win_size: int
    tau_r: float

    @classmethod
    def read(cls, block: ConfigBlock) -> Sampling:
        return cls(
            top_p=block.number("top_p", 1e-6, 1.0),
            top_k=block.integer("top_k", 0, 1_000_000),
            win_size=block.integer("win_size", 0, MAX_RAS_WINDOW),
            tau_r=block.number("tau_r", 0.0, 1.0),
        )


class FlowConfig(FlowSizes):
    """The sizes of the flow, as the yaml gives them."""

    @classmethod
    def read(cls, block: ConfigBlock, root: ConfigBlock) -> FlowConfig:
        block.expect(vocab_size=NUM_CODES)
        block.expect(output_size=MELS, token_mel_ratio=TOKEN_FRAMES, pre_lookahead_len=LOOKAHEAD)
        encoder, decoder = block.block("encoder"), block.block("decoder")
        encoder.expect(normalize_before=True, input_layer="linear", pos_enc_layer_type="rel_pos_espnet")
        encoder.expect(selfattention_layer_type="rel_selfattn", use_cnn_module=False, macaron_style=False)
        cfm = decoder.block("cfm_params").block("content")
        cfm.expect(solver="euler", t_scheduler="cosine")
        estimator = decoder.block("estimator")
        estimator.expect(in_channels=4 * MELS, out_channels=MELS, act_fn="gelu")
        heads = encoder.integer("attention_heads", *HEADS)
        width = encoder.integer("output_size", *WIDTH, step=2 * heads)
        for owner in (block, encoder):
            if owner.integer("input_size", *WIDTH) != width:
                raise owner.refuse("input_size", f"the encoder is {width} wide")
        return cls(
            num_codes=NUM_CODES,
            width=width,
            heads=heads,
            inner=encoder.integer("linear_units", *WIDTH),
            layers=encoder.integer("num_blocks", *LAYERS),
            speaker=root.integer("spk_embed_dim", *WIDTH),
            channels=estimator.integers("channels", *WIDTH, lengths=(1, 1))[0],
            estimator_heads=estimator.integer("num_heads", *HEADS),
            head_dim=estimator.integer("attention_head_dim", *HEAD_DIM),
            num_blocks=estimator.integer("n_blocks", *LAYERS),
            num_mid=estimator.integer("num_mid_blocks", *LAYERS),
            guidance=cfm.number("inference_cfg_rate", 0.0, 100.0),
        )


class VocoderConfig(VocoderSizes):
    """The sizes of HiFT, as the yaml gives them."""

    @classmethod
    def read(cls, block: ConfigBlock) -> VocoderConfig:
        block.expect(in_channels=MELS)
        istft, f0 = block.block("istft_params"), block.block("f0_predictor")
        f0.expect(num_class=1, in_channels=MELS)
        rates = block.integers("upsample_rates", *STRIDE, lengths=(3, 3))
        kernels = block.integers("upsample_kernel_sizes", *KERNEL, lengths=(3, 3))
        hop = istft.integer("hop_len", 1, 64)
        fft = istft.integer("n_fft", 4, 1024, step=4 * hop)
        product = rates[0] * rates[1] * rates[2] * hop
        if product != MEL_SAMPLES:
            raise block.refuse(
                "upsample_rates",
                f"together with a hop of {hop} their product is {product}; it must be {MEL_SAMPLES}",
            )
        if fft != 4 * hop:
            raise istft.refuse("n_fft", f"only {4 * hop}, four times hop_len, is supported")
        if any(kernel < rate or (kernel - rate) % 2 for kernel, rate in zip(kernels, rates, strict=True)):
            raise block.refuse(
                "upsample_kernel_sizes", f"each must exceed its rate of {list(rates)} by an even number"
            )
        resblock_kernels = block.integers("resblock_kernel_sizes", *KERNEL, lengths=(3, 3))
        source_kernels = block.integers("source_resblock_kernel_sizes", *KERNEL, lengths=(3, 3))
        return cls(
            channels=block.integer("base_channels", *WIDTH, step=8),
            harmonics=block.integer("nb_harmonics", 0, 64) + 1,
            alpha=block.number("nsf_alpha", 0.0, 1.0),
            sigma=block.number("nsf_sigma", 0.0, 1.0),
            voiced_hz=block.number("nsf_voiced_threshold", 0.0, 1e4),
            rates=rates,
            kernels=kernels,
            fft=fft,
            hop=hop,
            resblock_kernels=resblock_kernels,
            resblock_dilations=_dilations(block, "resblock_dilation_sizes"),
            source_kernels=source_kernels,
            slope=block.number("lrelu_slope", 0.0, 1.0),
            limit=block.number("audio_limit", 0.0, 1.0),
            f0_channels=f0.integer("cond_channels", *WIDTH),
        )


def _dilations(block: ConfigBlock, key: str) -> tuple[int, ...]:
    """Return the dilations, which must be equal for all kernels."""
    known = [[1, 3, 5]] * 3
    if block.get(key) != known:
        raise block.refuse(key, f"only {known} is known")
    return (1, 3, 5)


@dataclass(frozen=True)
class Config:
    """All configs of a model directory."""

    lm: LMConfig
    sampling: Sampling
    flow: FlowConfig
    vocoder: VocoderConfig

    @classmethod
    def read(cls, directory: Path) -> Config:
        """Read the configs of a model directory. Raises ValueError for a missing or out-of-range value."""
        root = ConfigBlock(read_yaml(directory / YAML), file=YAML)
        root.expect(sample_rate=RATE_HZ, token_frame_rate=GRID, token_mel_ratio=TOKEN_FRAMES)
        lm_block = ConfigBlock(read_json(directory / BLANK / LM_CONFIG), file=f"{BLANK}/{LM_CONFIG}")
        lm = LMConfig.read(lm_block, root)
        flow = FlowConfig.read(root.block("flow"), root)
        root.block("hift").expect(source_resblock_dilation_sizes=[[1, 3, 5]] * 3, sampling_rate=RATE_HZ)
        sampling = Sampling.read(root.block("llm").block("sampling"))
        return cls(lm, sampling, flow, VocoderConfig.read(root.block("hift")))
