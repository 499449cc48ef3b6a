"""Text that arrives while a model speaks: find the part whose tokens no later text can change.

    arrived  "The old man t" │ "old the ch"
    settled  "The old man"   │ " told the"           ends where the tokenizer always splits, whatever follows

Byte-level BPE joins bytes only within the words of its pre-tokenizer. That of Qwen2, which the families here
use, ends a run of letters before any other character, and ends a word after each digit; it never looks back.
NFC joins a mark with the character before it, so the text is never cut before a mark. Text without spaces
waits for its next comma.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


class OpenText:
    """A text that arrives in parts. `more` adds a part and returns the newly settled text; `rest` returns the
    remainder. Joined, the results are the text without the white space around it. tags: strings that are a
    single token and begin with "[" or "<"."""

    def __init__(self, tags: Sequence[str] = ()):
        self._tags = tags
        self._held = ""
        self._is_begun = False

    def more(self, text: str) -> str:
        seen = len(self._held)
        self._held += text
        if not self._is_begun:
            self._held = self._held.lstrip()
        cuts = (at for at in range(len(self._held) - 1, max(seen, 1) - 1, -1) if self._is_cut(at))
        return self._take(next(cuts, 0))

    def rest(self) -> str:
        return self._take(len(self._held)).rstrip()

    def _take(self, stop: int) -> str:
        taken, self._held = self._held[:stop], self._held[stop:]
        self._is_begun |= bool(taken)
        return taken

    def _is_cut(self, at: int) -> bool:
        """Return whether the text can be cut before character `at`."""
        before, after = (unicodedata.category(character)[0] for character in self._held[at - 1 : at + 1])
        if after == "M" or before not in "LN" or (before == after == "L"):
            return False
        return not self._is_in_tag(at)

    def _is_in_tag(self, at: int) -> bool:
        """Return whether a cut before character `at` could split a tag, complete or still arriving."""
        for tag in self._tags:
            start = self._held.rfind(tag[0], max(0, at - len(tag) + 1), at)
            if start >= 0 and tag.startswith(self._held[start : start + len(tag)]):
                return True
        return False
