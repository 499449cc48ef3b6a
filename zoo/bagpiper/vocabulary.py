"""Text to ids of the joint vocabulary, and ids to bytes.

ESPnet leaves word 0 ("!" in Qwen's vocabulary) at 0 in a prompt, which is the pad: it adds the first id only to
values that are not zero. So does this module. A "!" that the model writes has its own id.
"""

from __future__ import annotations

import re
from pathlib import Path

from zoo.bagpiper.config import FIRST_WORD, PAD, TITLE, Config
from zoo.checkpoint.json_files import read_json
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.text.bpe import in_bytes

_HIDDEN = re.compile(r"<\|.*\|>")


class TextTokenizer:
    """Text -> ids. No text becomes a special token. Raises ValueError.

    A converted checkpoint's tokenizer.json counts from FIRST_WORD on, and has the special tokens and the codes
    among its words.
    """

    def __init__(self, path: Path, config: Config):
        self.first = FIRST_WORD if config.is_converted else 0
        rows = config.num_ids if config.is_converted else config.num_words
        self.plain = PlainTokenizer(path, (), rows, TITLE)
        self.raw = {
            id: b"" if _HIDDEN.fullmatch(token) else in_bytes(token) or b""
            for token, id in self.plain.words.items()
        }
        added = {token["id"]: token for token in read_json(path).get("added_tokens", ())}
        self.added = {
            id: b"" if token.get("special", True) else token["content"].encode()
            for id, token in added.items()
        }

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text of a prompt."""
        words = [id - self.first for id in self.plain(text)]
        return [PAD if word == 0 else FIRST_WORD + word for word in words]

    def bytes_of(self, word: int) -> bytes:
        """Return the UTF-8 bytes of a word, by its index; none for a special token."""
        id = word + self.first
        return self.added[id] if id in self.added else self.raw.get(id, b"")
