"""The ear: a clip to 12.5 rows per second that the language model reads, in fp32. A clip is encoded once, and kept.

    clip ─ first channel, 16 kHz, pieces of 25 s ─ log mel, 100 Hz ─ conv ─ conv /2 ─ Whisper's layers ─ mean of 2 ─ norm
                                                                                                            │ 25 Hz
                                                rows of the language model <── two linear layers ── conv /2 ┘

The encoder is Qwen2-Audio's, and its modules are transformers'. Each piece is encoded separately, as the
reference does with a single clip. So its rows depend neither on other clips nor on earlier turns.
Source: stepfun-ai/Step-Audio2 at 7c58630, utils.py; modeling_step_audio_2.py; transformers 5.23, models/qwen2_audio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.deferred import Deferred, Shape, scratch
from zoo.nn.resample import resampled
from zoo.nn.s3.tokenizer import WhisperMel
from zoo.request import AudioClip
from zoo.step_audio2.config import ADAPTOR_INNER, PIECE_SAMPLES, SPEECH_HZ, ListenerConfig
from zoo.voices.references import References, content, first_channel

PACKAGES = ("transformers.models.qwen2_audio.modeling_qwen2_audio",)
CLIP_S = (0.01, 1200.0)
PADDING = 479  # zeros behind a piece
KERNEL = 3
MLP = 4  # times the width
PEAK_WIDTH = 8  # values per position and channel that a layer needs


class Encoder(Deferred):
    def __init__(self, config: ListenerConfig):
        super().__init__(shapes(config))
        self.config = config

    def build(self) -> nn.Module:
        from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig
        from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

        config = self.config
        return Qwen2AudioEncoder(
            Qwen2AudioEncoderConfig(
                num_mel_bins=config.mels,
                encoder_layers=config.layers,
                encoder_attention_heads=config.heads,
                encoder_ffn_dim=MLP * config.width,
                d_model=config.width,
                max_source_positions=config.positions,
            )
        )

    def forward(self, mel: Tensor) -> Tensor:
        """Return 25 rows per second [N, D] of mel [mels, T], whose last frame nothing attends to."""
        num = (mel.shape[1] + 1) // 2
        if mel.is_meta:
            scratch(PEAK_WIDTH * self.config.width * num, mel)
            return mel.new_empty(num // 2, self.config.width)
        module: Any = self.module
        x = F.gelu(module.conv2(F.gelu(module.conv1(mel[None])))).mT + module.embed_positions.weight[:num]
        mask = torch.zeros(num, dtype=x.dtype, device=x.device)
        mask[-1] = -1e10
        for layer in module.layers:
            made = layer(x, mask.expand(1, 1, num, num))
            x = made[0] if isinstance(made, tuple) else made
        return module.layer_norm(module.avg_pooler(x.mT)[0].mT)


def shapes(config: ListenerConfig) -> dict[str, Shape]:
    """Return the shapes of the encoder's tensors, by transformers' names."""
    width, inner = config.width, MLP * config.width
    found: dict[str, Shape] = {
        "conv1.weight": (width, config.mels, KERNEL),
        "conv1.bias": (width,),
        "conv2.weight": (width, width, KERNEL),
        "conv2.bias": (width,),
        "embed_positions.weight": (config.positions, width),
        "layer_norm.weight": (width,),
        "layer_norm.bias": (width,),
    }
    for i in range(config.layers):
        layer = f"layers.{i}"
        for part in ["q", "k", "v", "out"]:
            found[f"{layer}.self_attn.{part}_proj.weight"] = (width, width)
            if part != "k":
                found[f"{layer}.self_attn.{part}_proj.bias"] = (width,)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            found |= {f"{layer}.{norm}.weight": (width,), f"{layer}.{norm}.bias": (width,)}
        found |= {f"{layer}.fc1.weight": (inner, width), f"{layer}.fc1.bias": (inner,)}
        found |= {f"{layer}.fc2.weight": (width, inner), f"{layer}.fc2.bias": (width,)}
    return found


class Adaptor(nn.Module):
    def __init__(self, config: ListenerConfig):
        super().__init__()
        self.conv = nn.Conv1d(config.width, config.width, KERNEL, stride=2, padding=1)
        self.linear1 = nn.Linear(config.width, ADAPTOR_INNER)
        self.linear2 = nn.Linear(ADAPTOR_INNER, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] at 25 Hz -> [ceil(N / 2), hidden]"""
        return self.linear2(F.relu(self.linear1(F.gelu(self.conv(x.mT[None]))[0].mT)))


class Listener(nn.Module):
    def __init__(self, config: ListenerConfig):
        super().__init__()
        self.config = config
        self.encoder, self.adaptor = Encoder(config), Adaptor(config)

    def forward(self, mel: Tensor) -> Tensor:
        """mel [mels, T] -> rows [`num_rows(T)`, hidden]"""
        num = num_rows(mel.shape[1])
        return self.adaptor(self.encoder(mel))[:num]


def num_rows(frames: int) -> int:
    """Return the number of rows of a piece of `frames` mel frames."""
    return max(0, ((frames - 1) // 2 // 2 - 1) // 2 + 1)


@dataclass(frozen=True)
class Heard:
    """The rows of each piece of a clip, [N, hidden] each."""

    name: bytes  # equal for equal clips
    pieces: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Ear:
    """AudioClip -> Heard. May be called from several threads."""

    def __init__(self, listener: Listener, device: torch.device):
        self.listener, self.device = listener, device
        self.mel = WhisperMel(listener.config.mels, device)
        self.heard: References[Heard] = References()

    def __call__(self, clip: AudioClip) -> Heard:
        """Raises RequestError (`param` "turns") for unusable audio."""
        name = content(clip, field="turns")
        return self.heard.get(name, lambda: Heard(name, self.encode(clip)))

    @torch.inference_mode()
    def encode(self, clip: AudioClip) -> tuple[Tensor, ...]:
        samples = torch.tensor(first_channel(clip, CLIP_S, "turns")).to(self.device)
        samples = resampled(samples, clip.sample_rate_hz, SPEECH_HZ)
        return tuple(
            self.listener(self.mel(F.pad(piece, (0, PADDING)))) for piece in samples.split(PIECE_SAMPLES)
        )
