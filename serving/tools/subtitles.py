"""Subtitles of a speech that is complete, for `zoo say`."""

from __future__ import annotations

from pathlib import Path

from serving.replacing import replacing
from zoo.align.ctc import Segment, load
from zoo.align.subtitles import TimedWord, srt, vtt
from zoo.contract import Speech


def write(out: Path, speech: Speech, text: str, speed: float, aligner: Path) -> str:
    """Write the subtitles of a speech, and return a line about them. text: its words, if its pieces are not
    known. speed: of the audio file. Raises ValueError."""
    words = words_of(speech, text, speed, aligner)
    form = vtt if out.suffix.lower() == ".vtt" else srt
    with replacing(out) as part:
        part.write_text(form([word for word, _ in words]), "utf-8")
    num_aligned = sum(is_aligned for _, is_aligned in words)
    return f"{out}: {len(words)} words, {num_aligned} of them aligned"


def words_of(speech: Speech, text: str, speed: float, aligner: Path) -> list[tuple[TimedWord, bool]]:
    """Return the words in the audio file, and whether each was aligned. Raises ValueError."""
    samples, rate_hz = speech.samples.numpy(), speech.sample_rate_hz
    pieces = speech.pieces or ((text, 0, len(samples)),)
    segments = [Segment(samples[start:stop], rate_hz, said) for said, start, stop in pieces]
    found = zip(pieces, load(aligner).align(segments), strict=True)
    return [
        (
            TimedWord(
                word.text, (start + word.start) / rate_hz / speed, (start + word.stop) / rate_hz / speed
            ),
            word.is_aligned,
        )
        for (_, start, _), words in found
        for word in words
    ]
