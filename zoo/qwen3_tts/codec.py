"""The 12 Hz codec. Its decoder turns frames of 16 codes (80 ms) into 24 kHz samples. The samples do not
depend on how the frames are split into calls.

    codes [B, F, K] ─ codebooks ─ conv ─ transformer ─ upsample x2 x2 ─ conv ─ x8 ─ x5 ─ x4 ─ x3 ─ conv ─ samples [B, 1920 F]
                        512       1024   8 layers          1024         1536  768  384  192   96     1     channels
                                         12.5 Hz          25, 50 Hz           0.4   2    8    24  kHz

Every layer is causal. The state of a stream is one row of `state_size` values: the ends of the layers' inputs
and the last 71 keys and values. A new stream starts with zeros.
Source: QwenLM/Qwen3-TTS, qwen_tts/core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py. The streaming there
(300 frames with 25 of context) is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zoo.checkpoint.config import CODEBOOKS, MAX_WIDTH, RATE_HZ, STRIDE, VOCABULARY, WIDTH, ConfigBlock
from zoo.checkpoint.stack import StackConfig
from zoo.nn.conv import CodecState, StateLayout, reach, to_rows
from zoo.nn.convnext import Upsample
from zoo.nn.linear import SwiGLU
from zoo.nn.mimi_encoder import Encoder
from zoo.nn.norm import RMSNorm
from zoo.nn.residual import (
    Identity,
    ResidualUnit,
    SnakeConv1d,
    UpBlock,
    convolve_snake,
)
from zoo.nn.rope import rope_table
from zoo.nn.snake import SnakeBeta
from zoo.nn.vq import SplitVQ
from zoo.nn.window_attention import WindowLayer, run_window
from zoo.qwen3_tts.config import qwen3_stack
from zoo.qwen3_tts.encoder import CODEC_FILE, EncoderConfig

WINDOW = (1, 1024)  # frames; every layer keeps this many keys and values per stream
DILATIONS = (1, 3, 9)  # one per residual unit of a block
KERNEL = 7  # for every convolution that is wider than 1 and not described in the checkpoint's config


@dataclass(frozen=True)
class DecoderConfig:
    codebooks: int
    codebook_size: int
    codebook_width: int  # of the latent that the codebooks sum to; a codebook row is half as wide
    latent: int  # channels around the transformer
    transformer: StackConfig
    window: int  # frames that a frame attends to, including itself
    ratios: tuple[int, ...]  # upsampling after the transformer
    channels: int  # of the first block; each block halves them
    rates: tuple[int, ...]  # upsampling of the blocks
    rate_hz: int

    @property
    def frame_samples(self) -> int:
        return prod(self.ratios + self.rates)

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DecoderConfig:
        """Read the decoder's part of the codec's config.json. Raises ValueError for a missing, out-of-range
        or unsupported value."""
        root = ConfigBlock(config, file=CODEC_FILE)
        block = root.block("decoder_config")
        rates = block.integers("upsample_rates", *STRIDE)
        read = cls(
            codebooks=block.integer("num_quantizers", *CODEBOOKS),
            codebook_size=block.integer("codebook_size", *VOCABULARY),
            codebook_width=block.integer("codebook_dim", *WIDTH, step=2),
            latent=block.integer("latent_dim", *WIDTH),
            transformer=qwen3_stack(block),
            window=block.integer("sliding_window", *WINDOW),
            ratios=block.integers("upsampling_ratios", *STRIDE),
            channels=block.integer("decoder_dim", 1 << len(rates), MAX_WIDTH),
            rates=rates,
            rate_hz=root.integer("output_sample_rate", *RATE_HZ),
        )
        root.expect_product("decode_upsample_rate", read.frame_samples)
        if read.transformer.heads != read.transformer.kv_heads:
            known = f"only num_attention_heads, {read.transformer.heads}, is supported"
            raise block.refuse("num_key_value_heads", known)
        return read


class Transformer(nn.Module):
    """The sliding-window transformer, [B, F, C] -> [B, F, C]. Positions count from the start of the
    stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        stack = config.transformer
        self.config = stack
        self.input = nn.Linear(config.latent, stack.hidden)
        norm = partial(RMSNorm, stack.hidden, stack.eps)
        sizes = stack.hidden, stack.heads, stack.head_dim, config.window
        mlps = (SwiGLU(stack.hidden, stack.inner) for _ in range(stack.layers))
        self.layers = nn.ModuleList(WindowLayer(*sizes, norm, mlp) for mlp in mlps)
        self.norm = norm()
        self.output = nn.Linear(stack.hidden, config.latent)

    def forward(self, x: Tensor, start: Tensor, state: CodecState) -> Tensor:
        frame = torch.arange(x.shape[1], device=x.device)
        rotary = rope_table(start[:, None] + frame, self.config.head_dim, self.config.rope_theta, x.dtype)
        return self.output(run_window(self.layers, self.norm, self.input(x), rotary, start, state))


class Block(UpBlock):
    """An upsampling block with three residual units: [B, C, N] -> [B, C / 2, rate N]."""

    def __init__(self, channels: int, rate: int):
        half = channels // 2
        units = (ResidualUnit(half, KERNEL, dilation, SnakeBeta) for dilation in DILATIONS)
        super().__init__(SnakeBeta(channels), channels, rate, units)


class Decoder(nn.Module):
    """Decodes codes to samples, in the dtype of its weights. Call `prepare` once after loading them."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        width, last = config.codebook_width, config.channels >> len(config.rates)
        self.quantizer = SplitVQ(config.codebooks, config.codebooks, config.codebook_size, width // 2, width)
        self.conv = SnakeConv1d(width, config.latent, 3)
        self.transformer = Transformer(config)
        self.upsample = nn.ModuleList(Upsample(config.latent, ratio) for ratio in config.ratios)
        self.stem = SnakeConv1d(config.latent, config.channels, KERNEL)
        self.blocks = nn.ModuleList(Block(config.channels >> i, rate) for i, rate in enumerate(config.rates))
        self.snake = SnakeBeta(last)
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

    def prepare(self) -> None:
        """Precompute the tensors that depend only on the weights."""
        for module in self.modules():
            if isinstance(module, SnakeBeta | SplitVQ):
                module.prepare()

    def forward(self, codes: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """Decode codes [B, F, K] int64 to samples [B, F * frame_samples] in [-1, 1].

        start [B]: frames decoded in earlier calls. state: of these streams, zeros for a new one, and how many
        of the F frames are valid; ignore the samples of the others.
        """
        return self._speak(self._read(codes, start, state), state)

    def prime(self, codes: Tensor) -> Tensor:
        """Return the states [B, state_size] of streams that have already spoken codes [B, F, K].

        No samples are made. Nearly all of the work is in the convolutions after the transformer, and they run
        only on the last `reach` frames.
        """
        start = codes.new_zeros(codes.shape[0])
        rows = codes.new_zeros(codes.shape[0], self.state_size, dtype=self.dtype)
        state = CodecState(self.layout, rows, codes.shape[1], start + codes.shape[1])
        x = self._read(codes, start, state)[:, :, -self.reach :]
        state.frames, state.count = x.shape[2], start + x.shape[2]
        self._speak(x, state)
        return state.next()

    @property
    def reach(self) -> int:
        """Number of frames that the convolutions after the transformer look back from the start of a new
        frame."""
        parts = (*self.upsample, self.stem, *self.blocks, self.tail)
        return reach(layer for part in parts for layer in part.modules())

    def _read(self, codes: Tensor, start: Tensor, state: CodecState) -> Tensor:
        """Return the latent [B, C, F] at the frame rate."""
        x = convolve_snake(self.quantizer.decode(codes), Identity(), self.conv, state)
        return self.transformer(x.mT, start, state).mT

    def _speak(self, x: Tensor, state: CodecState) -> Tensor:
        """Return samples [B, F * frame_samples]."""
        for upsample in self.upsample:
            x = upsample(x, state)
        x = convolve_snake(x, Identity(), self.stem, state)
        for block in self.blocks:
            x = block(x, state)
        x = convolve_snake(x, self.snake, self.tail, state)  # [B, 1, N]
        return x.squeeze(1).clamp(-1, 1)


class Codec(nn.Module):
    """The modules of speech_tokenizer/model.safetensors: the decoder, and the encoder for references."""

    def __init__(self, decoder: DecoderConfig, encoder: EncoderConfig):
        super().__init__()
        self.decoder = Decoder(decoder)
        # The reference applies the window of its attention only with FlashAttention.
        self.encoder: Encoder | None = Encoder(encoder, decoder.rate_hz, is_windowed=False)
