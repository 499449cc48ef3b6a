"""Pauses that a text asks for: `[pause:1.5s]` and `<break time="500ms"/>` become silence of exactly that
length.

    "One. [pause:1s] Two." ─ stretches ─> "One."  24,000 samples of silence  "Two."

This module does not import torch: HTTP reads the marks of text that arrives while it is spoken.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from zoo.request import BLANK, RequestError

MAX_PAUSE_S = 10.0
MAX_PAUSES_S = (
    60.0  # of one text: silence is sent at once, so a client could otherwise fill the server's memory
)
MAX_MARK_CHARS = 60
HAS_WORD = re.compile(r"[^\W_]")  # a letter or a digit
_TIME = r"(\d{1,6}(?:\.\d{0,6})?|\.\d{1,6}) ?(ms|s)"
MARK = re.compile(rf"""\[pause: ?{_TIME} ?\]|<break {{1,3}}time ?= ?["']{_TIME}["'] ?/?>""", re.IGNORECASE)
_BEGINNINGS = ("[pause:", "<break ")


class Part(NamedTuple):
    """A part of a text, and the silence behind it. `next_part` gives one that is either words or a pause."""

    text: str
    silence_s: float = 0.0


def stretches(text: str) -> list[Part]:
    """Return the text between its pauses, without what has no letter and no digit. The first part is empty:
    its silence comes before all words. Raises RequestError for pauses that are too long."""
    parts, begin = [Part("")], 0
    for mark in MARK.finditer(text):
        _add(parts, text[begin : mark.start()], silence_s(mark))
        begin = mark.end()
    _add(parts, text[begin:], 0.0)
    check_total(sum(part.silence_s for part in parts))
    return parts


def next_part(text: str, is_whole: bool) -> Part:
    """Return the part with which an arriving text begins: words up to the next pause, or a pause. It is empty
    if more text must arrive. is_whole: no more text follows. Raises RequestError."""
    mark = MARK.search(text)
    if mark is None:
        return Part(text if is_whole else text[: _open_mark(text)])
    return Part(mark[0], silence_s(mark)) if mark.start() == 0 else Part(text[: mark.start()])


def is_pause(part: Part) -> bool:
    """Whether a part of `next_part` is a pause."""
    return MARK.match(part.text) is not None


def silence_s(mark: re.Match[str]) -> float:
    """Return the length of a pause. Raises RequestError if it is too long."""
    number, unit = filter(None, mark.groups())
    length_s = float(number) / (1000 if unit.lower() == "ms" else 1)
    if length_s > MAX_PAUSE_S:
        raise RequestError("text", f"text has {mark[0]!r}; a pause lasts up to {MAX_PAUSE_S:g} s")
    return length_s


def check_total(total_s: float) -> None:
    """Raise RequestError if all pauses together are too long."""
    if total_s > MAX_PAUSES_S:
        raise RequestError(
            "text", f"text has {total_s:g} s of pauses; up to {MAX_PAUSES_S:g} s are possible in one text"
        )


def _add(parts: list[Part], text: str, silence_s: float) -> None:
    if HAS_WORD.search(text):
        parts.append(Part(text.strip(BLANK), silence_s))
    else:
        parts[-1] = parts[-1]._replace(silence_s=parts[-1].silence_s + silence_s)


def _open_mark(text: str) -> int:
    """Return where a mark begins that may still be arriving, or the length of the text."""
    at = max(text.rfind("["), text.rfind("<"))
    tail = text[at:].lower()
    may_begin = any(tail.startswith(begin) or begin.startswith(tail) for begin in _BEGINNINGS)
    is_open = at >= 0 and may_begin and len(tail) < MAX_MARK_CHARS and tail[-1] not in "]>"
    return at if is_open else len(text)
