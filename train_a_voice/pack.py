"""Make the folder that training needs: speech by flite as codes and alignment, and all that makes more of it.

    codebooks.npz, colours.npz, aligner.npz    fitted to the first sentences
    lines.npz, unseen.npz                      sentences to learn from, and others to check with
    lexicon.xz, flite.tar.xz                   words, and flite's shared objects

Every step continues where it was stopped.
"""

from __future__ import annotations

import lzma
import multiprocessing
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train_a_voice import decoder, judge, sentences, track
from train_a_voice.align import Aligner
from train_a_voice.codes import Codebooks
from train_a_voice.flite import OBJECTS, PHONES, SPEAKERS, SYSTEM, Utterance, flite_of
from train_a_voice.lines import Lines
from train_a_voice.settings import Settings
from train_a_voice.track import Colours, Features

PART = 500  # sentences of a file
SEED, UNSEEN_SEED = 1, 7
NUM_UNSEEN = 400
NUM_COLOUR = 12  # sentences whose waves show the speakers' colours
LAST = "flite.tar.xz"  # the file that is written last: with it, a folder is complete
APART = frozenset(sentences.LINES["held_out"] + sentences.LINES["development"])
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Maker:
    """Makes codes and alignment of a text, and the samples that the decoder learns."""

    libraries: Path
    colours: Colours
    codebooks: Codebooks
    aligner: Aligner

    @classmethod
    def load(cls, folder: Path, libraries: Path = SYSTEM) -> Maker:
        codebooks, aligner = Codebooks.load(folder / "codebooks.npz"), Aligner.load(folder / "aligner.npz")
        return cls(libraries, Colours.load(folder / "colours.npz"), codebooks, aligner)

    def lines(self, texts: Sequence[str]) -> tuple[Lines, list[Features]]:
        """Return lines, spoken by the speakers in turn, and their features."""
        speakers = turns(len(texts))
        made = [
            speak(text, int(s), self.colours, self.libraries) for text, s in zip(texts, speakers, strict=True)
        ]
        codes = [self.codebooks.encode(f.mel, f.cycles, f.voicing) for _, f in made]
        spoken, phones = zip(*(self.aligner.frames(utterance) for utterance, _ in made), strict=True)
        frames = (np.concatenate(codes), *(np.concatenate(x).astype(np.uint8) for x in (spoken, phones)))
        edges = np.cumsum([0, *map(len, codes)])
        return Lines(list(texts), speakers, edges, *frames), [found for _, found in made]

    def waves(self, found: Sequence[Features]) -> np.ndarray:
        """Return int16 samples [T * FRAME] of utterances."""
        return np.concatenate([decoder.target(features, self.codebooks) for features in found])


def turns(count: int) -> np.ndarray:
    """Return the speaker of each text: they take turns."""
    return (np.arange(count) % len(SPEAKERS)).astype(np.uint8)


def speak(text: str, speaker: int, colours: Colours, libraries: Path = SYSTEM) -> tuple[Utterance, Features]:
    speech = flite_of(libraries).speak(text, speaker)
    return speech.utterance, track.analyse(speech, speaker, colours)


# --- in other processes ---


@cache
def _maker(folder: Path, libraries: Path) -> Maker:
    torch.set_num_threads(1)
    return Maker.load(folder, libraries)


def make_lines(
    texts: Sequence[str], path: Path, folder: Path, libraries: Path = SYSTEM, wave: Path | None = None
) -> int:
    """Save the lines of some texts, and their samples to `wave`. Both files are complete once they exist."""
    if not path.exists():
        maker = _maker(folder, libraries)
        lines, found = maker.lines(texts)
        if wave is not None:
            np.save(wave.with_suffix(".part.npy"), maker.waves(found))
            os.replace(wave.with_suffix(".part.npy"), wave)
        lines.save(path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    return len(texts)


def make_features(texts: Sequence[str], colours: Colours) -> list[tuple[Utterance, Features]]:
    return [speak(text, int(s), colours) for text, s in zip(texts, turns(len(texts)), strict=True)]


# --- the steps of the folder ---


def pack(work: Path, settings: Settings) -> Path:
    """Make work/pack and return it."""
    folder, parts = work / "pack", work / "lines"
    for directory in (folder, parts):
        directory.mkdir(parents=True, exist_ok=True)
    if not (work / "lexicon.txt").exists():
        judge.lexicon().save(work / "lexicon.part")
        os.replace(work / "lexicon.part", work / "lexicon.txt")
    lexicon = sentences.Lexicon.load(work / "lexicon.txt")
    texts = sentences.generate(settings.num_sentences, lexicon, SEED, APART)
    num_unseen = min(NUM_UNSEEN, len(texts))
    unseen = sentences.generate(num_unseen, lexicon, UNSEEN_SEED, APART | frozenset(texts))
    pieces = [texts[i : i + PART] for i in range(0, len(texts), PART)]
    paths = [parts / f"{i:05d}.npz" for i in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        if path.exists():
            load_part(path, piece)
    if not (folder / "codebooks.npz").exists():
        fit(folder, texts[: settings.num_code_sentences], settings)
    progress = counter("codes", len(texts))
    for done in in_parallel(make_lines, pieces, paths, [folder] * len(pieces)):
        progress(done)
    make_lines(unseen, folder / "unseen.npz", folder)
    join(paths, pieces).save(folder / "lines.npz")
    (folder / "lexicon.xz").write_bytes(lzma.compress((work / "lexicon.txt").read_bytes()))
    part = folder / f"{LAST}.part"
    with tarfile.open(part, "w:xz", preset=0) as archive:
        for name in OBJECTS:
            archive.add((SYSTEM / name).resolve(), name)
    os.replace(part, folder / LAST)
    return folder


def in_parallel(function: Callable[..., Any], *arguments: Sequence[Any]) -> Iterator[Any]:
    """Return the function's results in order, by a process for each core. A single call needs no process."""
    if len(arguments[0]) == 1:
        yield from map(function, *arguments)
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=SPAWN) as pool:
        yield from pool.map(function, *arguments)


def join(paths: Sequence[Path], pieces: Sequence[list[str]]) -> Lines:
    return Lines.join([load_part(path, texts) for path, texts in zip(paths, pieces, strict=True)])


def load_part(path: Path, texts: list[str]) -> Lines:
    """Return the lines of some texts. Raises ValueError for those of others."""
    lines = Lines.load(path)
    if lines.texts != texts:
        raise ValueError(f"{path} has other sentences; use another directory")
    return lines


def fit(folder: Path, texts: list[str], settings: Settings) -> None:
    """Fit colours, aligner and codebooks. The codebooks come last: with them, the step is complete."""
    spoken = [
        [flite_of().speak(text, s, has_samples=True) for text in sentences.LINES["development"][:NUM_COLOUR]]
        for s in range(len(SPEAKERS))
    ]
    colours = track.measure_colours(spoken, [[track.wave_mel(one) for one in some] for some in spoken])
    colours.save(folder / "colours.npz")
    size = 100  # even, so the speakers' turns go on
    pieces = [texts[i : i + size] for i in range(0, len(texts), size)]
    made = [one for some in in_parallel(make_features, pieces, [colours] * len(pieces)) for one in some]
    Aligner([utterance for utterance, _ in made], PHONES).save(folder / "aligner.npz")
    mel, voicing = (np.concatenate([getattr(x, name) for _, x in made]) for name in ("mel", "voicing"))
    print(f"codebooks: fitted to {len(mel)} frames", flush=True)
    torch.set_num_threads(os.cpu_count() or 1)
    Codebooks.fit(mel, voicing, settings.mel_levels, seed=0).save(folder / "codebooks.part.npz")
    os.replace(folder / "codebooks.part.npz", folder / "codebooks.npz")


def counter(name: str, total: int) -> Callable[[int], None]:
    """Return a function that adds to a count and prints it."""
    began_s, done = time.monotonic(), 0

    def progress(more: int) -> None:
        nonlocal done
        done += more
        print(f"{name}: {done} of {total}, {time.monotonic() - began_s:.0f} s", flush=True)

    return progress
