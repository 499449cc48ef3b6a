"""The fast AR: it makes a frame's residual codes from the slow AR's hidden state and the semantic code.

It is a small transformer whose cache starts empty in every frame. Position 0 reads the slow AR's hidden state
after the final norm, and position k reads the embedding of code k - 1. All codebooks share one embedding
table. The output at position k gives code k. Code 0 is already known, so one pass runs positions 0 and 1, and
only its second output is used. The 10 positions therefore need 9 passes, with the same result.

    position   0       1    2   ...  9
    input      hidden  c0   c1  ...  c8
    gives      -       c1   c2  ...  c9

RoPE and attention are in fp32. Source: facts of fish-speech 0.1.0, models/text2semantic/llama.py,
DualARTransformer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.fish_s2.block import turns
from zoo.fish_s2.config import Config
from zoo.nn.frame_stack import FrameBlock, frame_stack
from zoo.nn.norm import RMSNorm


class FastBlock(FrameBlock):
    """Its rotated values are rounded, as in the original."""

    is_paired = is_rounded = True


class FastAR(nn.Module):
    rope: Tensor  # [K, 2, dim / 2]

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.codebooks = config.fast, config.codebooks
        self.embedding = nn.Embedding(config.codebook_size, config.fast.hidden)
        self.layers = nn.ModuleList(FastBlock(config.fast) for _ in range(config.fast.layers))
        self.norm = RMSNorm(config.fast.hidden, config.fast.eps)
        self.head = nn.Linear(config.fast.hidden, config.codebook_size, bias=False)

    def forward(self, hidden: Tensor, first: Tensor, pick: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the frame's codes [B, K], from hidden [B, D] and first [B], which is code 0.

        pick(logits [B, V] fp32, k) -> [B] chooses code k.
        """
        stack = frame_stack(self.layers, self.norm, *turns(self.rope), hidden)
        codes = [first]
        x = torch.stack((hidden, self.embedding(first)), 1)  # [B, 2, D]
        for k in range(1, self.codebooks):
            here = slice(0, 2) if k == 1 else slice(k, k + 1)
            code = pick(self.head(stack(x, here)).float(), k)
            codes.append(code)
            x = self.embedding(code)[:, None]  # [B, 1, D]
        return torch.stack(codes, 1)
