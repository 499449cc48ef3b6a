"""Align letters and sounds: bytes of the text and flite's phones, by hard EM.

A byte makes no phone, one, two or three. The whole corpus teaches which: best paths (Viterbi), then counts
along them, repeated a few times. So training can tell the talker which byte it speaks in each frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train_a_voice.features import FRAME, RATE_HZ
from train_a_voice.flite import PAUSE, Utterance

MAX_PHONES = 3  # per byte
ROUNDS = 5
NUM_TAUGHT = 2_500  # utterances for the counts
FRAME_S = FRAME / RATE_HZ


class Aligner:
    def __init__(self, utterances: Sequence[Utterance], phones: Sequence[str] = ()):
        """Learn from utterances. phones: further phones, which the utterances may lack."""
        names = sorted({phone for u in utterances for phone in u.phones} | {PAUSE, *phones})
        self.phones = {phone: i for i, phone in enumerate(names)}
        self.makes = np.full((256, len(names)), 1 / len(names))  # P(phone | byte)
        self.counts = np.tile([0.3, 0.6, 0.09, 0.01], (256, 1))  # P(number of phones | byte)
        for _ in range(ROUNDS):
            self._learn(utterances[:NUM_TAUGHT])

    def save(self, path: Path) -> None:
        np.savez(path, phones=np.array(list(self.phones)), makes=self.makes, counts=self.counts)

    @classmethod
    def load(cls, path: Path) -> Aligner:
        kept, aligner = np.load(path), cls.__new__(cls)
        aligner.phones = {str(phone): i for i, phone in enumerate(kept["phones"])}
        aligner.makes, aligner.counts = kept["makes"], kept["counts"]
        return aligner

    def _learn(self, utterances: Sequence[Utterance]) -> None:
        makes, counts = np.full_like(self.makes, 0.05), np.full_like(self.counts, 0.05)
        counts[:, 2:] = 0.005
        for u in utterances:
            text, phones = self.read(u)
            owner = self.path(text, phones)
            np.add.at(makes, (text[owner], phones), 1)
            np.add.at(counts, (text, np.bincount(owner, minlength=len(text))), 1)
        self.makes = makes / makes.sum(1, keepdims=True)
        self.counts = counts / counts.sum(1, keepdims=True)

    def read(self, utterance: Utterance) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes of the text in lower case [n], and phones [m] without the silence at both ends."""
        text = np.frombuffer(utterance.text.lower().encode(), np.uint8).astype(np.int64)
        start, stop = self.inner(utterance)
        return text, np.array([self.phones[phone] for phone in utterance.phones[start:stop]], np.int64)

    @staticmethod
    def inner(utterance: Utterance) -> tuple[int, int]:
        phones = utterance.phones
        return int(phones[0] == PAUSE), len(phones) - int(phones[-1] == PAUSE)

    def path(self, text: np.ndarray, phones: np.ndarray) -> np.ndarray:
        """Return the byte that makes each phone [m]; bytes never decrease."""
        m = len(phones)
        one = np.log(self.makes[text][:, phones])  # [n, m]
        total = np.full(m + 1, -np.inf)
        total[0] = 0
        taken = np.zeros((len(text), m + 1), np.int64)
        for i, number in enumerate(np.log(self.counts[text])):
            so_far = np.concatenate(([0], np.cumsum(one[i])))
            scores = np.full((MAX_PHONES + 1, m + 1), -np.inf)
            for k in range(min(MAX_PHONES, m) + 1):
                scores[k, k:] = total[: m + 1 - k] + number[k] + so_far[k:] - so_far[: m + 1 - k]
            taken[i] = scores.argmax(0)
            total = scores.max(0)
        return self._back(taken, m)

    @staticmethod
    def _back(taken: np.ndarray, m: int) -> np.ndarray:
        owner, at = np.zeros(m, np.int64), m
        for i in range(len(taken) - 1, -1, -1):
            count = taken[i, at]
            owner[at - count : at] = i
            at -= count
        return owner

    def frames(self, utterance: Utterance) -> tuple[np.ndarray, np.ndarray]:
        """Return the byte that is spoken in the middle of each frame, and the phone [T] each.

        Silence before the text belongs to its first byte, and silence after it to the position behind its
        last byte, where the text's end token is."""
        text, phones = self.read(utterance)
        owner = self.path(text, phones)
        start, stop = self.inner(utterance)
        owner = np.concatenate(
            (np.zeros(start, np.int64), owner, np.full(len(utterance.phones) - stop, len(text)))
        )
        names = np.array([self.phones[phone] for phone in utterance.phones])
        middle = (np.arange(utterance.num_frames) + 0.5) * FRAME_S
        at = np.searchsorted(np.array(utterance.ends_s[:-1]), middle, side="right")
        return owner[at], names[at]
