"""The text that a model writes token by token, up to the first of a request's stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Writing:
    """Characters from tokens. Characters that may begin a stop string are held back until this is certain.
    is_stopped: whether a stop string came; it and everything after it are left out."""

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self.is_stopped = False
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def more(self, token: bytes, is_end: bool = False) -> str:
        """Return the text that is certain with this token's bytes. is_end: no more come."""
        text = self._held + self._characters.decode(token, is_end)
        if self.is_stopped:
            return ""
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        num_certain = len(text) if is_end else len(text) - self._num_open(text)
        self._held = text[num_certain:]
        return text[:num_certain]

    def _num_open(self, text: str) -> int:
        """Return how many characters at the end may begin a stop string."""
        begun = [num for stop in self.stops for num in range(1, len(stop)) if text.endswith(stop[:num])]
        return max(begun, default=0)
