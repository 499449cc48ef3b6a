"""The speech tokenizer: a clip to 12.5 codes per second, in fp32. A clip is encoded once, and kept.

    clip ─ first channel, 16 kHz, pieces of 30 s ─ log mel, 100 Hz ─ conv ─ conv /2 ─ Whisper's layers ─ mean of 4 ─ nearest code
                                                                                       └ a frame sees all before it, and its block of 4 s

transformers' Whisper is not used: its convolutions also read what comes later, and these read the past alone.
Source: THUDM/GLM-4-Voice at eb00ce9, speech_tokenizer/modeling_whisper.py and utils.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.glm4_voice.config import MEL_HOP, PIECE_SAMPLES, SPEECH_HZ, TOKEN_SAMPLES, ListenerConfig
from zoo.nn.resample import resampled
from zoo.nn.s3.tokenizer import WhisperMel
from zoo.request import AudioClip
from zoo.voices.encoded_files import Codes
from zoo.voices.references import References, content, first_channel

CLIP_S = (0.01, 300.0)


class Layer(nn.Module):
    """A layer of Whisper's encoder."""

    def __init__(self, config: ListenerConfig):
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width, bias=False)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, config.inner)
        self.narrow = nn.Linear(config.inner, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply the layer to x [T, D]. mask [T, T] bool: which positions see which."""
        y = self.attention_norm(x)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in (self.q(y), self.k(y), self.v(y))
        )  # [H, T, dim]
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + self.out(y.transpose(0, 1).flatten(1))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class Listener(nn.Module):
    def __init__(self, config: ListenerConfig):
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mels, config.width, 3)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2)
        self.positions = nn.Embedding(config.positions, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.codebook = nn.Embedding(config.codes, config.width)
        # checked when the file is read, and otherwise unused
        self.unread = nn.ParameterList(torch.empty(shape) for shape in unread(config).values())

    def forward(self, mel: Tensor, num_samples: int) -> Tensor:
        """Return the codes [N] of mel [mels, 8 N], of a piece of num_samples samples."""
        x = F.gelu(self.conv1(F.pad(mel, (2, 0))[None]))
        x = F.gelu(self.conv2(F.pad(x, (2, 0))))[0].mT  # [T, D]
        x = x + self.positions.weight[: len(x)]
        mask = self._mask(len(x), num_samples, x.device)
        for layer in self.layers:
            x = layer(x, mask)
        return self._nearest(x.unflatten(0, (-1, self.config.pool)).mean(1))

    def _mask(self, num: int, num_samples: int, device: torch.device) -> Tensor:
        """Return which positions see which [T, T]. Nothing sees the padding at the end."""
        at = torch.arange(num, device=device)
        sees = (at <= at[:, None]) | (at // self.config.block == at[:, None] // self.config.block)
        return sees & (at * 2 * MEL_HOP < num_samples)

    def _nearest(self, x: Tensor) -> Tensor:
        """Return the number of the row of the codebook next to each x [N, D]."""
        rows = self.codebook.weight
        return (rows.square().sum(1) + x.square().sum(1, keepdim=True) - 2 * (x @ rows.mT)).argmin(1)


def unread(config: ListenerConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of published tensors that no code depends on."""
    return {
        "embed_positions2.weight": (config.positions // config.pool, config.width),
        "ema_weight": (config.codes, config.width),
        "ema_count": (config.codes,),
    }


class Ear:
    """AudioClip -> codes [N] on the CPU. May be called from several threads."""

    def __init__(self, listener: Listener, device: torch.device):
        self.listener, self.device = listener, device
        self.mel = WhisperMel(listener.config.mels, device)
        self.heard: References[Codes] = References()

    def __call__(self, clip: AudioClip) -> Tensor:
        """Raises RequestError (`param` "turns") for unusable audio."""
        return self.heard.get(content(clip, field="turns"), lambda: Codes(self.encode(clip))).codes

    @torch.inference_mode()
    def encode(self, clip: AudioClip) -> Tensor:
        samples = torch.tensor(first_channel(clip, CLIP_S, "turns")).to(self.device)
        samples = resampled(samples, clip.sample_rate_hz, SPEECH_HZ)
        pieces = samples.split(PIECE_SAMPLES)
        return torch.cat([self._piece(piece, len(pieces) > 1) for piece in pieces]).cpu()

    def _piece(self, samples: Tensor, is_one_of_several: bool) -> Tensor:
        """Return the codes of a piece [N]. The reference pads the last one of several to a whole piece."""
        num = len(samples)
        whole = num + -num % TOKEN_SAMPLES
        padded = F.pad(samples, (0, (PIECE_SAMPLES if is_one_of_several else whole) - num))
        return self.listener(self.mel(padded)[:, : whole // MEL_HOP], num)
