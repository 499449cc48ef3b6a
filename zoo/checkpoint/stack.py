"""The sizes of a stack of decoder blocks, by the names that transformers gives them."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.checkpoint.config import EPS, HEAD_DIM, HEADS, LAYERS, WIDTH, ConfigBlock


@dataclass(frozen=True)
class StackConfig:
    """The sizes of a stack of blocks: grouped-query attention, then a gated MLP."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


def read_stack(block: ConfigBlock, rope_theta: float, head_dim: int | None = None) -> StackConfig:
    """Read the sizes of a stack. head_dim None: the block states it. Raises ValueError for a missing or
    out-of-range value."""
    kv_heads = block.integer("num_key_value_heads", *HEADS)
    return StackConfig(
        hidden=block.integer("hidden_size", *WIDTH),
        inner=block.integer("intermediate_size", *WIDTH),
        layers=block.integer("num_hidden_layers", *LAYERS),
        heads=block.integer("num_attention_heads", *HEADS, step=kv_heads),
        kv_heads=kv_heads,
        head_dim=block.integer("head_dim", *HEAD_DIM, step=2) if head_dim is None else head_dim,
        eps=block.number("rms_norm_eps", *EPS),
        rope_theta=rope_theta,
    )
