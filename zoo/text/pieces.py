"""Split long text into pieces that a model speaks well in one pass.

    text ─ sentences ─ clauses ─ words ─ characters ─> pieces of up to `Spec.piece_s` seconds of speech, about equally long
           └ a part is split at the next finer level only if it is too long

sentencex (Wikimedia, rules for some 250 languages) finds the sentences. It removes nothing, does not split
abbreviations, decimals and addresses, and takes time linear in the text's length. (pysbd splits
"https://a.b/c?d=1" at the question mark, is quadratic, knows 23 languages, and had its last release in 2021.)
This module knows no model and does not import torch.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Literal

from sentencex import segment

from zoo.request import Request
from zoo.text.languages import ISO
from zoo.text.pauses import HAS_WORD

# Seconds per character: about 12 letters, 4 Chinese characters, 7 kana or 5 Korean syllables a second. Digits
# and symbols are spoken as words. This is accurate enough to choose where to split, and to notice speech that
# cannot be the text's.
LETTER_S, HAN_S, KANA_S, HANGUL_S, DIGIT_S = 1 / 12, 1 / 4, 1 / 7, 1 / 5, 1 / 3
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3041-\u30ff"
_HAS_HAN, _HAS_KANA = re.compile(f"[{_HAN}]"), re.compile(f"[{_KANA}]")
# Never split inside these: tagged text, tags, brackets and braces, if they are short.
MARKUP = re.compile(
    r"<(\w{1,30})>[^<]{0,300}</\1>|<[^<>\s]{1,60}>|\[[^\[\]]{1,100}\]|\{[^{}]{1,100}\}|\([^()]{1,100}\)"
)
# the end of a clause: , ; : before a space, their wide and Arabic forms, an ellipsis or a dash; then closing
# quotation marks and brackets, and spaces
CLAUSE_END = re.compile(
    r"(?:[,;:](?=\s)|[\uff0c\uff1b\uff1a\u3001\u060c\u061b\u2026\u2014\u2013])"
    r"[\"'\u201d\u2019\u00bb\u300d\u300f\uff09)\]]*\s*"
)
WORD_END = re.compile(rf"\s+|[{_HAN}{_KANA}]")


@cache
def _character_s(character: str) -> float:
    kind = unicodedata.category(character)[0]
    if _HAS_HAN.match(character):
        return HAN_S
    if _HAS_KANA.match(character):
        return KANA_S
    if "\uac00" <= character <= "\ud7a3":
        return HANGUL_S
    return {"L": LETTER_S, "M": LETTER_S, "N": DIGIT_S, "S": DIGIT_S}.get(kind, 0.0)


def expected_s(text: str) -> float:
    """Return roughly how long a text takes to speak, in seconds; 0 without letters, digits and symbols."""
    # sum() rounds in the middle, and not in the same way in all versions of Python
    return math.fsum(map(_character_s, text))


def odd_length(audio_s: float, expected_s: float) -> Literal["short", "long"] | None:
    """Return whether `audio_s` is too "short" or too "long" for a text of `expected_s`, or None. The model
    then stopped early, or did not find the end."""
    if audio_s < expected_s / 4 - 0.5:
        return "short"
    return "long" if audio_s > 2 * expected_s + 5 else None


def most_s(text: str) -> float:
    """Return the longest speech of a text that is not split, for families whose reference implementation has
    no limit."""
    return 3 * expected_s(text) + 10


def language_of(request: Request) -> str:
    """Return the ISO code of a request's language. Without a language, the script decides: ja, zh, or else
    en."""
    name = (request.language or "auto").lower()
    if name != "auto":
        return ISO.get(name, name)
    if _HAS_KANA.search(request.text):
        return "ja"
    return "zh" if _HAS_HAN.search(request.text) else "en"


def split(text: str, limit_s: float, language: str = "en") -> list[str]:
    """Split a text into pieces of at most `limit_s` seconds of `expected_s`; joined, they are the text.
    limit_s: at least 1."""
    assert limit_s >= 1, f"pieces of {limit_s} s"
    levels = (
        lambda text: _kept_whole(text, segment(language, text)),
        lambda text: _kept_whole(text, cut(text, CLAUSE_END)),
        lambda text: _kept_whole(text, cut(text, WORD_END)),
        _characters,
    )
    return _split(text, limit_s, levels)


def sentences(text: str, language: str = "en") -> list[str]:
    """Return the sentences of a text; joined, they are the text. One without a letter or a digit belongs to
    the one before it."""
    found: list[str] = []
    for sentence in _kept_whole(text, segment(language, text)):
        if found and not (HAS_WORD.search(sentence) and HAS_WORD.search(found[-1])):
            found[-1] += sentence
        else:
            found.append(sentence)
    return found


def _split(text: str, limit_s: float, levels: tuple[Callable[[str], list[str]], ...]) -> list[str]:
    if expected_s(text) <= limit_s:
        return [text]
    parts, finer = levels[0], levels[1:]
    return _pack([piece for part in parts(text) for piece in _split(part, limit_s, finer)], limit_s)


def _pack(parts: list[str], limit_s: float) -> list[str]:
    """Join neighbours up to `limit_s` into as few pieces as possible, about equally long."""
    lengths = [expected_s(part) for part in parts]
    all_s = math.fsum(lengths)
    even_s = all_s / math.ceil(all_s / limit_s)
    packed, packed_s = [""], [0.0]
    for part, length in zip(parts, lengths, strict=True):
        # silent parts, such as white space, never form a piece
        is_silent = length == 0 or packed_s[-1] == 0
        is_nearer = packed_s[-1] + length / 2 <= even_s
        if is_silent or (is_nearer and packed_s[-1] + length <= limit_s):
            packed[-1] += part
            packed_s[-1] += length
        else:
            packed.append(part)
            packed_s.append(length)
    if len(packed) > 1 and packed_s[-1] + packed_s[-2] <= limit_s:
        packed[-2:] = ["".join(packed[-2:])]
    return packed


def cut(text: str, end: re.Pattern[str]) -> list[str]:
    """Cut the text after each match."""
    stops = [0, *(match.end() for match in end.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(stops) if a < b]


def _kept_whole(text: str, parts: Iterable[str]) -> list[str]:
    """Join the parts of a text between which a markup would be split."""
    inside = [(match.start(), match.end()) for match in MARKUP.finditer(text)]
    joined, stop, at = list[str](), 0, 0
    for part in parts:
        is_inside = at < len(inside) and inside[at][0] < stop < inside[at][1]
        joined.append(joined.pop() + part if is_inside else part)
        stop += len(part)
        while at < len(inside) and inside[at][1] <= stop:
            at += 1
    return joined


def _characters(text: str) -> list[str]:
    """Return the characters of a text, each with its combining marks (at most 8 code points)."""
    clusters: list[str] = []
    for character in text:
        is_mark = unicodedata.category(character)[0] == "M" or character == "\u200d"
        if clusters and (is_mark or clusters[-1][-1] == "\u200d") and len(clusters[-1]) < 8:
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters
