"""How words are spoken: a dictionary replaces terms of a text by their respelling.

    "nginx" -> "engine x"      "Ask nginx." ─> "Ask engine x."

A term matches whole words. The longest term that matches wins. A term without capital letters matches in any
case, any other term only as it is written. Replaced text is not read again, and text in tags and square
brackets stays as it is. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from zoo.text.languages import code_of

MAX_TERM_CHARS, MAX_SAY_CHARS = 100, 200
MAX_ENTRIES = 10_000
# Pauses, and the tags of models, such as <laugh> and [soft tone].
MARKUP = re.compile(r"</?[\w|!][^<>\n]{0,80}>|\[[^\[\]\n]{1,80}\]")
_OPEN_MARKUP = re.compile(r"<(?:/?[\w|!][^<>\n]{0,80}|/)?|\[[^\[\]\n]{0,80}")
# Scripts whose words have no spaces between them, or carry endings: any two characters are a boundary.
_SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\uffef\U00020000-\U0003ffff]")


class Pronunciation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An entry of a dictionary. language, voice: the entry is for requests with this language (a name or a
    code) or voice; None: for all."""

    term: Annotated[str, Meta(min_length=1, max_length=MAX_TERM_CHARS)]
    say: Annotated[str, Meta(max_length=MAX_SAY_CHARS)]
    language: Annotated[str, Meta(max_length=256)] | None = None
    voice: Annotated[str, Meta(max_length=256)] | None = None

    def is_for(self, language: str | None, voice: str | None) -> bool:
        is_language = self.language is None or (
            language is not None and code_of(self.language) == code_of(language)
        )
        return is_language and self.voice in (None, voice)


Entries = Annotated[list[Pronunciation], Meta(max_length=MAX_ENTRIES)]
_file = msgspec.json.Decoder(Entries)


def read_file(path: str | Path) -> list[Pronunciation]:
    """Return the entries of a JSON file. Raises ValueError."""
    try:
        return _file.decode(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"pronunciations {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        form = '[{"term": "nginx", "say": "engine x"}]'
        raise ValueError(f"pronunciations {path} must be a JSON list such as {form}: {error}") from None


class Lexicon:
    """The entries that hold for one request. Earlier ones win over later ones with the same term."""

    def __init__(self, entries: Iterable[Pronunciation]):
        self._layers: list[tuple[dict[str, str], dict[str, str]]] = []  # as written; in any case
        self._add(entries)

    @classmethod
    def of(
        cls,
        own: Iterable[Pronunciation],
        shared: Iterable[Pronunciation],
        language: str | None,
        voice: str | None,
    ) -> Lexicon | None:
        """Return the lexicon of a request, whose own entries win over shared ones; None if it has none."""
        layers = [[entry for entry in each if entry.is_for(language, voice)] for each in (own, shared)]
        if not any(layers):
            return None
        lexicon = cls(layers[0])
        lexicon._add(layers[1])
        return lexicon

    def _add(self, entries: Iterable[Pronunciation]) -> None:
        written: dict[str, str] = {}
        folded: dict[str, str] = {}
        for entry in entries:
            terms = folded if entry.term == entry.term.lower() else written
            terms.setdefault(entry.term, entry.say)
        self._layers.append((written, folded))

    def said(self, text: str) -> str:
        """Return a whole text with its terms replaced."""
        reader = Reader(self)
        return reader.more(text) + reader.rest()

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths of the terms, longest first."""
        return sorted({len(term) for terms in self._all_terms() for term in terms}, reverse=True)

    @cached_property
    def _beginnings(self) -> tuple[frozenset[str], frozenset[str]]:
        """All beginnings of terms, whole ones included: as written, and in any case."""
        written = (term for terms, _ in self._layers for term in terms)
        folded = (term for _, terms in self._layers for term in terms)
        begun = ((term[: i + 1] for term in each for i in range(len(term))) for each in (written, folded))
        return frozenset(next(begun)), frozenset(next(begun))

    def _all_terms(self) -> Iterator[dict[str, str]]:
        for layer in self._layers:
            yield from layer

    def begins(self, text: str) -> bool:
        """Whether a term begins with the text."""
        written, folded = self._beginnings
        return len(text) <= self.lengths[0] and (text in written or text.lower() in folded)

    def spoken(self, term: str) -> str | None:
        """Return how a term is spoken; None if it is not in the lexicon."""
        for written, folded in self._layers:
            say = written.get(term)
            say = folded.get(term.lower()) if say is None else say
            if say is not None:
                return say
        return None


class Reader:
    """Replaces terms in a text that arrives in parts. `more` takes a part and returns what can no longer
    change, `rest` what is left at the end. The result depends on the text alone."""

    def __init__(self, lexicon: Lexicon):
        self._lexicon = lexicon
        self._held = ""
        self._before = " "  # the character before `_held`

    def more(self, text: str) -> str:
        return self._read(self._held + text, is_whole=False)

    def rest(self) -> str:
        return self._read(self._held, is_whole=True)

    def _read(self, text: str, is_whole: bool) -> str:
        said: list[str] = []
        at = 0
        while at < len(text) and (is_whole or not self._may_change(text, at)):
            words, end = self._next(text, at)
            said.append(words)
            at, self._before = end, text[end - 1]
        self._held = text[at:]
        return "".join(said)

    def _may_change(self, text: str, at: int) -> bool:
        """Whether more text could make a longer term or a tag of what begins here."""
        if _OPEN_MARKUP.fullmatch(text, at):
            return True
        is_near_end = len(text) - at <= self._lexicon.lengths[0]
        return is_near_end and is_boundary(self._before, text[at]) and self._lexicon.begins(text[at:])

    def _next(self, text: str, at: int) -> tuple[str, int]:
        """Return the spoken form of the tag, the term or the character that begins at `at`, and its end."""
        if (mark := MARKUP.match(text, at)) is not None:
            return mark[0], mark.end()
        if is_boundary(self._before, text[at]):
            for end in (at + length for length in self._lexicon.lengths if at + length <= len(text)):
                is_word = end == len(text) or is_boundary(text[end - 1], text[end])
                if is_word and (say := self._lexicon.spoken(text[at:end])) is not None:
                    return say, end
        return text[at], at + 1


def is_boundary(before: str, after: str) -> bool:
    """Whether a word may end between two characters."""
    are_letters = (before.isalnum() or before == "_") and (after.isalnum() or after == "_")
    return not are_letters or bool(_SPACELESS.match(before) or _SPACELESS.match(after))
