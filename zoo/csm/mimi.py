"""Mimi's decoder: codes to 24 kHz samples, exactly, for any chunking of the frames.

    codes [B, F, K] ─ codebooks ─ upsample x2 ─ transformer ─ conv ─ x8 ─ x6 ─ x5 ─ x4 ─ conv ─ samples [B, 1920 F]
                        512          512         8 layers     1024   512  256  128   64    1     channels
                       12.5 Hz       25 Hz                           0.2  1.2   6    24   kHz

All layers are causal. The past of a stream is one row of `state_size` values, zeros for a new stream: the
ends of the layers' inputs, and the last 249 keys and values. Source: transformers 5.23,
models/mimi/modeling_mimi.py, whose own decoder keeps no past of its convolutions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from zoo.nn.conv import CausalConvTranspose1d, CodecState, StateLayout
from zoo.nn.mimi import RESAMPLE, MimiConfig
from zoo.nn.residual import (
    Elu,
    Identity,
    SnakeConv1d,
    SnakeConvTranspose1d,
    convolve_snake,
    residual_unit,
    upsample_snake,
)
from zoo.nn.rope import rope_table
from zoo.nn.vq import SplitVQ
from zoo.nn.window_attention import GeluMLP, WindowLayer, run_window

ELU = Elu()


class Residual(nn.Module):
    """x [B, C, N] -> [B, C, N]"""

    def __init__(self, channels: int, config: MimiConfig):
        super().__init__()
        middle = channels // config.compress
        self.conv1 = SnakeConv1d(channels, middle, config.residual_kernel)
        self.conv2 = SnakeConv1d(middle, channels, 1)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return residual_unit(x, ELU, self.conv1, ELU, self.conv2, state)


class Block(nn.Module):
    """An upsampling and a residual unit: [B, C, N] -> [B, C / 2, rate N]."""

    def __init__(self, channels: int, rate: int, config: MimiConfig):
        super().__init__()
        self.up = SnakeConvTranspose1d(channels, channels // 2, 2 * rate, rate)
        self.residual = Residual(channels // 2, config)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return self.residual(upsample_snake(x, ELU, self.up, state), state)


class Decoder(nn.Module):
    """Decodes codes to samples, in the dtype of its weights. Call `prepare` once after loading them."""

    def __init__(self, config: MimiConfig):
        super().__init__()
        self.config = config
        hidden, filters = config.hidden, config.filters
        rates = config.strides[::-1]
        self.quantizer = SplitVQ(
            config.codebooks, config.used, config.codebook_size, config.codebook_dim, hidden
        )
        self.upsample = CausalConvTranspose1d(
            hidden, hidden, 2 * RESAMPLE, RESAMPLE, groups=hidden, bias=False
        )
        norm = partial(nn.LayerNorm, hidden, config.eps)
        sizes = hidden, config.heads, config.head_dim, config.window
        mlps = (GeluMLP(hidden, config.inner) for _ in range(config.layers))
        self.layers = nn.ModuleList(WindowLayer(*sizes, norm, mlp) for mlp in mlps)
        widest = filters << len(rates)
        self.stem = SnakeConv1d(hidden, widest, config.kernel)
        self.blocks = nn.ModuleList(Block(widest >> i, rate, config) for i, rate in enumerate(rates))
        self.tail = SnakeConv1d(filters, 1, config.last_kernel)
        self.layout = StateLayout(self)

    @property
    def state_size(self) -> int:
        """Number of values that one stream carries from call to call."""
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.weight.dtype

    def prepare(self) -> None:
        """Precompute the tensors that depend only on the weights."""
        self.quantizer.prepare()

    def forward(self, codes: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """Decode codes [B, F, K] int64 to samples [B, F * frame_samples].

        start [B]: frames decoded in earlier calls. state: of these streams, zeros for a new one, and how many
        of the F frames are valid; ignore the samples of the others. Codes that the codec does not have, which
        the LM can draw, become its last one.
        """
        x = self.quantizer.decode(codes.clamp(max=self.config.codebook_size - 1))
        x = self._transform(self.upsample(x, state).mT, RESAMPLE * start, state).mT
        x = convolve_snake(x, Identity(), self.stem, state)
        for block in self.blocks:
            x = block(x, state)
        return convolve_snake(x, ELU, self.tail, state).squeeze(1)

    def _transform(self, x: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """x [B, N, D], at positions from `start` [B] of the stream -> [B, N, D]"""
        c = self.config
        at = start[:, None] + torch.arange(x.shape[1], device=x.device)
        rotary = rope_table(at, c.head_dim, c.rope_theta, x.dtype)  # [B, N, dim] each
        return run_window(self.layers, None, x, rotary, start, state)
