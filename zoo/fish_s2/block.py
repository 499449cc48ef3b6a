"""The block of the slow AR, and the RoPE rotation of all attention in this model.

The RoPE table is rounded to bf16, even if the model runs in fp32. The model depends on this rounding as on
its weights: published implementations with an exact table report garbled and endless speech.
Source: facts of fishaudio/fish-speech, from fish-speech 0.1.0, models/text2semantic/llama.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.fish_s2.config import StackConfig
from zoo.nn.block import PagedBlock
from zoo.nn.rope import rotate_wide


def rope_table(num_positions: int, dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return the RoPE table [num_positions, 2, dim / 2] bf16: cosines, then sines. It is computed on the CPU,
    so that it is the same on all devices."""
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [dim / 2]
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()), 1).bfloat16().to(device)


def turns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., dim] float32 for `rotate`, from a RoPE table's rows [..., 2, dim / 2]."""
    # in separate storage, because a compiled region accepts no two inputs with the same one
    cos, sin = (rows[..., i, :].float().repeat_interleave(2, -1).contiguous() for i in range(2))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., H, dim] by cos and sin [..., 1, dim] of its positions: value 2i pairs with value 2i + 1."""
    return rotate_wide(x, cos, sin, is_paired=True)


class SlowBlock(PagedBlock):
    """A block of the slow stack: paged attention with a norm per head, then a gated MLP."""

    is_paired = is_wide_norm = True

    def __init__(self, config: StackConfig):
        super().__init__(config)
        # nn.RMSNorm multiplies by its weight before it rounds; our RMSNorm does so after rounding.
        self.q_norm = nn.RMSNorm(config.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.eps)
