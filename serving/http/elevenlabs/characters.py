"""When the characters of an answer were spoken, in ElevenLabs' form. The characters of a word share its time
evenly, and those between two words share the time between them.

    "Good day."   words: Good 0.0-0.4, day. 0.5-0.9   ─>   G 0.0-0.1, o 0.1-0.2, ..., " " 0.4-0.5, d 0.5-0.6, ...
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from serving.http.elevenlabs.bodies import CharacterAlignment
from serving.http.word_times import Word
from zoo.align.words import words_of


class Alignments(msgspec.Struct):
    """The characters of words as they stand in the request, None if the model read other words; and as they were
    spoken."""

    alignment: CharacterAlignment | None
    normalized_alignment: CharacterAlignment


class Characters:
    """Turns the words of an answer into characters, in order. text: of the request."""

    def __init__(self, text: str):
        self.text = text
        self.is_as_sent = True  # whether all words so far stand in the text
        self._at = 0  # in the text, behind the last word
        self._end_s = 0.0  # of the last word

    def take(self, words: Iterable[Word]) -> Alignments:
        """Return the characters of the next words, with what stands before each."""
        sent, spoken = CharacterAlignment(), CharacterAlignment()
        for word in words:
            gap = self._gap_before(word.word)
            if self.is_as_sent:
                sent.add(gap, self._end_s, word.start_s)
                sent.add(word.word, word.start_s, word.end_s)
            spoken.add(gap, self._end_s, word.start_s)
            spoken.add(word.word, word.start_s, word.end_s)
            self._end_s = word.end_s
        return Alignments(sent if self.is_as_sent else None, spoken)

    def _gap_before(self, word: str) -> str:
        """Return what stands between the last word and this one: in the text, else a space."""
        found = self.text.find(word, self._at) if self.is_as_sent else -1
        gap = self.text[self._at : found]
        if found < 0 or words_of(gap):  # the model read another word
            self.is_as_sent = False
            return " " if self._end_s else ""
        self._at = found + len(word)
        return gap

    def rest(self) -> Alignments | None:
        """Return the characters after the last word, which have no time of their own, or None if there are
        none."""
        rest = self.text[self._at :]
        if not self.is_as_sent or not rest or words_of(rest):
            return None
        made = CharacterAlignment()
        made.add(rest, self._end_s, self._end_s)
        return Alignments(made, made)


def joined(parts: Iterable[Alignments]) -> Alignments:
    """Return all characters of an answer."""
    parts = list(parts)
    sent = [part.alignment for part in parts]
    spoken = joined_one(part.normalized_alignment for part in parts)
    return Alignments(None if None in sent else joined_one(sent), spoken)


def joined_one(parts: Iterable[CharacterAlignment | None]) -> CharacterAlignment:
    whole = CharacterAlignment()
    for part in parts:
        if part is not None:
            whole.characters += part.characters
            whole.character_start_times_seconds += part.character_start_times_seconds
            whole.character_end_times_seconds += part.character_end_times_seconds
    return whole
