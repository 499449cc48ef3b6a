"""Compare the voice with flite, as numbers and pictures, on sentences that neither part was trained on.

Copied speech (true codes, our decoder) has flite's timing and is compared frame by frame. Speech from text
has its own timing, so it is first aligned with flite's along the path of least distance (dynamic time
warping). Distances are of the log mel spectrogram, in nats, where either is louder than silence. Pitch is
compared where both are voiced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train_a_voice import features

SILENCE = 2.0  # nats above the floor: hops with a lower mean band are silent
KEPT = 25  # hops that a path may deviate from the diagonal


@dataclass(frozen=True)
class Distance:
    mel_nats: float  # mean absolute difference of bands
    pitch_cents: float  # median absolute difference
    pitch_correlation: float
    voiced_agree: float  # share of hops that are voiced in both, or unvoiced in both
    seconds: float  # ours as a share of theirs


def hops(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log mel [J, BANDS], pitch [J] and voicing [J] of samples at 24 kHz."""
    found = features.analyse(samples)
    return found.mel.reshape(-1, features.BANDS), found.pitch_hz.reshape(-1), found.voicing.reshape(-1)


def warp(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Align log mels [A, BANDS] and [B, BANDS]. Return the hops of each along the path, [P] each."""
    cost = np.abs(ours[:, None] - theirs[None]).mean(2)
    width = max(KEPT, 2 * abs(len(ours) - len(theirs)))
    slope = len(theirs) / len(ours)
    far = np.abs(np.arange(len(ours))[:, None] * slope - np.arange(len(theirs))) > width
    cost[far] = np.inf
    total = np.full((len(ours) + 1, len(theirs) + 1), np.inf)
    total[0, 0] = 0
    for i in range(1, len(ours) + 1):
        for j in range(1, len(theirs) + 1):
            if np.isfinite(cost[i - 1, j - 1]):
                before = min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
                total[i, j] = before + cost[i - 1, j - 1]
    i, j = len(ours), len(theirs)
    path = []
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        steps = (
            (total[i - 1, j - 1], i - 1, j - 1),
            (total[i - 1, j], i - 1, j),
            (total[i, j - 1], i, j - 1),
        )
        _, i, j = min(steps)
    first, second = np.array(path[::-1]).T
    return first, second


def compare(ours: np.ndarray, theirs: np.ndarray, is_timed: bool) -> Distance:
    """Compare samples at 24 kHz. is_timed: hop j of one is hop j of the other."""
    mel, pitch, voicing = hops(ours)
    true_mel, true_pitch, true_voicing = hops(theirs)
    num = min(len(mel), len(true_mel))
    a, b = (np.arange(num), np.arange(num)) if is_timed else warp(mel, true_mel)
    floor = np.log(features.FLOOR)
    is_loud = np.maximum(mel[a].mean(1), true_mel[b].mean(1)) > floor + SILENCE
    both = (voicing[a] > 0.5) & (true_voicing[b] > 0.5)
    cents = 1200 * np.log2(pitch[a][both] / true_pitch[b][both])
    return Distance(
        float(np.abs(mel[a] - true_mel[b])[is_loud].mean()),
        float(np.median(np.abs(cents))),
        float(np.corrcoef(np.log(pitch[a][both]), np.log(true_pitch[b][both]))[0, 1]),
        float(((voicing[a] > 0.5) == (true_voicing[b] > 0.5)).mean()),
        len(mel) / len(true_mel),
    )


def mean(found: Sequence[Distance]) -> dict[str, float]:
    names = Distance.__annotations__
    return {name: round(float(np.mean([getattr(one, name) for one in found])), 3) for name in names}


# --- pictures ---


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw_losses(trained: Path, picture: Path) -> None:
    """Draw the losses of both trainings over time. trained: the output directory of `remote`."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    talker = read_log(trained / "talker_log.jsonl")
    minutes = [line["s"] / 60 for line in talker]
    left.plot(minutes, [line["first"] for line in talker], label="first code, read with noise and own draws")
    seen = [line for line in talker if "unseen_first" in line]
    for name, label in (
        ("unseen_first", "first code, unseen sentences"),
        ("unseen_look", "where to look, unseen sentences"),
    ):
        left.plot([line["s"] / 60 for line in seen], [line[name] for line in seen], label=label)
    left.set(title="talker", xlabel="minutes", ylabel="nats", ylim=(0, 5))
    sentences = left.twinx()
    sentences.plot(
        minutes, [line["utterances"] / 1000 for line in talker], ":", color="gray", label="sentences"
    )
    sentences.set_ylabel("thousand sentences so far (dotted)")
    left.legend(fontsize=8)
    decoder = read_log(trained / "decoder_log.jsonl")
    for name, label in (("far", "far: share of a band's amplitude"), ("level", "level: nats")):
        right.plot([line["s"] / 60 for line in decoder], [line[name] for line in decoder], label=label)
    right.set(title="decoder", xlabel="minutes", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.savefig(picture, dpi=80)
    pyplot.close(figure)


def draw_speech(text: str, speeches: dict[str, np.ndarray], picture: Path) -> None:
    """Draw the spectrogram and pitch of each speech, by name; samples at 24 kHz."""
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(speeches), 1, figsize=(9, 2.1 * len(speeches)), layout="constrained", sharex=True
    )
    for axis, (name, samples) in zip(rows, speeches.items(), strict=True):
        mel, pitch, voicing = hops(samples)
        end_s = len(mel) * features.HOP / features.RATE_HZ
        axis.imshow(
            mel.T,
            origin="lower",
            aspect="auto",
            extent=(0, end_s, 0, features.BANDS),
            cmap="magma",
            vmin=-4,
            vmax=5,
        )
        axis.set(title=name, ylabel="mel band")
        voiced = axis.twinx()
        seconds = (np.arange(len(pitch)) + 0.5) * features.HOP / features.RATE_HZ
        voiced.plot(seconds, np.where(voicing > 0.5, pitch, np.nan), color="cyan", linewidth=1.5)
        voiced.set(ylabel="Hz (line)", ylim=(80, 320))
    rows[-1].set_xlabel("seconds")
    figure.suptitle(text, fontsize=10)
    figure.savefig(picture, dpi=56)
    pyplot.close(figure)
