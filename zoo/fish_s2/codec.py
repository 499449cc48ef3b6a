"""The codec, a modified DAC. Its decoder turns frames of 10 codes (46.4 ms) into 44.1 kHz samples. The
samples do not depend on how the frames are split into calls.

    codes ─ codebooks ─ transformer ─ upsample x2 x2 ─ conv ─ x8 ─ x8 ─ x4 ─ x2 ─ conv ─ tanh ─ samples
  [B, F, K]   1024       8 layers          1024        1536  768  384  192   96     1         [B, 2048 F]
                         21.5 Hz         43, 86 Hz           0.7  5.5   22   44    kHz

The state of a stream is one row of `state_size` values: the ends of the layers' inputs and the last 127 keys
and values. A new stream starts with zeros.
Sources: facts of vllm-omni 0.30.0, model_executor/models/fish_speech; Kumar et al. 2023 (arXiv 2306.06546).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.fish_s2.config import CodecConfig
from zoo.fish_s2.encoder import Codebook, Encoder
from zoo.fish_s2.layers import DILATIONS, KERNEL, Residual, Transformer, transformers
from zoo.nn.conv import CodecState, StateLayout, to_rows
from zoo.nn.convnext import Upsample
from zoo.nn.residual import (
    Identity,
    SnakeConv1d,
    UpBlock,
    convolve_snake,
)
from zoo.nn.snake import Snake


class Block(UpBlock):
    """An upsampling block with three residual units: [B, C, N] -> [B, C / 2, rate N]."""

    def __init__(self, channels: int, rate: int):
        units = (Residual(channels // 2, dilation) for dilation in DILATIONS)
        super().__init__(Snake(channels), channels, rate, units)


class Decoder(nn.Module):
    """Decodes codes to samples, in the dtype of its weights."""

    # set by Codec.prepare()
    table: Tensor  # [rows of all codebooks, C], the latent vector of each code
    first: Tensor  # [K], each codebook's first row in the table
    last: Tensor  # [K], each codebook's greatest code

    def __init__(self, config: CodecConfig):
        super().__init__()
        channels, last = config.decoder_channels, config.decoder_channels >> len(config.rates)
        self.config = config
        self.post = Transformer(config.post)
        self.upsample = nn.ModuleList(Upsample(config.latent, ratio) for ratio in reversed(config.ratios))
        self.stem = SnakeConv1d(config.latent, channels, KERNEL)
        self.blocks = nn.ModuleList(Block(channels >> i, rate) for i, rate in enumerate(config.rates))
        self.snake = Snake(last)
        self.tail = SnakeConv1d(last, 1, KERNEL)
        self.layout = StateLayout(self)

    @property
    def state_size(self) -> int:
        """Number of values that one stream carries from call to call."""
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.weight.dtype

    def to_rows(self, dtype: torch.dtype) -> None:
        """Compute the convolutions of the blocks and the one before over rows in `dtype`. Snakes, biases, the
        last convolution, a stream's state and all layers before stay in fp32."""
        to_rows((self.stem, self.blocks), dtype)

    def forward(self, codes: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """Decode codes [B, F, K] int64 to samples [B, F * frame_samples] in [-1, 1].

        start [B]: frames decoded in earlier calls. state: of these streams, zeros for a new one, and how many
        of the F frames are valid; ignore the samples of the others. The LM's heads are wider than the
        codebooks: a code beyond its codebook becomes the last one.
        """
        at = codes.clamp(min=0).minimum(self.last) + self.first
        x = self.post(F.embedding(at, self.table).sum(2).mT, start, state)
        for upsample in self.upsample:
            x = upsample(x, state)
        x = convolve_snake(x, Identity(), self.stem, state)
        for block in self.blocks:
            x = block(x, state)
        return convolve_snake(x, self.snake, self.tail, state).squeeze(1).tanh()


class Codec(nn.Module):
    """The modules of codec.pth."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.codebooks = nn.ModuleList(
            Codebook(size, config.codebook_dim, config.latent) for size in config.codebook_sizes
        )
        self.decoder = Decoder(config)

    @torch.no_grad()
    def prepare(self) -> None:
        """Precompute the tensors that depend only on the weights. Call this once after loading them."""
        for transformer in transformers(self):
            transformer.prepare()
        sizes = torch.tensor(self.config.codebook_sizes, device=self.decoder.tail.bias.device)
        table = torch.cat([part.table() for part in self.modules() if isinstance(part, Codebook)])
        for name, value in (("table", table), ("first", sizes.cumsum(0) - sizes), ("last", sizes - 1)):
            self.decoder.register_buffer(name, value, persistent=False)

    def encode(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] at 44.1 kHz to codes [B, F, K]."""
        residual, codes = self.encoder(samples), []
        for codebook in self.codebooks:
            found, latent = codebook(residual)
            codes.append(found)
            residual = residual - latent
        return torch.stack(codes, -1)
