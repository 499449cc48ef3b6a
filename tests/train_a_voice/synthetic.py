"""Speech that needs no flite: tracks in which every letter has its own cepstra and pitch."""

from __future__ import annotations

import numpy as np
import torch

from train_a_voice import codes, features, flite, track
from train_a_voice.lines import Lines
from train_a_voice.settings import QUICK

LETTER = 20  # rows of a track, 0.1 s
PITCH_HZ = {"m": 150.0, "n": 0.0, "a": 187.5}  # 0 is unvoiced
COLOURS = track.Colours(np.zeros((2, features.BANDS)), np.zeros((2, features.BANDS)))
NUM_PHONES = 7


def speech(text: str) -> flite.Speech:
    """Return an utterance whose phones are its letters, at half the pitch for the second speaker."""
    rng = np.random.default_rng(0)
    sounds = {letter: rng.normal(size=track.ORDER) * 0.3 + np.eye(track.ORDER)[0] for letter in PITCH_HZ}
    phones = ["pau", *text.replace(" ", ""), "pau"]
    rows = np.zeros((LETTER * len(phones), flite.CHANNELS))
    rows[:, 3::2] = 1  # deviations
    rows[:, 2] = -9  # silence
    for i, phone in enumerate(phones[1:-1], 1):
        rows[i * LETTER : (i + 1) * LETTER, 0] = PITCH_HZ[phone]
        rows[i * LETTER : (i + 1) * LETTER, 2 : 2 + 2 * track.ORDER : 2] = sounds[phone]
    ends_s = 0.1 * np.arange(1, len(phones) + 1)
    return flite.trim(text, phones, ends_s, rows, None)


def spoken(texts: list[str]) -> list[track.Features]:
    return [track.analyse(speech(text), 0, COLOURS) for text in texts]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(("mama", "man", "an", "nam"), int(rng.integers(2, 5)))) for _ in range(count)]


def codebooks(levels: int = QUICK.mel_levels) -> codes.Codebooks:
    """Return random codebooks."""
    generator = torch.Generator().manual_seed(0)
    mel = torch.randn(levels, codes.SIZE, features.HOPS * features.BANDS, generator=generator)
    shapes = torch.rand(codes.SHAPES, features.HOPS, generator=generator)
    return codes.Codebooks(mel, shapes, torch.linspace(100, 50, levels))


def lines(count: int = 6, seed: int = 0) -> Lines:
    """Return random lines."""
    rng = np.random.default_rng(seed)
    some = ["".join(rng.choice(list("aeiou klmn"), int(rng.integers(4, 15)))) for _ in range(count)]
    frames = rng.integers(3, 12, count)
    num = int(frames.sum())
    heard = [np.sort(rng.integers(0, len(t) + 1, n)) for t, n in zip(some, frames, strict=True)]
    return Lines(
        some,
        (np.arange(count) % 2).astype(np.uint8),
        np.cumsum([0, *frames]),
        rng.integers(0, codes.SIZE, (num, QUICK.codebooks)).astype(np.int16),
        np.concatenate(heard).astype(np.uint8),
        rng.integers(0, NUM_PHONES, num).astype(np.uint8),
    )
