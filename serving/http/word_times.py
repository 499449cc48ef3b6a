"""When the words of an answer were spoken. Each piece of its text is aligned as soon as all of its audio is
there, while the next one is spoken.

    PCM ─ hear ─┐
    text ─ spoken ─ aligner ─ ready, rest ─> words, in the order of the answer
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

import msgspec
from litestar.exceptions import HTTPException

from serving.aligner.client import Aligner, AlignerFailed
from serving.aligner.messages import Piece
from serving.http.quota import Quota
from zoo.align.words import WordTime, words_of


class Word(msgspec.Struct):
    """A word with the marks around it. aligned: whether the aligner found it in the speech; otherwise its times
    lie between those of its neighbours. score: the mean probability of its letters."""

    word: str
    start_s: float
    end_s: float
    aligned: bool
    score: float


class AudioWords(msgspec.Struct, tag_field="type", tag="speech.audio.words"):
    """The words of a piece of the text. They follow the audio of the piece."""

    words: list[Word]


class WordTimes:
    """rate_hz: of the PCM. speed: of the answer. As a context manager it is closed at the end."""

    def __init__(self, aligner: Aligner, memory: Quota, rate_hz: int, speed: float):
        self.aligner, self.rate_hz, self.speed = aligner, rate_hz, speed
        self._share = memory.take(0)
        self._pcm = bytearray()  # since `_begin`
        self._begin = 0  # samples before it
        self._request = 0  # samples before the request that is spoken now
        self._num_words = 0  # of that request, which belong to its pieces so far
        self._num_aligning = 0  # bytes of PCM that wait for the aligner
        self._aligning: deque[asyncio.Task[list[Word]]] = deque()

    @property
    def num_samples(self) -> int:
        return self._begin + len(self._pcm) // 2

    def begin_request(self) -> None:
        """The audio that follows belongs to another request."""
        self._request = self._begin = self.num_samples
        self._num_words = 0
        self._pcm.clear()

    def skip(self, num_samples: int) -> None:
        """Silence follows, which belongs to no request."""
        self._begin = self.num_samples + num_samples
        self._pcm.clear()

    def hear(self, pcm: bytes) -> None:
        """Take the next audio of the answer. Raises AlignerFailed if there is no memory left."""
        self._pcm += pcm
        try:
            self._share.resize(len(self._pcm) + self._num_aligning)
        except HTTPException as error:
            raise AlignerFailed(f"no memory is left for word times: {error.detail}") from None

    def spoken(self, text: str, start: int, stop: int) -> None:
        """Begin to align a piece: samples start .. stop of its request."""
        at = self._request + start
        pcm = bytes(self._pcm[2 * (at - self._begin) : 2 * (self._request + stop - self._begin)])
        del self._pcm[: 2 * (self._request + stop - self._begin)]
        self._begin = self._request + stop
        self._num_words += len(words_of(text))
        self._aligning.append(asyncio.create_task(self._align(pcm, text, at)))

    def spoken_whole(self, text: str) -> None:
        """The request has ended. Align all of it if it had no pieces."""
        if self._begin == self._request and self._pcm:
            self.spoken(text, 0, len(self._pcm) // 2)

    async def _align(self, pcm: bytes, text: str, at: int, is_open: bool = False) -> list[Word]:
        """Raises AlignerFailed."""
        self._num_aligning += len(pcm)
        try:
            found = await self.aligner.align(Piece(pcm, self.rate_hz, text, is_open))
        finally:
            self._num_aligning -= len(pcm)
        return [self._word(each, at) for each in found]

    def _word(self, found: WordTime, at: int) -> Word:
        start, stop = (
            round((at + each) / self.rate_hz / self.speed, 6) for each in (found.start, found.stop)
        )
        return Word(found.text, start, stop, found.is_aligned, found.score)

    def ready(self) -> list[list[Word]]:
        """Return the words of the next pieces that are aligned. Raises AlignerFailed."""
        words: list[list[Word]] = []
        while self._aligning and self._aligning[0].done():
            words.append(self._aligning.popleft().result())
        return words

    async def rest(self) -> list[list[Word]]:
        """Wait for all pieces, and return their words. Raises AlignerFailed."""
        await asyncio.gather(*self._aligning)
        return self.ready()

    async def cut_off(self, text: str) -> list[Word]:
        """Return the words of the request that was spoken of when the answer was cut off, as far as they were
        spoken and do not belong to a piece. text: of the request. Raises AlignerFailed."""
        left = " ".join(words_of(text)[self._num_words :])
        if not left or not self._pcm:
            return []
        return await self._align(bytes(self._pcm), left, self._begin, is_open=True)

    def close(self) -> None:
        for aligning in self._aligning:
            aligning.cancel()
        self._aligning.clear()
        self._share.release()

    def __enter__(self) -> WordTimes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
