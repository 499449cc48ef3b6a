"""Train the decoder: from codes to the samples that `vocoder` makes of the same speech.

The module is `zoo.qwen3_tts.codec.Decoder` itself, with replacements that can be trained: a state of zeros,
and activations and codebooks with a gradient. They compute the same function (tests/train_a_voice). Codes and
samples lie in the device's memory and may still grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train_a_voice import vocoder
from train_a_voice.codes import Codebooks
from train_a_voice.features import FRAME, RATE_HZ, TOP_HZ
from train_a_voice.sprint import Clock, Log, Losses, Step, optimiser_of, run
from train_a_voice.track import Features
from zoo.nn.conv import CausalConv1d, CausalConvTranspose1d, CodecState, Stateful
from zoo.nn.convnext import ConvNeXt
from zoo.nn.linear import SwiGLU
from zoo.nn.norm import RMSNorm
from zoo.nn.snake import SnakeBeta
from zoo.nn.window_attention import WindowLayer
from zoo.qwen3_tts.codec import Decoder

SKIP = 2  # frames at the start of a crop that are not scored, because they lack their past
# Coefficients of t^2k whose sum is sin(pi t)^2 to 4e-7 for t from -1/2 to 1/2: a least-squares fit
SINE = (3.946088e-07, 9.869490177882, -32.464328710517, 42.635810767153, -29.395246060075, 10.535552813831)
SCALES = ((1024, 240), (512, 120), (256, 60))  # window and hop of the loss, samples


class Fresh(CodecState):
    """A state in which every stream of codes [B, F, K] begins."""

    def __init__(self, codes: Tensor):
        self.frames = codes.shape[1]
        self.count = codes.new_full((len(codes),), self.frames)

    def extend(self, layer: Stateful, x: Tensor, kept: Tensor | None = None) -> Tensor:
        before = layer.state_length
        return F.pad(x, (0, 0, before, 0) if layer.state_dim == 1 else (before, 0))


class Ripple(SnakeBeta):
    """Snake with a gradient: the same function and parameters. zoo.nn.snake's operator has no gradient.

    On a CPU the square of the sine is a polynomial, because sine and cosine take 1.6 times as long."""

    def __init__(self, snake: SnakeBeta):
        nn.Module.__init__(self)
        self.alpha, self.beta = snake.alpha, snake.beta

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return x + (x * self.alpha.exp()[:, None]).sin().square() / (self.beta.exp()[:, None] + 1e-9)
        turns = x * (self.alpha.exp() / math.pi)[:, None]
        square = (turns - turns.round()).square()
        ripple = torch.full_like(square, SINE[-1])
        for factor in SINE[-2::-1]:
            ripple = ripple * square + factor
        return x + ripple / (self.beta.exp()[:, None] + 1e-9)


def trainable(decoder: Decoder) -> Decoder:
    for module in list(decoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, SnakeBeta):
                setattr(module, name, Ripple(child))
    return decoder


def samples(decoder: Decoder, codes: Tensor) -> Tensor:
    """Return samples [B, F * FRAME] of codes [B, F, K], unclamped: a clamp has no gradient at its limits."""
    quantizer = decoder.quantizer
    quantizer.table = quantizer.sums.unflatten(0, (len(quantizer.parts), -1))  # usage is one
    state, start = Fresh(codes), codes.new_zeros(codes.shape[0])
    x = decoder._read(codes, start, state)
    for upsample in decoder.upsample:
        x = upsample(x, state)
    x = decoder.stem(x, state)
    for block in decoder.blocks:
        x = block(x, state)
    return decoder.tail(decoder.snake(x), state).squeeze(1)


# --- initialisation ---


@torch.no_grad()
def initialise(decoder: Decoder, codebooks: Codebooks) -> None:
    """Initialise with PyTorch's defaults, small residual branches, and codebooks that hold the codes'
    meanings.

    Gains that keep each layer's loudness were tried: with Snake, training diverges."""
    for module in decoder.modules():
        if isinstance(module, CausalConv1d | CausalConvTranspose1d | nn.Linear | nn.Conv1d):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                bound = module.weight[0].numel() ** -0.5
                nn.init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, SnakeBeta):
            nn.init.zeros_(module.alpha)
            nn.init.zeros_(module.beta)
        elif isinstance(module, RMSNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, WindowLayer):
            assert isinstance(module.mlp, SwiGLU), f"a layer has the MLP {module.mlp}"
            for matrix in (module.qkv.weight, module.mlp.gate_up.weight):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
            nn.init.constant_(module.attention_scale, 0.1)
            nn.init.constant_(module.mlp_scale, 0.1)
        if isinstance(module, ConvNeXt):
            nn.init.constant_(module.scale, 0.1)
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)
    quantizer = decoder.quantizer
    nn.init.ones_(quantizer.usage)
    quantizer.usage.requires_grad_(False)
    quantizer.sums.copy_(codebooks.meanings(quantizer.sums.shape[1]).flatten(0, 1))
    # all levels belong to one sum, so they are projected in the same way
    quantizer.rest_out.weight.copy_(quantizer.first_out.weight)


# --- the loss ---


@dataclass(frozen=True)
class Scale:
    """One spectrogram of the loss."""

    size: int
    hop: int
    window: Tensor  # [size]
    bands: Tensor  # [bins, bands], rows up to TOP_HZ
    spread: Tensor  # [bands, bins]

    @classmethod
    def make(cls, size: int, hop: int) -> Scale:
        bins_hz = torch.arange(size // 2 + 1) * RATE_HZ / size
        num = max(12, size // 16)
        top = 2595 * math.log10(1 + TOP_HZ / 700)
        corners = 700 * (10 ** (torch.linspace(0, top, num + 2) / 2595) - 1)
        middle, half = corners[1:-1], (corners[2:] - corners[:-2]).clamp(min=2.5 * RATE_HZ / size) / 2
        bands = (1 - (bins_hz[:, None] - middle).abs() / half).clamp(min=0)
        keep = int(TOP_HZ * size / RATE_HZ) + 1
        bands = bands[:keep] / bands[:keep].sum(0)
        spread = bands.T / bands.sum(1).clamp(min=1e-6)
        return cls(size, hop, torch.hann_window(size), bands, spread)

    def to(self, device: torch.device) -> Scale:
        tensors = (x.to(device) for x in (self.window, self.bands, self.spread))
        return Scale(self.size, self.hop, *tensors)

    def spectrum(self, x: Tensor) -> Tensor:
        """Return the complex spectrum [B, frames, bins up to TOP_HZ] of x [B, N]."""
        parts = x.unfold(1, self.size, self.hop) * self.window
        return torch.fft.rfft(parts)[..., : len(self.bands)] / self.window.sum() * 2

    def losses(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far x is from the target: spectra relative to the band's loudness, and levels in
        nats."""
        spectrum = self.spectrum(x)
        with torch.no_grad():
            goal = self.spectrum(target)
            goal_bands = (abs_square(goal) @ self.bands).sqrt()
            weight = 1 / (goal_bands @ self.spread + 2e-4)
        error = abs_square(spectrum - goal)
        far = ((error + 1e-9).sqrt() * weight).mean()
        bands = (abs_square(spectrum) @ self.bands + 1e-9).sqrt()
        level = ((bands + 2e-4).log() - (goal_bands + 2e-4).log()).abs().mean()
        return far, level


def abs_square(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square()


class Loss(nn.Module):
    def __init__(self, level_weight: float = 0.5):
        super().__init__()
        self.scales = [Scale.make(*scale) for scale in SCALES]
        self.level_weight = level_weight

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss and its two parts for x and target [B, N]."""
        x, target = x[:, SKIP * FRAME :], target[:, SKIP * FRAME :]
        far, level = torch.stack([torch.stack(scale.losses(x, target)) for scale in self.scales]).mean(0)
        return far + self.level_weight * level, far.detach(), level.detach()


# --- the data ---


def target(found: Features, codebooks: Codebooks) -> np.ndarray:
    """Return int16 samples [T * FRAME]: the true mel spectrogram with the codes' pitch and voicing."""
    shapes = codebooks.shapes.numpy()
    shape = (found.voicing @ shapes.T - (shapes**2).sum(1) / 2).argmax(1)
    return to_int16(vocoder.speak(found.mel, found.cycles, shapes[shape], found.speaker))


def to_int16(samples: np.ndarray) -> np.ndarray:
    return (np.clip(samples, -1, 1) * 32767).astype("<i2")


@dataclass(frozen=True)
class Plan:
    peak: float = 1.5e-3
    warmup: int = 150
    batch: int = 32
    frames: int = 18
    coarse: float = 0.3  # share of crops in which the last levels add nothing, as for a talker that is unsure
    room: int = 400_000  # frames
    dtype: torch.dtype = torch.bfloat16  # of convolutions and matrix products
    log_s: float = 5.0
    is_compiled: bool = False


# A step takes .8 s of a core, or .4 s compiled.
ON_CPU: dict[str, Any] = {"peak": 1e-3, "warmup": 80, "batch": 4, "frames": 16, "log_s": 30.0}


class Sounds:
    """Concatenated frames of codes and samples, with room for more."""

    def __init__(self, plan: Plan, codebooks: Codebooks, device: torch.device):
        self.codes = torch.zeros(plan.room, codebooks.count, dtype=torch.int16, device=device)
        self.short = codebooks.mel.square().sum(2).argmin(1).to(device)  # [levels], the code that adds least
        self.coarse = plan.coarse
        self.wave = torch.zeros(plan.room, FRAME, dtype=torch.int16, device=device)
        self.num = 0
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # `num` on the device

    def add(self, codes: np.ndarray, wave: np.ndarray) -> None:
        """Add codes [T, K] and int16 wave [T * FRAME], as far as there is room."""
        num = min(len(codes), len(self.codes) - self.num)
        into = slice(self.num, self.num + num)
        self.codes[into] = torch.from_numpy(codes[:num]).to(self.codes.device)
        self.wave[into] = torch.from_numpy(wave.reshape(-1, FRAME)[:num].copy()).to(self.wave.device)
        self.num += num
        self.count.fill_(self.num)

    def crop(self, batch: int, frames: int) -> tuple[Tensor, Tensor]:
        """Return codes [B, F, K] and samples [B, F * FRAME] of crops at random positions."""
        starts = (torch.rand(batch, device=self.codes.device) * (self.count - frames)).long()
        at = starts[:, None] + torch.arange(frames, device=starts.device)
        codes = self.codes[at].long()
        levels = torch.arange(len(self.short), device=at.device)
        draws = torch.rand(2, batch, 1, 1, device=at.device)
        kept = (2 + draws[0] * (len(levels) - 2)).floor()  # number of levels that are kept, from two on
        is_short = (draws[1] < self.coarse) & (levels >= kept)  # [B, 1, levels]
        codes[..., :-1] = torch.where(is_short, self.short, codes[..., :-1])
        return codes, self.wave[at].flatten(1).float() / 32768


# --- the run ---


def train(
    decoder: Decoder,
    codebooks: Codebooks,
    sounds: Sounds,
    plan: Plan,
    clock: Clock,
    log: Log,
    path: Path,
    grow: Callable[[Sounds], bool],
    *,
    records: bool = True,
    begin: Callable[[], None] = lambda: None,
    most_steps: int | None = None,
) -> int:
    """Train until the clock ends. Return the number of steps. grow: adds new sounds when called."""
    device = sounds.codes.device
    trainable(decoder)
    initialise(decoder, codebooks)
    begin()
    decoder.to(device)
    optimiser = optimiser_of([p for p in decoder.parameters() if p.requires_grad], device, 0.0)
    measure = Loss().to(device)
    measure.scales = [scale.to(device) for scale in measure.scales]
    forward = torch.compile(samples, dynamic=False) if plan.is_compiled else samples

    def compute() -> tuple[Tensor, Losses]:
        codes, target = sounds.crop(plan.batch, plan.frames)
        with torch.autocast(device.type, plan.dtype, enabled=plan.dtype != torch.float32):
            made = forward(decoder, codes)
        loss, far, level = measure(made.float(), target)
        return loss, {"loss": loss, "far": far, "level": level}

    step = Step(decoder, optimiser, compute)

    def between(number: int, share: float) -> dict[str, Any]:
        grow(sounds)
        return {"frames": sounds.num}

    return run(
        decoder,
        optimiser,
        lambda number, share: step,
        clock,
        log,
        path,
        peak=plan.peak,
        warmup=plan.warmup,
        records=records and device.type == "cuda",
        log_s=plan.log_s,
        between=between,
        most_steps=most_steps,
    )
