"""A checkpoint's tokenizer.json, read so that nothing a client writes can become a special token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from zoo.checkpoint.json_files import read_json

# parts of a file that add tokens to a text or drop some; training leaves truncation and padding behind
UNUSED: dict[str, object] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}


def read(path: Path) -> tuple[Tokenizer, dict[str, int]]:
    """Return a file's tokenizer without UNUSED, and its added tokens, text -> id. Raises ValueError."""
    content = read_json(path)
    try:
        special = {token["content"]: int(token["id"]) for token in content.get("added_tokens", ())}
        return Tokenizer.from_str(json.dumps(content | UNUSED)), special
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer: {error}") from None


class PlainTokenizer:
    """Text -> ids. No text becomes an added token, and none is cut, padded or put between other tokens.

    special: the ids of the added tokens, by their text. Raises ValueError if a `needed` one is missing, or if
    an id is not below `rows`, the number of the model's text embeddings.
    """

    def __init__(self, path: Path, needed: Iterable[str], rows: int, model: str):
        self._tokenizer, self.special = read(path)
        if missing := [token for token in needed if token not in self.special]:
            raise ValueError(f"{path} lacks tokens of {model}: {', '.join(missing[:8])}")
        most = max([-1, *self.special.values(), *self.words.values()])
        if most >= rows:
            raise ValueError(f"{path} has ids up to {most}, but the model has {rows} text rows")

    @property
    def words(self) -> dict[str, int]:
        """The ids of all other tokens, by their text."""
        return self._tokenizer.get_vocab()

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
