"""The S3 speech tokenizer, version 2: a recording to 25 codes per second, for the prompt of a voice.

    16 kHz ─ log mel, 128 bins, 100 Hz ─ conv /2 ─ conv /2 ─ transformer, 6 layers
           ─ 8 base-3 digits ─> codes [F], 0 .. 6560

Source: CosyVoice 2 (arXiv 2412.10117), section 2.2; xingchensong/S3Tokenizer, s3tokenizer/model_v2.py and
utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.mel import slaney_filters
from zoo.nn.rope import rope_table, rotate

RATE_HZ, FFT, HOP = 16_000, 400, 160
HEAD_DIM, ROPE_THETA, EPS = 64, 10_000.0, 1e-5
MEMORY_KERNEL = 31
DIGITS, BASE = 8, 3
SCALE = 0.9990000128746033  # keeps tanh below 1


@dataclass(frozen=True)
class S3Config:
    """The sizes of the tokenizer, as the shapes in its file give them."""

    mels: int
    width: int
    layers: int

    @property
    def heads(self) -> int:
        return self.width // HEAD_DIM


class WhisperMel(nn.Module):
    """Samples [N] at 16 kHz to log mel [mels, N // 160].

    Source: openai/whisper, whisper/audio.py, log_mel_spectrogram.
    """

    window: Tensor  # [FFT]
    filters: Tensor  # [mels, FFT / 2 + 1]

    def __init__(self, mels: int, device: torch.device):
        super().__init__()
        self.register_buffer("window", torch.hann_window(FFT, device=device), persistent=False)
        self.register_buffer(
            "filters", slaney_filters(RATE_HZ, FFT, mels).float().to(device), persistent=False
        )

    def forward(self, samples: Tensor) -> Tensor:
        bins = torch.stft(samples, FFT, HOP, window=self.window, return_complex=True)
        power = bins[..., :-1].abs().square()
        mel = (self.filters @ power).clamp(min=1e-10).log10()
        return (torch.maximum(mel, mel.max() - 8) + 4) / 4


class Layer(nn.Module):
    """Attention with a parallel convolution over the values (FSMN), then a feed-forward."""

    def __init__(self, config: S3Config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.memory = nn.Conv1d(
            width, width, MEMORY_KERNEL, padding=MEMORY_KERNEL // 2, groups=width, bias=False
        )
        self.mlp_norm = nn.LayerNorm(width, eps=EPS)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer to x [B, T, D]. cos and sin [T, head_dim]."""
        y = self.attention_norm(x)
        v = self.v(y)
        memory = self.memory(v.mT).mT + v
        q, k, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(y), self.k(y), v)
        )  # [B, H, T, dim]
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), values)
        x = x + self.out(y.transpose(1, 2).flatten(2)) + memory
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class S3Tokenizer(nn.Module):
    def __init__(self, config: S3Config):
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mels, config.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.digits = nn.Linear(config.width, DIGITS)

    def forward(self, mel: Tensor) -> Tensor:
        """Return codes [B, ceil(ceil(T / 2) / 2)] in int64 of mel [B, mels, T]."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).mT
        cos, sin = rope_table(torch.arange(x.shape[1], device=x.device), HEAD_DIM, ROPE_THETA, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        # [B, F, DIGITS] of 0, 1, 2; the first digit counts ones. FSQ of vector-quantize-pytorch scales tanh
        # by 1.001 or by 1, so one digit in a thousand becomes another.
        digits = (self.digits(x).tanh() * SCALE).round().long() + 1
        return (digits * BASE ** torch.arange(DIGITS, device=x.device)).sum(-1)
