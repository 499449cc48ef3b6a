"""Reads a vocabulary in tiktoken's format: a byte-level BPE. The ranks of the tokens define its merges.

Source: openai/tiktoken, src/lib.rs. Among all neighbours whose joined bytes are a token, those with the
lowest rank are joined first. A piece that is itself a token is not split.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE

from zoo.text.bpe import Pair, byte_symbols
from zoo.text.byte_level import split_bytes


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token's bytes. The rank is the id. Raises ValueError."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    ranks = {}
    for number, line in enumerate(filter(None, lines), 1):
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            advice = "it must be a token in base64, a space, and its rank"
            raise ValueError(f"{path}, line {number} is {line[:40]!r}; {advice}") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        advice = "it may have been cut short; copy it again"
        raise ValueError(f"{path} has {len(ranks)} tokens, which are not a complete vocabulary; {advice}")
    return ranks


def tokenizer(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    """Return a tokenizer of the `tokenizers` library with the same ids, without special tokens. pattern:
    splits a text into pieces."""
    symbols = byte_symbols()
    vocabulary = {"".join(symbols[byte] for byte in token): rank for token, rank in ranks.items()}
    made = Tokenizer(BPE(vocab=vocabulary, merges=_merges(vocabulary), ignore_merges=True))
    made.pre_tokenizer = split_bytes(pattern)
    return made


def _merges(vocabulary: dict[str, int]) -> list[Pair]:
    """Return every pair of tokens that joins into a token, in the order of that token's rank."""
    merges = []
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges
