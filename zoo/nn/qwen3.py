"""Qwen3's decoder over pages: Llama's with a norm per head of queries and keys.

Source: transformers 5.23, models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.checkpoint.names import decoder_block
from zoo.checkpoint.stack import StackConfig
from zoo.contract import Batch
from zoo.nn.block import PagedBlock
from zoo.nn.blocked_stack import run_blocks
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table


class Block(PagedBlock):
    """A block with a norm per head of queries and keys."""

    def __init__(self, config: StackConfig):
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)


class Stack(nn.Module):
    """The blocks and the last norm. The RoPE table is rounded to the inputs' dtype."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, D] -> [T, D]"""
        config = self.config
        rotary = rope_table(batch.positions, config.head_dim, config.rope_theta, x.dtype)
        return run_blocks(self.layers, self.norm, x, rotary, batch)


def names(config: StackConfig, theirs: str, ours: str) -> dict[str, str]:
    """Return the published names of a stack's tensors -> ours, by prefix (see `zoo.checkpoint.loading`)."""
    table = {f"{theirs}.norm.weight": f"{ours}.norm.weight"}
    for i in range(config.layers):
        table |= decoder_block(f"{theirs}.layers.{i}", f"{ours}.layers.{i}", has_qk_norm=True)
    return table
