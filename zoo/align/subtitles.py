"""Subtitles from word times, as SubRip (.srt) or WebVTT (.vtt, with the time of each word)."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

# The usual limits for reading: two lines of 42 characters, and at most six seconds.
LINE_CHARS, MAX_LINES, MAX_CUE_S = 42, 2, 6.0
MAX_GAP_S = 0.7  # between words of one cue
_SENTENCE_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f][\"'\u201d\u2019)\]]*(?: \W+)?$")
_NO_SPACE = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
SUFFIXES = (".srt", ".vtt")


class TimedWord(NamedTuple):
    text: str
    start_s: float
    end_s: float


def cues(words: Iterable[TimedWord]) -> list[list[TimedWord]]:
    """Return the words of each subtitle. A subtitle ends with a sentence, before a pause, or when it is
    full."""
    found: list[list[TimedWord]] = []
    for word in words:
        if not found or _must_end(found[-1], word):
            found.append([])
        found[-1].append(word)
    return found


def _must_end(cue: Sequence[TimedWord], word: TimedWord) -> bool:
    """Whether a subtitle ends before the next word."""
    is_apart = word.start_s - cue[-1].end_s > MAX_GAP_S or word.end_s - cue[0].start_s > MAX_CUE_S
    is_full = len(list(lines([*cue, word]))) > MAX_LINES
    return is_apart or is_full or _SENTENCE_END.search(cue[-1].text) is not None


def lines(cue: Iterable[TimedWord]) -> Iterator[list[TimedWord]]:
    """Yield the words of each line."""
    line: list[TimedWord] = []
    for word in cue:
        if line and len(joined([each.text for each in (*line, word)])) > LINE_CHARS:
            yield line
            line = []
        line.append(word)
    if line:
        yield line


def joined(words: Sequence[str]) -> str:
    """Join words as they are written: with spaces, where their script has them."""
    return "".join(words[:1]) + "".join(spaced(a, b) for a, b in pairwise(words))


def spaced(before: str, word: str) -> str:
    """Return a word with the space before it."""
    is_close = _NO_SPACE.match(before[-1]) and _NO_SPACE.match(word[0])
    return word if is_close else f" {word}"


def srt(words: Iterable[TimedWord]) -> str:
    """Return a SubRip file."""
    blocks = []
    for number, cue in enumerate(cues(words), 1):
        text = "\n".join(joined([word.text for word in line]) for line in lines(cue))
        blocks.append(f"{number}\n{_span(cue, ',')}\n{text}\n")
    return "\n".join(blocks)


def vtt(words: Iterable[TimedWord]) -> str:
    """Return a WebVTT file. A player can mark each word as it is spoken."""
    blocks = ["WEBVTT\n"]
    for cue in cues(words):
        text = "\n".join(_timed_line(line, is_first=line[0] is cue[0]) for line in lines(cue))
        blocks.append(f"{_span(cue, '.')}\n{text}\n")
    return "\n".join(blocks)


def _timed_line(line: Sequence[TimedWord], is_first: bool) -> str:
    text = "" if is_first else f"<{_time(line[0].start_s, '.')}>"
    text += html.escape(line[0].text, quote=False)
    for before, word in pairwise(line):
        said = html.escape(spaced(before.text, word.text), quote=False)
        text += f"<{_time(word.start_s, '.')}>{said}"
    return text


def _span(cue: Sequence[TimedWord], point: str) -> str:
    return f"{_time(cue[0].start_s, point)} --> {_time(cue[-1].end_s, point)}"


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
