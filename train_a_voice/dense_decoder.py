"""Train the decoder on a device, with codes and samples in device memory that may still grow.

It learns what `decoder.py` teaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train_a_voice import vocoder
from train_a_voice.codes import Codebooks
from train_a_voice.decoder import Loss, Ripple, initialise, samples, trainable
from train_a_voice.features import FRAME
from train_a_voice.forge import Part
from train_a_voice.sprint import Clock, GraphPool, Log, Losses, Step, optimiser_of, run, set_rate
from zoo.qwen3_tts.codec import Decoder


@dataclass(frozen=True)
class Plan:
    peak: float = 1.5e-3
    warmup: int = 150
    batch: int = 32
    frames: int = 18
    coarse: float = 0.3  # share of crops in which the last levels add nothing, as for a talker that is unsure
    room: int = 400_000  # frames
    dtype: torch.dtype = torch.bfloat16
    log_s: float = 5.0
    is_compiled: bool = False


def wave_of(part: Part, codebooks: Codebooks) -> np.ndarray:
    """Return int16 samples [T * FRAME]: the true mel spectrogram with the codes' pitch and voicing."""
    shapes = codebooks.shapes.numpy()
    waves = []
    for begin, end in zip(part.edges[:-1], part.edges[1:], strict=True):
        at = slice(int(begin), int(end))
        voicing = part.voicing[at].astype(np.float32)
        shape = (voicing @ shapes.T - (shapes**2).sum(1) / 2).argmax(1)
        said = vocoder.speak(part.mel[at].astype(np.float32), part.cycles[at].astype(np.int64), shapes[shape])
        waves.append((np.clip(said, -1, 1) * 32767).astype("<i2"))
    return np.concatenate(waves)


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


class Sine(Ripple):
    """Ripple with the sine of torch, which is fast on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * self.alpha.exp()[:, None]).sin().square() / (self.beta.exp()[:, None] + 1e-9)


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
    if device.type == "cuda":
        for module in list(decoder.modules()):
            for name, child in module.named_children():
                if isinstance(child, Ripple):
                    setattr(module, name, Sine(child))
    initialise(decoder, codebooks)
    begin()
    decoder.to(device)
    optimiser = optimiser_of([p for p in decoder.parameters() if p.requires_grad], device, 0.0)
    set_rate(optimiser, 0.0)
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
    is_recorded = records and device.type == "cuda"

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
        graphs=GraphPool() if is_recorded else None,
        log_s=plan.log_s,
        between=between,
        most_steps=most_steps,
    )
