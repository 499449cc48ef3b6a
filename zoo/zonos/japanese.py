"""Japanese as readings in katakana, which espeak-ng can read. It cannot read kanji.

    "今日は2024年です。" ─ numbers in kanji ─ Sudachi ─> "キョウ ハ ニセンニジュウヨン ネン デス 。"

The packages are an extra, because Sudachi's dictionary has 200 MB. An analyser may be used by one thread at a
time. Source: Zyphra/Zonos at bc40d98, conditioning.py.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from typing import Any
from unicodedata import normalize

from zoo.request import RequestError

EXTRA = "pip install -e '.[japanese]'"
EDITIONS = ("full", "core", "small")  # of the dictionary; the reference has the full one
MAX_DIGITS = 72  # of a number that has a name in kanji; Sudachi reads longer ones digit by digit
MAX_BYTES = 49_149  # Sudachi's limit


def readings(text: str) -> str:
    """Return the readings of a text's words, with spaces in between. Raises RequestError."""
    number2kanji, analyser, split = packages()
    text = normalize("NFKC", text)
    text = re.sub(
        r"\d+", lambda match: number2kanji(int(match[0])) if len(match[0]) <= MAX_DIGITS else match[0], text
    )
    if len(text.encode()) > MAX_BYTES:
        raise RequestError("text", f"text has {len(text.encode())} bytes; Sudachi reads {MAX_BYTES} at once")
    return " ".join(word.reading_form() for word in analyser.tokenize(text, split))


@cache
def packages() -> tuple[Any, Any, Any]:
    """Return kanjize's function, Sudachi's analyser, and its mode for the shortest words."""
    try:
        from kanjize import number2kanji
        from sudachipy import Dictionary, SplitMode
    except ImportError as error:
        raise RequestError("language", _missing(str(error.name))) from None
    edition = next((name for name in EDITIONS if find_spec(f"sudachidict_{name}")), None)
    if edition is None:
        raise RequestError("language", _missing("sudachidict_core"))
    return number2kanji, Dictionary(dict=edition).tokenizer(), SplitMode.A


def _missing(package: str) -> str:
    return f"Zonos reads Japanese through Sudachi, and {package} is not installed: {EXTRA}"
