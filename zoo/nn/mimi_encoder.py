"""Mimi's encoder. It turns a whole reference recording into codes in one call.

    samples [B, N] ─ conv ─ (residual, strided conv) x4 ─ conv ─ transformer ─ downsample ─ codebooks ─ codes [B, N / 1920, K]
                                4, 5, 6, 8: 24 kHz to 25 Hz       25 Hz         12.5 Hz

Source: Defossez et al., "Moshi" (2024), section 3.3; transformers 4.57 and 5.23, models/mimi/modeling_mimi.py.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.linear import FusedLinear
from zoo.nn.mimi import MimiConfig
from zoo.nn.rope import rope_table, rotate
from zoo.nn.vq import SplitVQ


class Conv(nn.Conv1d):
    """A causal convolution: [B, C, N] -> [B, Cout, ceil(N / stride)]. It pads kernel - stride values on the
    left, and on the right up to a whole stride."""

    def __init__(
        self,
        channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        bias: bool = True,
        pad: str = "constant",
    ):
        super().__init__(channels, out_channels, kernel, stride, bias=bias)
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        (kernel,), (stride,) = self.kernel_size, self.stride
        return super().forward(F.pad(x, (kernel - stride, -x.shape[-1] % stride), self.pad))


class Residual(nn.Sequential):
    def __init__(self, channels: int, middle: int, kernel: int):
        super().__init__(nn.ELU(), Conv(channels, middle, kernel), nn.ELU(), Conv(middle, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Layer(nn.Module):
    """A pre-norm transformer layer with layer scale."""

    def __init__(self, config: MimiConfig):
        super().__init__()
        self.heads = config.heads
        width = config.heads * config.head_dim
        self.attention_norm = nn.LayerNorm(config.hidden, config.eps)
        self.qkv = FusedLinear(config.hidden, (width, width, width))
        self.out = nn.Linear(width, config.hidden, bias=False)
        self.attention_scale = nn.Parameter(torch.empty(config.hidden))
        self.mlp_norm = nn.LayerNorm(config.hidden, config.eps)
        self.widen = nn.Linear(config.hidden, config.inner, bias=False)
        self.narrow = nn.Linear(config.inner, config.hidden, bias=False)
        self.mlp_scale = nn.Parameter(torch.empty(config.hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]; seen [T, T] is the attention mask, or None for the whole past."""
        parts = self.qkv(self.attention_norm(x))
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=self.heads) for part in parts)  # [B, H, T, dim]
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=seen, is_causal=seen is None
        )
        x = x + self.attention_scale * self.out(rearrange(y, "b h t d -> b t (h d)"))
        return x + self.mlp_scale * self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class Encoder(nn.Module):
    """Encodes samples to codes. Run it in fp32: with less precision, near ties between codebook rows resolve
    differently. Call `prepare` once after loading the weights."""

    def __init__(self, config: MimiConfig):
        super().__init__()
        self.config = config
        channels = config.filters
        convs: list[nn.Module] = [Conv(1, channels, config.kernel)]
        for stride in config.strides:
            convs += [Residual(channels, channels // config.compress, config.residual_kernel), nn.ELU()]
            convs += [Conv(channels, 2 * channels, 2 * stride, stride)]
            channels *= 2
        self.convs = nn.Sequential(*convs, nn.ELU(), Conv(channels, config.hidden, config.last_kernel))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.downsample = Conv(config.hidden, config.hidden, 4, 2, bias=False, pad="replicate")
        self.quantizer = SplitVQ(
            config.codebooks, config.used, config.codebook_size, config.codebook_dim, config.hidden
        )
        # one flag per codebook; the checkpoint has them, but nothing reads them
        self.initialized = nn.ParameterList(torch.empty(1) for _ in range(config.codebooks))

    def prepare(self) -> None:
        """Precompute the tensors that depend only on the weights."""
        self.quantizer.prepare()

    def forward(self, samples: Tensor, window: int | None = None) -> Tensor:
        """samples [B, N] -> codes [B, ceil(N / frame_samples), K]. Padding on the right changes only the
        codes of a partial last frame.

        window: how many positions (40 ms each) a position attends to, including itself; None is the whole
        past.
        """
        x = self.convs(samples[:, None]).mT  # [B, T, D]
        position = torch.arange(x.shape[1], device=x.device)
        cos, sin = rope_table(position, self.config.head_dim, self.config.rope_theta, x.dtype)
        seen = None
        if window is not None:
            before = position[:, None] - position
            seen = (before >= 0) & (before < window)
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        return self.quantizer.encode(self.downsample(x.mT))
