"""Join the files of a book's chapters into one file with chapter marks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, cast

import av
import numpy as np
import soundfile

from serving.books.read import Book
from serving.replacing import replacing

if TYPE_CHECKING:
    from av.container.core import Chapter as Mark

RATE_HZ = 48_000  # of the file
PAUSE_S = 1.0  # after a chapter
CODECS = {".m4b": "aac", ".m4a": "aac", ".mka": "libopus"}  # by the ending of a file that holds chapters
MUXERS = {"aac": "ipod", "libopus": "matroska"}


def join(book: Book, chapters: list[list[Path]], out: Path) -> float:
    """Write the files of all chapters into one, completely or not at all. Returns its seconds. Raises OSError, and
    ValueError for a file that is damaged."""
    codec = CODECS[out.suffix.lower()]
    with replacing(out) as part, av.open(part, "w", format=MUXERS[codec]) as container:
        container.metadata["title"] = book.title
        if book.author is not None:
            container.metadata["artist"] = book.author
        marks = list(_marks(book, chapters))
        container.set_chapters(marks)
        stream = cast(av.AudioStream, container.add_stream(codec, rate=RATE_HZ, layout="mono"))
        _encode(container, stream, chapters)
    return marks[-1]["end"] / soundfile.info(chapters[0][0]).samplerate


def _marks(book: Book, chapters: list[list[Path]]) -> Iterator[Mark]:
    at = 0
    for number, (chapter, files) in enumerate(zip(book.chapters, chapters, strict=True)):
        infos = [_info(file) for file in files]
        rate_hz = infos[0].samplerate
        end = at + sum(info.frames for info in infos) + round(PAUSE_S * rate_hz)
        yield {
            "id": number,
            "start": at,
            "end": end,
            "time_base": Fraction(1, rate_hz),
            "metadata": {"title": chapter.title},
        }
        at = end


def _info(file: Path) -> soundfile._SoundFileInfo:
    with _reading(file):
        return soundfile.info(file)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{file} is damaged; remove it and start again ({error.error_string})") from None


def _encode(
    container: av.container.OutputContainer, stream: av.AudioStream, chapters: list[list[Path]]
) -> None:
    context = stream.codec_context
    resampler = av.AudioResampler(context.format, "mono", RATE_HZ, context.frame_size or 1024)
    for rate_hz, block in _blocks(chapters):
        frame = av.AudioFrame.from_ndarray(block[None], format="s16", layout="mono")
        frame.sample_rate = rate_hz
        for ready in resampler.resample(frame):
            container.mux(stream.encode(ready))
    for last in resampler.resample(None):
        container.mux(stream.encode(last))
    container.mux(stream.encode(None))


def _blocks(chapters: list[list[Path]]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the speech and the pauses in int16, a second at a time."""
    for files in chapters:
        for file in files:
            rate_hz = _info(file).samplerate
            with _reading(file):
                for block in soundfile.blocks(file, rate_hz, dtype="int16"):
                    yield rate_hz, block
        yield rate_hz, np.zeros(round(PAUSE_S * rate_hz), np.int16)
