"""The MiniCPM4 block, which all four stacks are made of, and the two kinds of stack.

Source: OpenBMB/VoxCPM, modules/minicpm4/model.py; MiniCPM4 (arXiv 2506.07900).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.contract import Batch
from zoo.nn.block import PagedBlock, PreNormBlock
from zoo.nn.blocked_stack import run_blocks
from zoo.nn.frame_attention import attend_within
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rotate_wide
from zoo.nn.swiglu import FusedSwiGLU
from zoo.voxcpm2.config import Rope, StackConfig


class CausalBlock(PagedBlock):
    """A block of the base model or the residual model. Without a rotation, it has no positions."""

    MLP = FusedSwiGLU


class LocalBlock(PreNormBlock):
    """A block over the few tokens of a patch, without a causal mask."""

    MLP = FusedSwiGLU
    is_stacked = False

    def __init__(self, config: StackConfig, kept: slice):
        super().__init__(config)
        self.kept = kept

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, more: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's output for the kept tokens, as two parts [..., kept, D].

        x and more [..., L, D]: the two parts of the input; cos and sin [L, dim]. The sum of the two parts is
        left to the next block, which fuses it into the kernel of its norm.
        """
        return self.apart(x + more, cos, sin)

    def apart(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the block like `forward`, but to one tensor x [..., L, D] and in the region of the caller."""
        q, k, v = (part.flatten(0, -4) for part in self.project(x))  # [B, L, H or Hkv, dim]
        mixed = self._attend(q[:, self.kept], k, v, cos, sin)  # [B, kept, H * dim]
        x = x[..., self.kept, :] + self.out(mixed.unflatten(0, x.shape[:-2]))
        return x, self.mlp(self.mlp_norm(x))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if q.device.type == "cuda":
            first = self.kept.start or 0
            return attend_within(q, k, v, cos, sin, self.head_dim**-0.5, first).flatten(2)
        cos, sin = cos[:, None], sin[:, None]
        q, k = rotate_wide(q, cos[self.kept], sin[self.kept]), rotate_wide(k, cos, sin)
        kept = q.shape[1]
        # nothing is masked, so the queries of a group can be folded into the axis of positions
        q = rearrange(q, "b l (h g) d -> b h (g l) d", h=self.kv_heads)  # [B, Hkv, G * kept, dim]
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, Hkv, L, dim]
        mixed = F.scaled_dot_product_attention(q, k, v)
        return rearrange(mixed, "b h (g l) d -> b l (h g d)", l=kept)


class LongRope(nn.Module):
    """Cosines and sines of LongRoPE.

    Angles are fp32; the results are rounded to the model's dtype, as in the reference.
    """

    stretch: Tensor  # [dim / 2], after prepare()
    frequency: Tensor  # [dim / 2]

    def __init__(self, config: Rope):
        super().__init__()
        self.config = config

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fill the tables. Call once the weights are loaded."""
        self.dtype = dtype
        pairs = torch.arange(0, 2 * len(self.config.factors), 2).float()
        frequency = 1.0 / self.config.theta ** (pairs / (2 * len(self.config.factors)))
        self.register_buffer(
            "stretch", (1.0 / torch.tensor(self.config.factors)).to(device), persistent=False
        )
        self.register_buffer("frequency", frequency.to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, dim] of positions [T]."""
        angle = positions.float()[:, None] * self.stretch * self.frequency
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos() * self.config.amplitude, angle.sin() * self.config.amplitude
        return cos.to(self.dtype), sin.to(self.dtype)


class LanguageModel(nn.Module):
    """A causal stack. Its layers use the family's paged layers from `first_layer` on."""

    def __init__(self, config: StackConfig, first_layer: int):
        super().__init__()
        self.first_layer = first_layer
        self.rope = LongRope(config.rope) if config.rope else None
        self.layers = nn.ModuleList(CausalBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fill the tables. Call once the weights are loaded."""
        if self.rope:
            self.rope.prepare(device, dtype)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states after the final norm [T, D]. x [T, D]."""
        rotary = self.rope(batch.positions) if self.rope else ()
        return run_blocks(self.layers, self.norm, x, rotary, batch, self.first_layer)


class LocalStack(nn.Module):
    """A stack over `tokens` tokens that all attend to each other.

    Its last block computes only the `kept` tokens, because the output of the others is never read.
    """

    cos: Tensor  # [tokens, dim], after prepare()
    sin: Tensor  # likewise

    def __init__(self, config: StackConfig, tokens: int, kept: slice):
        super().__init__()
        assert config.rope is not None, "the small stacks have positions"
        self.tokens = tokens
        self.rope = LongRope(config.rope)
        last = config.layers - 1
        self.layers = nn.ModuleList(
            LocalBlock(config, kept if i == last else slice(0, tokens)) for i in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.eps)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Fill the tables. Call once the weights are loaded."""
        self.rope.prepare(device, dtype)
        for name, table in zip(
            ("cos", "sin"), self.rope(torch.arange(self.tokens, device=device)), strict=True
        ):
            self.register_buffer(name, table, persistent=False)

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the first block on x [..., tokens, D]. Returns its output as two parts, for `finish`."""
        first: LocalBlock = self.layers[0]  # type: ignore[assignment]
        return first.apart(x, self.cos, self.sin)

    def finish(self, x: Tensor, more: Tensor) -> Tensor:
        """Run the other blocks and the final norm. Returns [..., kept, D]."""
        for layer in list(self.layers)[1:]:
            x, more = layer(x, more, self.cos, self.sin)
        return self.norm(x + more)
