"""Features, codes and targets of the speech on disk: frames of all utterances, and the edges between them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train_a_voice import features, vocoder
from train_a_voice.codes import Codebooks
from train_a_voice.flite import RATE_HZ, Shelf

Progress = Callable[[int], None]
FORK = multiprocessing.get_context("fork")  # the workers use NumPy only, so forking is safe


@dataclass(frozen=True)
class Frames:
    """Features of a shelf. Utterance u has frames edges[u] to edges[u + 1]."""

    edges: np.ndarray  # [U + 1]
    mel: np.ndarray  # [T, HOPS, BANDS] float16
    cycles: np.ndarray  # [T]
    voicing: np.ndarray  # [T, HOPS]

    @classmethod
    def load(cls, directory: Path) -> Frames:
        return cls(*(np.load(directory / f"{name}.npy", mmap_mode="r") for name in cls.__annotations__))

    def first(self, utterances: int) -> slice:
        return slice(0, int(self.edges[min(utterances, len(self.edges) - 1)]))


def save(path: Path, array: np.ndarray) -> None:
    """Save an array atomically: an existing file is complete."""
    part = path.with_suffix(".part.npy")
    np.save(part, array)
    os.replace(part, path)


def make_features(shelf: Shelf, directory: Path, progress: Progress) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[np.ndarray]] = {"mel": [], "cycles": [], "voicing": []}
    with ProcessPoolExecutor(mp_context=FORK) as pool:
        for i, found in enumerate(pool.map(_features, map(shelf.samples, shelf.utterances), chunksize=16)):
            for values, value in zip(parts.values(), found, strict=True):
                values.append(value)
            progress(i + 1)
    for name, arrays in parts.items():
        save(directory / f"{name}.npy", np.concatenate(arrays))
    save(directory / "edges.npy", np.cumsum([0, *map(len, parts["cycles"])]))


def _features(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found = features.analyse(features.resample(samples, RATE_HZ))
    cycles = vocoder.cycles(found.pitch_hz, found.voicing)
    return found.mel.astype(np.float16), cycles.astype(np.uint8), found.voicing.astype(np.float32)


def make_codes(frames: Frames, codebooks: Codebooks, path: Path) -> None:
    parts = [slice(i, i + 50_000) for i in range(0, len(frames.cycles), 50_000)]
    codes = [
        codebooks.encode(frames.mel[p].astype(np.float32), frames.cycles[p], frames.voicing[p]) for p in parts
    ]
    save(path, np.concatenate(codes))


def make_targets(
    frames: Frames, codes: np.ndarray, codebooks: Codebooks, num: int, path: Path, progress: Progress
) -> None:
    """Write int16 samples of the first `num` utterances.

    They have the true mel spectrogram, with the codes' pitch and voicing. Utterances are written one by one,
    and a repeated run continues after the last one."""
    done = path.stat().st_size // (2 * features.FRAME) if path.exists() else 0
    first = int(np.searchsorted(frames.edges, done, side="right")) - 1
    spans = [slice(*frames.edges[u : u + 2]) for u in range(first, min(num, len(frames.edges) - 1))]
    spoken = ((frames.mel[at].astype(np.float32), *codebooks.decode(codes[at])[1:]) for at in spans)
    with open(path, "r+b" if path.exists() else "wb") as file, ProcessPoolExecutor(mp_context=FORK) as pool:
        file.truncate(2 * features.FRAME * int(frames.edges[first]))
        file.seek(0, os.SEEK_END)
        for i, samples in enumerate(pool.map(_speak, spoken, chunksize=16), first):
            file.write((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
            progress(i + 1)


def _speak(heard: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    return vocoder.speak(*heard)
