"""Turn a book in Markdown into one audio file with chapters.

    zoo serve
    python examples/audiobook.py book.md book.m4b --voice slt

A chapter begins with a heading. Each chapter is written to a separate file next to the book, so an
interrupted run continues with the next chapter. At the end the files are joined. The server cuts long text at
sentences and keeps one voice.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import av
import httpx
import numpy as np
import sentencex
import soundfile

sys.path.append(str(Path(__file__).parents[1]))  # for `python examples/...`
from examples.speaking import checked, connect, run

if TYPE_CHECKING:
    from av.container.core import Chapter

PARALLEL = 4  # chapters at once
PIECE_CHARS = 6000  # in a request; a server accepts 8000 by default
PAUSE_S = 1.0  # between chapters
CODECS = {
    ".m4b": "aac",
    ".m4a": "aac",
    ".mka": "libopus",
    ".mkv": "libopus",
}  # by the ending of a container that holds chapters


def chapters(text: str) -> list[tuple[str, str]]:
    """Return the title and text of each chapter. Text before the first heading is a chapter too."""
    parts = re.split(r"^#+ +(.+?) *#*$", "\n" + text, flags=re.M)
    found = [("Beginning", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
    return [(title, spoken(body)) for title, body in found if body.strip()]


def spoken(body: str) -> str:
    """Return Markdown as it is read aloud, without emphasis, links and rules."""
    body = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", body)
    return re.sub(r"[*_`>]+|^[-=]{3,}$", "", body, flags=re.M).strip()


def pieces(text: str) -> Iterator[str]:
    """Yield pieces that fit into a request, cut between paragraphs or sentences. Joined, they are the
    text."""
    piece = ""
    for part in parts(text):
        if piece and len(piece) + len(part) > PIECE_CHARS:
            yield piece
            piece = ""
        piece += part
    if piece:
        yield piece


def parts(text: str) -> Iterator[str]:
    for paragraph in re.findall(r"[\s\S]+?(?:\n\s*\n|\Z)", text):
        for sentence in [paragraph] if len(paragraph) <= PIECE_CHARS else sentencex.segment("en", paragraph):
            for at in range(0, len(sentence), PIECE_CHARS):  # a sentence that is too long is cut anywhere
                yield sentence[at : at + PIECE_CHARS]


async def speak_chapter(client: httpx.AsyncClient, text: str, file: Path, fields: dict[str, Any]) -> None:
    """Speak a chapter into a FLAC file, which is complete or absent."""
    part = file.with_suffix(".part")
    sound: soundfile.SoundFile | None = None
    for piece in pieces(text):
        body = {"input": piece, "response_format": "flac", "stream": False, "service_tier": "flex", **fields}
        answer = await client.post("/v1/audio/speech", json=body, timeout=None)
        await checked(answer)
        samples, rate_hz = soundfile.read(io.BytesIO(answer.content), dtype="int16")
        if sound is None:
            sound = soundfile.SoundFile(part, "w", rate_hz, 1, subtype="PCM_16", format="FLAC")
        sound.write(samples)
    assert sound is not None, "a chapter has text"
    sound.close()
    part.rename(file)


def join(files: list[tuple[str, Path]], book: Path) -> None:
    """Write the chapters one after the other, with chapter marks."""
    rate_hz = soundfile.info(files[0][1]).samplerate
    at = 0
    marks: list[Chapter] = []
    for index, (title, file) in enumerate(files):
        num_samples = soundfile.info(file).frames + round(PAUSE_S * rate_hz)
        marks.append(
            {
                "id": index,
                "start": at,
                "end": at + num_samples,
                "time_base": Fraction(1, rate_hz),
                "metadata": {"title": title},
            }
        )
        at += num_samples
    form = "ipod" if CODECS[book.suffix] == "aac" else "matroska"
    with av.open(book, "w", format=form) as out:
        out.metadata["title"] = book.stem
        out.set_chapters(marks)
        stream = cast(av.AudioStream, out.add_stream(CODECS[book.suffix], rate=48_000, layout="mono"))
        resampler = av.AudioResampler(
            stream.codec_context.format, "mono", 48_000, stream.codec_context.frame_size or 1024
        )
        for _, file in files:
            for block in [
                *soundfile.blocks(file, rate_hz, dtype="int16"),
                np.zeros(round(PAUSE_S * rate_hz), np.int16),
            ]:
                frame = av.AudioFrame.from_ndarray(block[None], format="s16", layout="mono")
                frame.sample_rate = rate_hz
                for ready in resampler.resample(frame):
                    out.mux(stream.encode(ready))
        for last in resampler.resample(None):
            out.mux(stream.encode(last))
        out.mux(stream.encode(None))


async def make(text: str, book: Path, server: str, key: str | None, fields: dict[str, Any]) -> None:
    work = book.with_suffix(".chapters")
    work.mkdir(exist_ok=True)
    told, turns = chapters(text), asyncio.Semaphore(PARALLEL)
    if not told:
        raise SystemExit("the book has no text")

    async def chapter(index: int, title: str, words: str) -> tuple[str, Path]:
        # the name changes with text and voice, so that a changed chapter is made again
        asked = json.dumps([words, fields], sort_keys=True).encode()
        file = work / f"{index:03d}-{hashlib.sha256(asked).hexdigest()[:12]}.flac"
        async with turns:
            if not file.exists():
                await speak_chapter(client, words, file, fields)
                print(f"{title}: {soundfile.info(file).duration:.1f} s", file=sys.stderr)
        return title, file

    async with connect(server, key) as client, asyncio.TaskGroup() as speaking:
        tasks = [speaking.create_task(chapter(index, *one)) for index, one in enumerate(told)]
    await asyncio.to_thread(join, [task.result() for task in tasks], book)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("book", type=Path, help=" or ".join(CODECS))
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--key")
    parser.add_argument("--model")
    parser.add_argument("--voice")
    parser.add_argument("--seed", type=int, default=1, help="the seed of all chapters, for one voice")
    given = parser.parse_args()
    if given.book.suffix not in CODECS:
        parser.error(f"{given.book} must end in one of: {', '.join(CODECS)}")
    fields = {
        name: value for name in ("model", "voice", "seed") if (value := getattr(given, name)) is not None
    }
    run(make(given.text.read_text(), given.book, given.server, given.key, fields))


if __name__ == "__main__":
    main()
