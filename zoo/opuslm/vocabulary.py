"""Text to the ids of the joint vocabulary, and back to bytes."""

from __future__ import annotations

from pathlib import Path

from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.opuslm.ids import YAML, Vocabulary
from zoo.text.bpe import in_bytes


class TextTokenizer:
    """Text -> ids. The reference looks each token up by its string; here the block of text tokens must be in
    the tokenizer's own order, which is the same. Raises ValueError."""

    def __init__(self, path: Path, vocabulary: Vocabulary):
        self.first_word = vocabulary.first_word
        self.plain = PlainTokenizer(path, (), vocabulary.num_words, "OpusLM")
        listed, words = dict(enumerate(vocabulary.words)), self.plain.words
        for token, i in sorted(words.items()) if listed else ():
            found = listed.get(i)
            if found not in (token, f"{token}_<espnet>"):
                raise ValueError(
                    f"{path} has {token!r} as token {i}, and {YAML} has {found!r}: they do not belong together"
                )
        special = set(self.plain.special.values())
        self.tokens = {i: token for token, i in words.items() if i not in special}

    def __call__(self, text: str) -> list[int]:
        return [self.first_word + i for i in self.plain(text)]

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of an id. A special token has none. A token that is not written in symbols of
        bytes stands for itself."""
        symbols = self.tokens.get(token - self.first_word, "")
        found = in_bytes(symbols)
        return symbols.encode() if found is None else found
