"""Text to the ids of the joint vocabulary."""

from __future__ import annotations

from pathlib import Path

from zoo.checkpoint.json_files import read_json
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.opuslm.config import YAML, Vocabulary


class TextTokenizer:
    """Text -> ids. The reference looks each token up by its string; here the block of text tokens must be in
    the tokenizer's own order, which is the same. Raises ValueError."""

    def __init__(self, path: Path, vocabulary: Vocabulary):
        self.first_word = vocabulary.first_word
        self.plain = PlainTokenizer(path, (), len(vocabulary.words), "OpusLM")
        words = dict(enumerate(vocabulary.words))
        for token, i in _tokens(path).items():
            found = words.get(i)
            if found not in (token, f"{token}_<espnet>"):
                raise ValueError(
                    f"{path} has {token!r} as token {i}, and {YAML} has {found!r}: they do not belong together"
                )

    def __call__(self, text: str) -> list[int]:
        return [self.first_word + i for i in self.plain(text)]


def _tokens(path: Path) -> dict[str, int]:
    """Return the tokens of the model of a tokenizer.json, without the added ones. Raises ValueError."""
    model = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        raise ValueError(f"{path} has no vocabulary by token")
    return vocabulary
