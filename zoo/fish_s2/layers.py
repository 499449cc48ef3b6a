"""Causal layers that the codec's encoder and decoder share. They read and write a stream's past in a
`CodecState`. The encoder passes a whole recording as a stream of one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from zoo.fish_s2.block import rope_table, rotate, turns
from zoo.fish_s2.config import TransformerConfig
from zoo.nn.conv import CodecState
from zoo.nn.linear import SwiGLU
from zoo.nn.norm import RMSNorm
from zoo.nn.residual import ResidualUnit
from zoo.nn.snake import Snake
from zoo.nn.window_attention import WindowLayer, run_window

DILATIONS = (1, 3, 9)  # one per residual unit of a block
KERNEL = 7  # for every convolution that is wider than 1 and not strided
EPS, ROPE_THETA = 1e-5, 10_000.0  # of the transformers


class Residual(ResidualUnit):
    """A residual unit: [B, C, N] -> [B, C, N]."""

    def __init__(self, channels: int, dilation: int):
        super().__init__(channels, KERNEL, dilation, Snake)


class Layer(WindowLayer):
    """A layer of the codec's transformers."""

    is_paired = True
    rotate = staticmethod(rotate)

    def __init__(self, config: TransformerConfig):
        norm, mlp = partial(RMSNorm, config.width, EPS), SwiGLU(config.width, config.inner)
        heads = config.width // config.head_dim
        super().__init__(config.width, heads, config.head_dim, config.window, norm, mlp)


class WholeLayer(Layer):
    """The same over a whole recording."""

    is_stacked = False


class Transformer(nn.Module):
    """The sliding-window transformer, [B, D, N] -> [B, D, N]. Positions count from the start of the
    stream."""

    rope: Tensor  # [positions, 2, dim / 2] bf16, set by prepare()

    def __init__(self, config: TransformerConfig, layer: type[Layer] = Layer):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, EPS)

    def prepare(self) -> None:
        c, device = self.config, self.norm.weight.device
        self.register_buffer(
            "rope", rope_table(c.max_positions, c.head_dim, ROPE_THETA, device), persistent=False
        )

    def forward(self, x: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """x [B, D, N] -> [B, D, N]; start [B] is the number of positions in earlier calls."""
        x = x.mT
        rotary = turns(self.rope[start[:, None] + torch.arange(x.shape[1], device=x.device)])
        return run_window(self.layers, self.norm, x, rotary, start, state).mT


def transformers(module: nn.Module) -> Iterator[Transformer]:
    return (part for part in module.modules() if isinstance(part, Transformer))
