"""cosyvoice2.yaml and the language model's config.json as frozen dataclasses.

A missing or out-of-range value raises an error that names it. Values that the reference keeps in code and not
in a file (the encoder's width, its four upper layers) are constants here, checked against the shapes of the
tensors.
"""

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
from zoo.nn.s3.flow_config import heads_and_width
from zoo.nn.s3.hift_config import read_vocoder
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
        heads, width = heads_and_width(block)
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


@dataclass(frozen=True)
class Config:
    """All configs of a model directory."""

    lm: LMConfig
    sampling: Sampling
    flow: FlowConfig
    vocoder: VocoderSizes

    @classmethod
    def read(cls, directory: Path) -> Config:
        """Read the configs of a model directory. Raises ValueError for a missing or out-of-range value."""
        root = ConfigBlock(read_yaml(directory / YAML), file=YAML)
        root.expect(sample_rate=RATE_HZ, token_frame_rate=GRID, token_mel_ratio=TOKEN_FRAMES)
        lm_block = ConfigBlock(read_json(directory / BLANK / LM_CONFIG), file=f"{BLANK}/{LM_CONFIG}")
        lm = LMConfig.read(lm_block, root)
        flow = FlowConfig.read(root.block("flow"), root)
        sampling = Sampling.read(root.block("llm").block("sampling"))
        return cls(lm, sampling, flow, read_vocoder(root.block("hift"), RATE_HZ, MEL_SAMPLES, num_stages=3))
