"""A checkpoint's tokenizer.json, read so that nothing a client writes can become a special token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from zoo.checkpoint.json_files import read_json


class PlainTokenizer:
    """Text -> ids, without added tokens and without the tokenizer's own prefix and suffix.

    special: the added tokens, by their text. Raises ValueError if a `needed` one is missing, or if an id is
    not below `rows`, the number of the model's text embeddings.
    """

    def __init__(self, path: Path, needed: Iterable[str], rows: int, model: str):
        content = read_json(path)
        try:
            self.special = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
            self._tokenizer = Tokenizer.from_str(
                json.dumps(content | {"added_tokens": [], "post_processor": None})
            )
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        if missing := [token for token in needed if token not in self.special]:
            raise ValueError(f"{path} lacks tokens of {model}: {', '.join(missing[:8])}")
        most = max([*self.special.values(), self._tokenizer.get_vocab_size() - 1])
        if most >= rows:
            raise ValueError(f"{path} has ids up to {most}, but the model has {rows} text rows")

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
