"""Text on its way to a model that speaks already: how much of it has the tokens that it will have in the end.

    came     "The old man t" │ "old the ch"          settled: what ends where no split of the tokenizer reaches across
    settled  "The old man"   │ " told the"           whatever follows

Byte-level BPE joins letters only within what its split leaves together. Qwen2's, which the families here have, ends a run of
letters where something else than a letter follows, and a digit always; it looks at nothing that came before. NFC joins a
mark with what stands before it, so none is cut off. Text without spaces waits for its next comma.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


class OpenText:
    """`more` of a text -> what is settled by now; `rest` -> what is left at its end. Joined, they are the text without the
    blanks around it. tags: what is a token as a whole, and begins with "[" or "<"."""

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
        """Whether the text can be cut before character `at`."""
        before, after = (unicodedata.category(character)[0] for character in self._held[at - 1 : at + 1])
        if after == "M" or before not in "LN" or (before == after == "L"):
            return False
        return not self._is_in_tag(at)

    def _is_in_tag(self, at: int) -> bool:
        """What stands there may be, or become, a tag."""
        for tag in self._tags:
            start = self._held.rfind(tag[0], max(0, at - len(tag) + 1), at)
            if start >= 0 and tag.startswith(self._held[start : start + len(tag)]):
                return True
        return False
