"""Text to the ids of the joint vocabulary, and back to bytes."""

from __future__ import annotations

from pathlib import Path

from zoo.checkpoint.json_files import read_json
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.opuslm.ids import YAML, Vocabulary
from zoo.text.bpe import byte_symbols


class TextTokenizer:
    """Text -> ids. The reference looks each token up by its string; here the block of text tokens must be in
    the tokenizer's own order, which is the same. Raises ValueError."""

    def __init__(self, path: Path, vocabulary: Vocabulary):
        self.first_word = vocabulary.first_word
        self.plain = PlainTokenizer(path, (), vocabulary.num_words, "OpusLM")
        words, tokens = dict(enumerate(vocabulary.words)), _tokens(path)
        for token, i in tokens.items() if words else ():
            found = words.get(i)
            if found not in (token, f"{token}_<espnet>"):
                raise ValueError(
                    f"{path} has {token!r} as token {i}, and {YAML} has {found!r}: they do not belong together"
                )
        special = set(self.plain.special.values())
        self.tokens = {i: token for token, i in tokens.items() if i not in special}
        self.bytes = {symbol: byte for byte, symbol in byte_symbols().items()}

    def __call__(self, text: str) -> list[int]:
        return [self.first_word + i for i in self.plain(text)]

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of an id. A special token has none. A token that is not written in symbols of
        bytes stands for itself."""
        symbols = self.tokens.get(token - self.first_word, "")
        if all(symbol in self.bytes for symbol in symbols):
            return bytes(self.bytes[symbol] for symbol in symbols)
        return symbols.encode()


def _tokens(path: Path) -> dict[str, int]:
    """Return the tokens of the model of a tokenizer.json, without the added ones. Raises ValueError."""
    model = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        raise ValueError(f"{path} has no vocabulary by token")
    return vocabulary
