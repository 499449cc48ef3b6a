"""The data that a talker learns from: texts and their speakers, codes, and the byte and phone of each frame.

Packed, a frame takes fifteen bytes, so sixty thousand sentences can move to another machine.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train_a_voice.codes import SIZE

BITS = 9  # per code
assert 1 << BITS == SIZE


@dataclass(frozen=True)
class Lines:
    """Utterances. Utterance u has frames edges[u] to edges[u + 1]."""

    texts: list[str]
    speakers: np.ndarray  # [U] uint8, index into flite.SPEAKERS
    edges: np.ndarray  # [U + 1]
    codes: np.ndarray  # [T, K] int16
    spoken: np.ndarray  # [T] uint8, byte of the text
    phones: np.ndarray  # [T] uint8

    @classmethod
    def join(cls, parts: Sequence[Lines]) -> Lines:
        lengths = np.concatenate([np.diff(part.edges) for part in parts])
        speakers = np.concatenate([part.speakers for part in parts])
        frames = (np.concatenate([getattr(p, name) for p in parts]) for name in ("codes", "spoken", "phones"))
        return cls(
            [text for part in parts for text in part.texts], speakers, np.cumsum([0, *lengths]), *frames
        )

    def first(self, count: int) -> Lines:
        """Return the first `count` utterances."""
        count = min(count, len(self.texts))
        end = int(self.edges[count])
        return Lines(
            self.texts[:count],
            self.speakers[:count],
            self.edges[: count + 1],
            self.codes[:end],
            self.spoken[:end],
            self.phones[:end],
        )

    def save(self, path: Path) -> None:
        """Save with fifteen bytes a frame.

        The last code changes little from frame to frame, so it is compressed, as is everything but the codes.
        The other codes look like noise to a compressor and are packed bit by bit."""
        mel = self.codes[:, :-1].astype(">u2")
        bits = np.unpackbits(mel.view(np.uint8).reshape(*mel.shape, 2), axis=2)[:, :, -BITS:]
        parts: dict[str, Any] = {
            "texts": squeeze("\n".join(self.texts).encode()),
            "speakers": squeeze(self.speakers.tobytes()),
            "lengths": squeeze(np.diff(self.edges).astype("<u2").tobytes()),
            "shape": np.array(self.codes.shape),
            "mel": np.packbits(bits.reshape(-1)),
            "tone_low": squeeze((self.codes[:, -1] & 255).astype(np.uint8).tobytes()),
            "tone_high": squeeze((self.codes[:, -1] >> 8).astype(np.uint8).tobytes()),
            "spoken": squeeze(np.diff(self.spoken, prepend=np.uint8(0)).astype(np.uint8).tobytes()),
            "phones": squeeze(self.phones.tobytes()),
        }
        with open(path, "wb") as file:
            np.savez(file, **parts)

    @classmethod
    def load(cls, path: Path) -> Lines:
        kept = np.load(path)
        raw = {name: lzma.decompress(kept[name].tobytes()) for name in kept if name not in ("shape", "mel")}
        num, codebooks = (int(x) for x in kept["shape"])
        bits = np.unpackbits(kept["mel"], count=num * (codebooks - 1) * BITS).reshape(num, -1, BITS)
        codes = np.zeros((num, codebooks), np.int16)
        for bit in range(BITS):
            codes[:, :-1] |= bits[:, :, bit].astype(np.int16) << (BITS - 1 - bit)
        low, high = (
            np.frombuffer(raw[name], np.uint8).astype(np.int16) for name in ("tone_low", "tone_high")
        )
        codes[:, -1] = low | high << 8
        edges = np.concatenate(([0], np.cumsum(np.frombuffer(raw["lengths"], "<u2").astype(np.int64))))
        spoken = np.cumsum(np.frombuffer(raw["spoken"], np.uint8), dtype=np.uint8)
        phones = np.frombuffer(raw["phones"], np.uint8)
        speakers = np.frombuffer(raw["speakers"], np.uint8)
        return cls(raw["texts"].decode().split("\n"), speakers, edges, codes, spoken, phones)


def squeeze(raw: bytes) -> np.ndarray:
    return np.frombuffer(lzma.compress(raw, preset=6), np.uint8)
