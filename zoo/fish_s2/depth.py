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

from zoo.fish_s2.block import DualARBlock
from zoo.fish_s2.config import Config
from zoo.nn.frame_attention import attend_and_grow
from zoo.nn.norm import RMSNorm


class FastBlock(DualARBlock):
    """A block over a dense cache. Its position in the frame is a tensor argument, so that all blocks and
    passes share two compiled regions."""

    @torch.compiler.nested_compile_region
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the block on x [B, L, D], which starts at position [1]; cos and sin [K, dim]; cache [B, 2, Hkv,
        K, dim] fp32. L is 2 at the frame's start and 1 after that. Return x, and the cache with these
        positions added."""
        q, k, v = self.project_plain_qkv(x)
        mixed, cache = attend_and_grow(
            q, k, v, cos, sin, self.head_dim**-0.5, position, cache, is_paired=True, is_rounded=True
        )
        return self.project_output(x, mixed.flatten(2)), cache


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
        stack = self._stack(hidden)
        codes = [first]
        x = torch.stack((hidden, self.embedding(first)), 1)  # [B, 2, D]
        for k in range(1, self.codebooks):
            here = slice(0, 2) if k == 1 else slice(k, k + 1)
            x = stack(x, here)
            code = pick(self.head(self.norm(x[:, -1])).float(), k)
            codes.append(code)
            x = self.embedding(code)[:, None]  # [B, 1, D]
        return torch.stack(codes, 1)

    def _stack(self, hidden: Tensor) -> Callable[[Tensor, slice], Tensor]:
        """Return a function that runs all layers: x [B, L, D] and its positions -> x. Its cache starts
        empty."""
        c = self.config
        # [K, dim] each, in separate storage: a compiled region of torch 2.11 accepts no two inputs with the
        # same storage.
        cos, sin = (self.rope[:, i].float().repeat_interleave(2, -1).contiguous() for i in range(2))
        shape = hidden.shape[0], 2, c.kv_heads, self.codebooks, c.head_dim
        cache = [hidden.new_empty(shape, dtype=torch.float32)] * c.layers
        positions = torch.arange(self.codebooks, device=hidden.device)

        def stack(x: Tensor, here: slice) -> Tensor:
            for i, layer in enumerate(self.layers):
                x, cache[i] = layer(x, cos, sin, positions[here][:1], cache[i])
            return x

        return stack
