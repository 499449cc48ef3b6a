"""Llama's decoder block over pages, its sizes, and its rotary angles with Llama 3's scaling.

Source: transformers 5.23, models/llama/modeling_llama.py and modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.checkpoint.config import HEADS, POSITIONS, ROPE_THETA, WIDTH, ConfigBlock
from zoo.checkpoint.names import decoder_block, qkv
from zoo.checkpoint.stack import StackConfig, read_stack
from zoo.contract import Batch
from zoo.nn.block import PagedBlock
from zoo.nn.blocked_stack import run_blocks
from zoo.nn.norm import RMSNorm


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling: long wavelengths turn `factor` times slower, short ones stay, those between are
    mixed."""

    factor: float
    low: float
    high: float
    positions: int  # that the model had before its context was extended

    @classmethod
    def read(cls, block: ConfigBlock) -> RopeScaling:
        block.expect(rope_type="llama3")
        low = float(block.number("low_freq_factor", 1e-4, 1e3))
        return cls(
            factor=float(block.number("factor", 1.0, 1e4)),
            low=low,
            high=float(block.number("high_freq_factor", low * (1 + 1e-6), 1e4)),
            positions=block.integer("original_max_position_embeddings", *POSITIONS),
        )


@dataclass(frozen=True)
class LlamaConfig(StackConfig):
    """The sizes of a stack of blocks, and how Llama 3 scales its rotary angles."""

    scaling: RopeScaling | None

    @classmethod
    def read(cls, block: ConfigBlock) -> LlamaConfig:
        """Read transformers' LlamaConfig, of release 4 (`rope_scaling`) or 5 (`rope_parameters`). Raises
        ValueError."""
        block = block.with_defaults({"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
        block.expect(hidden_act="silu", attention_bias=False, mlp_bias=False)
        heads = block.integer("num_attention_heads", *HEADS)
        hidden = block.integer("hidden_size", *WIDTH, step=heads)
        own_head_dim = block.values.get("head_dim") is not None
        theta, scaling = _rope(block)
        sizes = read_stack(block, theta, None if own_head_dim else hidden // heads)
        return cls(**vars(sizes), scaling=scaling)


def _rope(block: ConfigBlock) -> tuple[float, RopeScaling | None]:
    is_new = block.values.get("rope_parameters") is not None
    rope = block.block("rope_parameters") if is_new else block
    theta = float(rope.number("rope_theta", *ROPE_THETA))
    if is_new:
        is_plain = rope.values.get("rope_type", "default") == "default"
        return theta, None if is_plain else RopeScaling.read(rope)
    if block.values.get("rope_scaling") is None:
        return theta, None
    return theta, RopeScaling.read(block.block("rope_scaling"))


def frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Return the angle by which each pair of values turns per position, [head_dim / 2] float32."""
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.scaling
    if scaling is None:
        return plain
    turns = scaling.positions * plain / (2 * math.pi)  # within the first context
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)  # 1: as it is, 0: slowed down
    return (1 - kept) * plain / scaling.factor + kept * plain


class Stack(nn.Module):
    """The blocks and the last norm."""

    angle: Tensor  # [head_dim / 2], after prepare()

    def __init__(self, config: LlamaConfig, has_bias: bool = False):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(PagedBlock(config, has_bias) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def prepare(self) -> None:
        """Compute what follows from the config alone. Call once, with the weights in place."""
        angle = frequencies(self.config, self.norm.weight.device)
        self.register_buffer("angle", angle, persistent=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, D] -> [T, D]"""
        angle = batch.positions.float()[:, None] * self.angle  # fp32, as in the reference
        angle = torch.cat((angle, angle), -1)  # [T, head_dim]
        rotary = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return run_blocks(self.layers, self.norm, x, rotary, batch)


def names(config: LlamaConfig, theirs: str, ours: str, has_bias: bool = False) -> dict[str, str]:
    """Return the published names of a stack's tensors -> ours, by prefix (see `zoo.checkpoint.loading`)."""
    table = {f"{theirs}.norm.weight": f"{ours}.norm.weight"}
    for i in range(config.layers):
        block = f"{theirs}.layers.{i}", f"{ours}.layers.{i}"
        table |= decoder_block(*block, has_qk_norm=False) | (qkv(*block, "bias") if has_bias else {})
    return table


def config_json(sizes: Sequence[int], **values: Any) -> dict[str, Any]:
    """Return a Llama 3.2 config.json for demo checkpoints.

    sizes: hidden, inner, layers, heads, kv heads, head dim, vocabulary.
    """
    hidden, inner, layers, heads, kv_heads, head_dim, vocabulary = sizes
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.47.1",
        "use_cache": False,
        "vocab_size": vocabulary,
    } | values
