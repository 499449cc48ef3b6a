"""The ids of a checkpoint, and its text tokenizer. Special tokens are known by their names: small checkpoints have
other ids than the published one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zoo.checkpoint.json_files import read_json
from zoo.text.tiktoken import read_ranks, tokenizer

RANKS, TOKENS = "tokenizer.model", "tokenizer_config.json"
# GLM-4's; digits come in threes
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
BEGIN = ("[gMASK]", "<sop>")
AUDIO_BEGIN, AUDIO_END = "<|begin_of_audio|>", "<|end_of_audio|>"
NEEDED = (*BEGIN, SYSTEM, USER, ASSISTANT, AUDIO_BEGIN, AUDIO_END)
_AUDIO = re.compile(r"<\|audio_(\d+)\|>")


def audio(code: int) -> str:
    return f"<|audio_{code}|>"


class Vocabulary:
    """special: special tokens other than codes -> ids. first_code: the id of code 0; the others follow."""

    def __init__(self, directory: Path, rows: int, codes: int):
        """rows: of the model's tables. Raises ValueError if the files do not fit the model."""
        ranks = read_ranks(directory / RANKS)
        self.raw = {rank: token for token, rank in ranks.items()}
        self._tokenizer = tokenizer(ranks, SPLIT)
        ids = _added(directory / TOKENS)
        self.special = {token: id for token, id in ids.items() if not _AUDIO.fullmatch(token)}
        if missing := [token for token in (*NEEDED, audio(0), audio(codes - 1)) if token not in ids]:
            raise ValueError(f"{directory / TOKENS} lacks tokens of GLM-4-Voice: {', '.join(missing)}")
        self.first_code = ids[audio(0)]
        if any(ids.get(audio(code)) != self.first_code + code for code in range(codes)):
            where = f"{audio(0)} is {self.first_code}"
            raise ValueError(f"{directory / TOKENS}: the ids of the {codes} codes are not in order; {where}")
        if not len(ranks) <= min(ids.values()) <= max(ids.values()) < rows:
            given = f"has ids from {min(ids.values())} to {max(ids.values())}"
            possible = f"after {len(ranks)} words, the model has rows up to {rows - 1}"
            raise ValueError(f"{directory / TOKENS} {given}; {possible}")
        self.names = {id: token for token, id in self.special.items()}
        self.num_codes = codes

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text. No text becomes a special token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def has(self, token: int) -> bool:
        """Return whether an answer can have this token."""
        return 0 <= token < self.first_code + self.num_codes

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a text token; those of a special token are its name."""
        return self.raw[token] if token in self.raw else self.names.get(token, "").encode()


def _added(path: Path) -> dict[str, int]:
    """Return the added tokens, text -> id. Raises ValueError."""
    listed: Any = read_json(path).get("added_tokens_decoder")
    try:
        return {entry["content"]: int(id) for id, entry in listed.items()}
    except (AttributeError, TypeError, KeyError, ValueError):
        form = json.dumps({"1": {"content": "..."}})
        raise ValueError(f"{path}: added_tokens_decoder must be an object such as {form}") from None
