"""The languages of Chatterbox Multilingual, and the spelling that the model reads for each.

Source: chatterbox-tts 0.1.7, mtl_tts.py (SUPPORTED_LANGUAGES) and models/tokenizers/tokenizer.py; for the first
Multilingual, which keeps case and accents, the latter at a9742ee.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

from zoo.request import RequestError

LANGUAGES = (
    *("ar", "da", "de", "el", "en", "es", "fi", "fr", "he", "hi", "it", "ja", "ko"),
    *("ms", "nl", "no", "pl", "pt", "ru", "sv", "sw", "tr", "zh"),
)
CANGJIE_FILE = "Cangjie5_TC.json"
SYLLABLE = re.compile("[\uac00-\ud7a3]")  # of Hangul
KANJI = ("\u4e00", "\u9fff")


def in_language(text: str, language: str, directory: Path, keeps_case: bool = False) -> str:
    """Return a text in lower case with its accents apart, unless it keeps its case, in the language's spelling, behind
    its tag.

    language: one of LANGUAGES, or "" for no tag. Raises RequestError if a package for the language is
    missing.
    """
    text = text if keeps_case else normalize("NFKD", text.lower())
    if language in _SPELLINGS:
        text = _SPELLINGS[language](text, directory)
    return f"[{language}]{text}" if language else text


def _korean(text: str, directory: Path) -> str:
    return SYLLABLE.sub(lambda found: normalize("NFD", found[0]), text).strip()


def _japanese(text: str, directory: Path) -> str:
    """Replace kanji by hiragana."""
    words = []
    for part in _kakasi().convert(text):
        original, hiragana = part["orig"], part["hira"]
        if any(KANJI[0] <= character <= KANJI[1] for character in original):
            words.append(f" {hiragana}" if hiragana[:1] in ("は", "へ") else hiragana)
        else:
            words.append(original)
    return normalize("NFKD", "".join(words))


@cache
def _kakasi() -> Any:
    try:
        import pykakasi
    except ImportError:
        raise RequestError("language", _missing("Japanese", "pykakasi")) from None
    return pykakasi.kakasi()


def _chinese(text: str, directory: Path) -> str:
    """Split a text into words, and replace each character by its Cangjie code."""
    codes = cangjie(directory / CANGJIE_FILE)
    words = " ".join(_segmenter().cut(text))
    return "".join(
        "".join(f"[cj_{key}]" for key in codes[character]) + "[cj_.]"
        if category(character) == "Lo" and character in codes
        else character
        for character in words
    )


@cache
def _segmenter() -> Any:
    try:
        from spacy_pkuseg import pkuseg
    except ImportError:
        raise RequestError("language", _missing("Chinese", "spacy-pkuseg")) from None
    return pkuseg()


@cache
def cangjie(path: Path) -> dict[str, str]:
    """Return a code for each character: its keys, then its place among the characters with the same keys."""
    try:
        rows = [tuple(row.split("\t")[:2]) for row in json.loads(path.read_text(encoding="utf-8"))]
        keys = dict(rows)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RequestError("language", f"Chinese needs {path.name}, which cannot be read: {error}") from None
    places: dict[tuple[str, ...], int] = {}
    seen: dict[str, int] = {}
    for row in rows:
        places.setdefault(row, seen.get(row[1], 0))
        seen[row[1]] = seen.get(row[1], 0) + 1
    return {character: f"{code}{places[character, code] or ''}" for character, code in keys.items()}


def _missing(language: str, package: str) -> str:
    return f"{language} needs the package {package}, which is not installed: pip install {package}"


_SPELLINGS: dict[str, Callable[[str, Path], str]] = {"ja": _japanese, "ko": _korean, "zh": _chinese}
