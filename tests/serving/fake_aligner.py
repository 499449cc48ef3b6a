"""An aligner without a model, for the HTTP process."""

import asyncio

from serving.aligner.client import AlignerFailed
from zoo.align.words import WordTime, words_of

FRAME = 100  # samples of the fake engine's frames


class FakeAligner:
    """Gives each word an equal part of its piece. Of a piece that was cut off, it finds a word for each frame.
    `fault` and `broken` are errors."""

    def __init__(self):
        self.fault = ""
        self.broken = ""
        self.delay_s = 0.0
        self.pieces = []

    async def align(self, piece):
        self.pieces.append(piece)
        await asyncio.sleep(self.delay_s)
        if self.broken:
            raise AlignerFailed(self.broken)
        words = words_of(piece.text)
        num = len(piece.pcm) // 2
        if piece.is_open:
            words = words[: num // FRAME]
        share = FRAME if piece.is_open else num / max(len(words), 1)
        return [
            WordTime(word, round(i * share), round((i + 1) * share), not word.isdigit(), 0.5)
            for i, word in enumerate(words)
        ]

    async def close(self):
        pass
