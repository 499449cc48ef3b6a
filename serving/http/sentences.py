"""Split incoming text into sentences, for models that need the text of a request as a whole. A sentence is
ready as soon as the next one has begun.

The cuts depend on the text alone, not on when its parts arrived, so equal texts become equal requests.
"""

from __future__ import annotations

import math
import re

from sentencex import segment

from zoo.text.markdown import OutsideCode, spoken
from zoo.text.pronunciations import Lexicon

MIN_CHARS = 12  # a shorter sentence is spoken with the next one: models speak single words badly
MAX_CHARS = 400  # a longer text without a sentence end is cut at a clause or a space
LETTER_S, WIDE_S = 1 / 12, 1 / 4  # rough speaking time of a letter and of a wide (CJK) character
CLAUSE_END = re.compile(r"[,;:\u2014](?=\s)|[\uff0c\uff1b\uff1a\u3001]")
# the end of a sentence in a pass, with up to three closing quotation marks or brackets
SENTENCE_END = re.compile(r"[.!?\u2026][\"'\u201d\u2019)\]]{0,3}\s|[\u3002\uff01\uff1f]")
MAX_MARK_CHARS = 4  # without the space
HAS_WORD = re.compile(r"\w")


class Sentences:
    """Splits a text. `more` takes text and returns the sentences that are complete; `rest` returns what is
    left at the end."""

    def __init__(self) -> None:
        self._held = ""

    def more(self, text: str) -> list[str]:
        self._held += text
        ready: list[str] = []
        while (stop := self._stop()) > 0:
            ready.append(self._held[:stop].strip())
            self._held = self._held[stop:]
        return ready

    def rest(self) -> list[str]:
        rest = self._held.strip()
        self._held = ""
        return [rest] if HAS_WORD.search(rest) else []

    def _stop(self) -> int:
        """Return where the first piece ends, or 0 if it may go on. A sentence is over only once more text
        follows it."""
        stop = 0
        # "en" fits all languages: the rules depend on the script.
        for sentence in list(segment("en", self._held))[:-1]:
            stop += len(sentence)
            said = self._held[:stop].strip()
            if len(said) >= MIN_CHARS and HAS_WORD.search(said):
                return min(stop, self._cut())
        return self._cut() if len(self._held) > MAX_CHARS else 0

    def _cut(self) -> int:
        if len(self._held) <= MAX_CHARS:
            return len(self._held)
        head = self._held[:MAX_CHARS]
        clauses = [match.end() for match in CLAUSE_END.finditer(head)]
        return clauses[-1] if clauses else head.rfind(" ") + 1 or MAX_CHARS


class MarkdownSentences(Sentences):
    """Splits a Markdown text, and returns the words of its sentences. A sentence without words is left
    out. lexicon: replaces terms of the words."""

    def __init__(self, lexicon: Lexicon | None = None) -> None:
        super().__init__()
        self._lexicon = lexicon
        self._text = OutsideCode()

    def more(self, text: str) -> list[str]:
        return self._words(super().more(self._text.more(text)))

    def rest(self) -> list[str]:
        """Return what is left at the end, or before a pause."""
        last = super().more(self._text.rest())
        self._text = OutsideCode()
        return self._words(last + super().rest())

    def _words(self, sentences: list[str]) -> list[str]:
        words = map(spoken, sentences)
        said = words if self._lexicon is None else map(self._lexicon.said, words)
        return [sentence for sentence in said if HAS_WORD.search(sentence)]


class PassEnd:
    """Finds the first sentence end after `piece_s` seconds of speech, in a text that arrives in portions.
    None: no end. The result depends on the text alone."""

    def __init__(self, piece_s: float | None):
        self._left_s = math.inf if piece_s is None else piece_s
        self._tail = ""  # the last characters, since a sentence's last mark may be among them

    def find(self, text: str) -> int | None:
        """Return how many characters of the next text belong to the pass; None: all, and the pass goes on."""
        at = 0
        while at < len(text) and self._left_s > 0:
            self._left_s -= said_s(text[at])
            at += 1
        before = (self._tail + text[:at])[-MAX_MARK_CHARS:]
        self._tail = (self._tail + text)[-MAX_MARK_CHARS:]
        if self._left_s > 0:
            return None
        ends = (match.end() - len(before) for match in SENTENCE_END.finditer(before + text[at:]))
        return next((at + end for end in ends if end > 0), None)


def said_s(text: str) -> float:
    """Return about how many seconds a text takes to say."""
    return sum(WIDE_S if "\u2e80" <= character <= "\uffef" else LETTER_S for character in text)
