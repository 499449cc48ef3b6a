"""Make the folder that `remote` trains from: speech as parts, codebooks and aligner, codes, and the pack.

Codebooks and the aligner are fitted to the first parts. Every step continues where it was stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from train_a_voice import forge, judge, lines, remote, sentences
from train_a_voice.align import Aligner
from train_a_voice.codes import Codebooks
from train_a_voice.flite import PHONES
from train_a_voice.lines import Lines
from train_a_voice.settings import Settings

SEED, UNSEEN_SEED = 1, 7
NUM_UNSEEN = 400
APART = frozenset(sentences.LINES["held_out"] + sentences.LINES["development"])
Counter = Callable[[str, int], Callable[[int], None]]


def gather(work: Path, settings: Settings, folder: Path, counter: Counter) -> None:
    if not (work / "lexicon.txt").exists():
        judge.lexicon().save(work / "lexicon.txt")
    lexicon = sentences.Lexicon.load(work / "lexicon.txt")
    texts = sentences.generate(settings.num_sentences, lexicon, SEED, APART)
    processes = os.cpu_count() or 1
    forge.fill(work / "parts", texts, processes, counter("speech", len(texts)))
    paths = [forge.path_of(work / "parts", i) for i in range(-(-len(texts) // forge.PART))]
    fit(work, settings, paths)
    codebooks, aligner = Codebooks.load(work / "codebooks.pt"), Aligner.load(work / "aligner.npz")
    (work / "lines").mkdir(exist_ok=True)
    progress = counter("codes", len(texts))
    for i, path in enumerate(paths, 1):
        encode(path, work / "lines" / path.name, codebooks, aligner)
        progress(min(i * forge.PART, len(texts)))
    unseen = sentences.generate(NUM_UNSEEN, lexicon, UNSEEN_SEED, APART | frozenset(texts))
    forge.make(unseen + sentences.LINES["development"], work / "unseen_part.npz")
    encode(work / "unseen_part.npz", work / "unseen.npz", codebooks, aligner)
    found = [Lines.load(work / "lines" / path.name) for path in paths]
    unheard = Lines.load(work / "unseen.npz")
    remote.pack(folder, found, unheard, codebooks, aligner, work / "lexicon.txt")


def fit(work: Path, settings: Settings, paths: list[Path]) -> None:
    """Fit codebooks and the aligner to the first parts."""
    if (work / "codebooks.pt").exists() and (work / "aligner.npz").exists():
        return
    some = [forge.Part.load(path) for path in paths[: -(-settings.num_code_sentences // forge.PART)]]
    mel = np.concatenate([part.mel for part in some]).astype(np.float32)
    voicing = np.concatenate([part.voicing for part in some]).astype(np.float32)
    Aligner([utterance for part in some for utterance in part.utterances()], PHONES).save(
        work / "aligner.npz"
    )
    Codebooks.fit(mel, voicing, settings.mel_levels, seed=0).refined(mel).save(work / "codebooks.pt")


def encode(path: Path, into: Path, codebooks: Codebooks, aligner: Aligner) -> None:
    if into.exists():
        return
    part = into.with_suffix(".part")
    lines.of_part(forge.Part.load(path), codebooks, aligner).save(part)
    part.replace(into)
