"""Features of speech without its samples, in parts that many processes make.

A talker on a GPU reads far more speech than a disk of samples could hold. A part is a file of PART texts:
their bytes, flite's phones and their ends, and the features of every frame.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from train_a_voice import features, vocoder
from train_a_voice.flite import RATE_HZ, Utterance
from train_a_voice.library import SYSTEM, Flite

PART = 500


@dataclass(frozen=True)
class Part:
    texts: list[str]
    phones: list[tuple[str, ...]]
    ends_s: list[np.ndarray]
    edges: np.ndarray  # [U + 1], frames
    mel: np.ndarray  # [T, HOPS, BANDS] float16
    cycles: np.ndarray  # [T] uint8
    voicing: np.ndarray  # [T, HOPS] float16

    def save(self, path: Path) -> None:
        """Save atomically: an existing file is complete."""
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            np.savez(
                file,
                texts=np.array("\n".join(self.texts)),
                phones=np.array("\n".join(map(" ".join, self.phones))),
                ends_s=np.concatenate(self.ends_s).astype(np.float32),
                edges=self.edges,
                mel=self.mel,
                cycles=self.cycles,
                voicing=self.voicing,
            )
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Part:
        kept = np.load(path)
        phones = [tuple(line.split()) for line in str(kept["phones"]).split("\n")]
        ends_s = np.split(kept["ends_s"], np.cumsum([len(some) for some in phones])[:-1])
        frames = (kept[name] for name in ("edges", "mel", "cycles", "voicing"))
        return cls(str(kept["texts"]).split("\n"), phones, ends_s, *frames)

    def utterances(self) -> list[Utterance]:
        """Return utterances as in a shelf, without samples. Their lengths follow from their frames."""
        spoken = zip(self.texts, self.phones, self.ends_s, np.diff(self.edges), strict=True)
        return [
            Utterance(text, 0, int(num) * features.FRAME * 2 // 3, phones, tuple(ends_s.tolist()))
            for text, phones, ends_s, num in spoken
        ]


@cache
def _flite(directory: Path) -> Flite:
    return Flite(directory)


def make(texts: Sequence[str], path: Path, directory: Path = SYSTEM) -> Path:
    """Speak the texts and save their features. directory: flite's shared objects."""
    if path.exists():
        return path
    flite = _flite(directory)
    found, utterances = [], []
    for text in texts:
        samples, utterance = flite.speak(text)
        found.append(analyse(samples.astype(np.float32) / 32768))
        utterances.append(utterance)
    mel, cycles, voicing = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    edges = np.cumsum([0, *(len(cycles) for _, cycles, _ in found)])
    phones, ends_s = [u.phones for u in utterances], [np.array(u.ends_s) for u in utterances]
    Part(list(texts), phones, ends_s, edges, mel, cycles, voicing.astype(np.float16)).save(path)
    return path


def analyse(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mel [T, HOPS, BANDS] float16, cycles [T] uint8, voicing [T, HOPS] of samples [N] by flite."""
    found = features.analyse(features.resample(samples, RATE_HZ))
    cycles = vocoder.cycles(found.pitch_hz, found.voicing)
    return found.mel.astype(np.float16), cycles.astype(np.uint8), found.voicing.astype(np.float32)


def fill(
    directory: Path,
    texts: Sequence[str],
    processes: int,
    progress: Callable[[int], None],
    libraries: Path = SYSTEM,
) -> None:
    """Make the missing parts of these texts; part i has texts[i * PART : (i + 1) * PART]."""
    directory.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(texts), PART)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        made = pool.map(
            make,
            [texts[start : start + PART] for start in starts],
            [path_of(directory, start // PART) for start in starts],
            [libraries] * len(starts),
        )
        for i, _ in enumerate(made, 1):
            progress(min(i * PART, len(texts)))


def path_of(directory: Path, index: int) -> Path:
    return directory / f"{index:05d}.npz"


def parts(directory: Path) -> Iterator[Part]:
    """Yield all existing parts in order."""
    for path in sorted(directory.glob("*.npz")):
        yield Part.load(path)
