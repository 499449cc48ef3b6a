"""Text on its way to a model that wants it as a whole: sentence by sentence, each as soon as the next one has begun.

What is cut follows from the text alone, never from when it came: equal texts are equal requests.
"""

from __future__ import annotations

import re

from sentencex import segment

MIN_CHARS = 12  # a shorter sentence is spoken with the next one: models say a lone word badly
MAX_CHARS = 400  # beyond, a text without an end is cut at a clause, or a blank
CLAUSE_END = re.compile(r"[,;:\u2014](?=\s)|[\uff0c\uff1b\uff1a\u3001]")
HAS_WORD = re.compile(r"\w")


class Sentences:
    """`more` of a text -> the sentences that are over; `rest` -> what is left at its end."""

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
        rest, self._held = self._held.strip(), ""
        return [rest] if HAS_WORD.search(rest) else []

    def _stop(self) -> int:
        """Where the first piece ends; 0: it may go on. What follows a sentence tells that it is over."""
        stop = 0
        for sentence in list(segment("en", self._held))[
            :-1
        ]:  # the rules are those of a script, not a language
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
