"""Long text in pieces, each of which a model speaks well in one pass.

    text ─ sentences ─ clauses ─ words ─ characters ─> pieces of up to `Spec.piece_s` seconds of speech, as even as they can be
           └ each only where what lies between two ends of the kind before is too long

Sentences are found by sentencex (Wikimedia, rules for some 250 languages): it takes nothing away, leaves abbreviations, decimals and
addresses whole, and is linear in the text's length. (pysbd cuts "https://a.b/c?d=1" at the question mark, is quadratic, knows 23
languages, and had its last release in 2021.) Nothing here knows a model or torch.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from sentencex import segment

from zoo.normalize import normalize
from zoo.request import BLANK, Request, RequestError

if TYPE_CHECKING:
    from zoo.contract import Spec

# How long a character takes, in seconds: some 12 letters, 4 Chinese characters, 7 kana or 5 Korean syllables a second. Digits and
# symbols are read as words. That is near enough to say where to cut, and what is no speech of such a text.
LETTER_S, HAN_S, KANA_S, HANGUL_S, DIGIT_S = 1 / 12, 1 / 4, 1 / 7, 1 / 5, 1 / 3
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3041-\u30ff"
_HAS_HAN, _HAS_KANA = re.compile(f"[{_HAN}]"), re.compile(f"[{_KANA}]")
# What is never cut in two: what stands in tags, in brackets or in braces, where it is short.
MARKUP = re.compile(
    r"<(\w{1,30})>[^<]{0,300}</\1>|<[^<>\s]{1,60}>|\[[^\[\]]{1,100}\]|\{[^{}]{1,100}\}|\([^()]{1,100}\)"
)
# behind , ; : with a space, wide ones, Arabic ones, an ellipsis or a dash, and the quotation marks and brackets that close there
CLAUSE_END = re.compile(
    r"(?:[,;:](?=\s)|[\uff0c\uff1b\uff1a\u3001\u060c\u061b\u2026\u2014\u2013])"
    r"[\"'\u201d\u2019\u00bb\u300d\u300f\uff09)\]]*\s*"
)
WORD_END = re.compile(rf"\s+|[{_HAN}{_KANA}]")
_ISO = {
    "arabic": "ar", "bengali": "bn", "chinese": "zh", "danish": "da", "dutch": "nl", "english": "en", "finnish": "fi", "french": "fr",
    "german": "de", "greek": "el", "hindi": "hi", "italian": "it", "japanese": "ja", "korean": "ko", "polish": "pl", "portuguese": "pt",
    "russian": "ru", "spanish": "es", "swedish": "sv", "turkish": "tr", "ukrainian": "uk", "vietnamese": "vi",
}  # fmt: skip


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
    """About how long it takes to say a text, in seconds; 0 for one without letters, digits and symbols."""
    return sum(map(_character_s, text))


def odd_length(audio_s: float, expected_s: float) -> Literal["short", "long"] | None:
    """Whether so much audio can hardly be what was to be said in `expected_s`: a model that ended early, or that found no end."""
    if audio_s < expected_s / 4 - 0.5:
        return "short"
    return "long" if audio_s > 2 * expected_s + 5 else None


def most_s(text: str) -> float:
    """The longest speech of a text that is not cut, for a family whose reference says nothing about it."""
    return 3 * expected_s(text) + 10


# pieces


def pieces_of(request: Request, spec: Spec) -> list[str]:
    """What is spoken one after the other: the text as it is, where one pass holds it or it is to stay whole.

    What stands at the text's start and holds for all of it (`Spec.lead`) stands before each piece. Raises RequestError for
    a text that cannot be normalised.
    """
    text, language = request.text, language_of(request)
    if request.normalize and request.is_open:
        raise RequestError("normalize", "normalize needs all of the text at once: leave it or is_open out")
    if request.normalize:
        text = normalize(text, language)
    is_alone = not (request.is_open or request.turns or request.conversation)
    if spec.piece_s is None or not (request.split_text and is_alone):
        return [text]
    if spec.unsplit and re.search(spec.unsplit, text):
        return [text]
    lead = re.match(spec.lead, text)
    start = lead.end() if lead is not None else 0
    pieces = split(text[start:], spec.piece_s, language)
    if len(pieces) == 1:
        return [text]
    return [text[:start] + piece.strip(BLANK) for piece in pieces]


def language_of(request: Request) -> str:
    """Its ISO code; where the request names none, what the script tells: ja, zh, or else en."""
    name = (request.language or "auto").lower()
    if name != "auto":
        return _ISO.get(name, name)
    if _HAS_KANA.search(request.text):
        return "ja"
    return "zh" if _HAS_HAN.search(request.text) else "en"


def split(text: str, limit_s: float, language: str = "en") -> list[str]:
    """Pieces that joined are the text, each of up to `limit_s` by `expected_s`, which must be a second or more."""
    assert limit_s >= 1, f"pieces of {limit_s} s"
    levels = (
        lambda text: _kept_whole(text, segment(language, text)),
        lambda text: _kept_whole(text, cut(text, CLAUSE_END)),
        lambda text: _kept_whole(text, cut(text, WORD_END)),
        _characters,
    )
    return _split(text, limit_s, levels)


def _split(text: str, limit_s: float, levels: tuple[Callable[[str], list[str]], ...]) -> list[str]:
    if expected_s(text) <= limit_s:
        return [text]
    parts, finer = levels[0], levels[1:]
    return _pack([piece for part in parts(text) for piece in _split(part, limit_s, finer)], limit_s)


def _pack(parts: list[str], limit_s: float) -> list[str]:
    """Neighbours joined up to `limit_s`: no more pieces than that takes, and none much shorter than the others."""
    lengths = [expected_s(part) for part in parts]
    even_s = sum(lengths) / math.ceil(sum(lengths) / limit_s)
    packed, packed_s = [""], [0.0]
    for part, length in zip(parts, lengths, strict=True):
        # what is not spoken needs no room, and is no piece of its own
        is_nearer = packed_s[-1] == 0 or packed_s[-1] + length / 2 <= even_s
        if length == 0 or (is_nearer and packed_s[-1] + length <= limit_s):
            packed[-1] += part
            packed_s[-1] += length
        else:
            packed.append(part)
            packed_s.append(length)
    if len(packed) > 1 and packed_s[-1] + packed_s[-2] <= limit_s:
        packed[-2:] = ["".join(packed[-2:])]
    return packed


def cut(text: str, end: re.Pattern[str]) -> list[str]:
    """The text cut behind each match."""
    stops = [0, *(match.end() for match in end.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(stops) if a < b]


def _kept_whole(text: str, parts: Iterable[str]) -> list[str]:
    """The parts of a text, those joined between which a markup would be cut."""
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
    """With the marks that belong to each, as long as those are few."""
    clusters: list[str] = []
    for character in text:
        is_mark = unicodedata.category(character)[0] == "M" or character == "\u200d"
        if clusters and (is_mark or clusters[-1][-1] == "\u200d") and len(clusters[-1]) < 8:
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters
