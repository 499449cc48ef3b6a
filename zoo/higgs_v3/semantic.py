"""HuBERT, which represents the content of a recording as 50 vectors per second. The codec uses the mean of
all layers.

    samples [B, N] at 16 kHz ─ 7 strided convs ─ linear ─ + a wide conv (position) ─ norm ─ 12 post-norm layers ─ mean of all [B, T, D]

Source: Hsu et al. 2021 (arXiv 2106.07447); transformers 5.23, models/hubert.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.higgs_v3.config import SemanticConfig


class Layer(nn.Module):
    def __init__(self, config: SemanticConfig):
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(config.hidden, config.hidden) for _ in range(4))
        self.attention_norm = nn.LayerNorm(config.hidden, config.eps)
        self.widen = nn.Linear(config.hidden, config.inner)
        self.narrow = nn.Linear(config.inner, config.hidden)
        self.mlp_norm = nn.LayerNorm(config.hidden, config.eps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]. Attention has no mask."""
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=self.heads) for part in parts)  # [B, H, T, dim]
        y = rearrange(F.scaled_dot_product_attention(q, k, v), "b h t d -> b t (h d)")
        x = self.attention_norm(x + self.out(y))
        return self.mlp_norm(x + self.narrow(F.gelu(self.widen(x))))


class Position(nn.Module):
    """The positional encoding: a wide convolution with weight norm. Its kernel is published as a direction,
    and a length for each tap."""

    weight: Tensor  # [D, D / groups, kernel], set by prepare()

    def __init__(self, config: SemanticConfig):
        super().__init__()
        self.kernel, self.groups = config.position_kernel, config.position_groups
        self.length = nn.Parameter(torch.empty(1, 1, config.position_kernel))
        self.direction = nn.Parameter(
            torch.empty(config.hidden, config.hidden // config.position_groups, config.position_kernel)
        )
        self.bias = nn.Parameter(torch.empty(config.hidden))

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the kernel. Call this once after loading the weights."""
        weight = self.direction * (self.length / self.direction.norm(dim=(0, 1), keepdim=True))
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]. An even kernel makes one frame too many, and the last one is dropped."""
        y = F.conv1d(x.mT, self.weight, self.bias, padding=self.kernel // 2, groups=self.groups)
        return F.gelu(y[..., : x.shape[1]]).mT


class Hubert(nn.Module):
    """The whole network. Run it in fp32."""

    def __init__(self, config: SemanticConfig):
        super().__init__()
        widths = (1, *config.conv_widths)
        shapes = zip(widths[:-1], widths[1:], config.conv_kernels, config.conv_strides, strict=True)
        self.convs = nn.ModuleList(nn.Conv1d(*shape, bias=False) for shape in shapes)
        # normalizes each channel over time, after the first convolution
        self.conv_norm = nn.GroupNorm(widths[1], widths[1])
        self.input_norm = nn.LayerNorm(widths[-1], config.eps)
        self.input = nn.Linear(widths[-1], config.hidden)
        self.position = Position(config)
        self.norm = nn.LayerNorm(config.hidden, config.eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] at 16 kHz, with their loudness unchanged. Return [B, T, D], the mean of the
        first layer's input and all layers' outputs."""
        x = samples[:, None]
        for i, conv in enumerate(self.convs):
            x = conv(x)
            x = F.gelu(self.conv_norm(x) if i == 0 else x)
        x = self.input(self.input_norm(x.mT))
        x = self.norm(x + self.position(x))
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states, 1).mean(1)
