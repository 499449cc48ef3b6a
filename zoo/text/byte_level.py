"""A byte-level BPE in two files, vocab.json and merges.txt."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from zoo.text.bpe import QWEN_SPLIT


def read_bpe(directory: Path) -> Tokenizer:
    """Return the tokenizer in a directory, which does not split texts yet. Raises ValueError."""
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    for path in (vocab, merges):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
    try:
        return Tokenizer(BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{vocab} and {merges.name} are not a byte-level BPE: {error}") from None


def read_qwen(directory: Path) -> Tokenizer:
    """Return the tokenizer in a directory, which splits texts as Qwen2 does. Raises ValueError."""
    tokenizer = read_bpe(directory)
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = split_bytes(QWEN_SPLIT)
    return tokenizer


def split_bytes(pattern: str) -> Sequence:
    """Return a pre-tokenizer: pieces of the pattern, as symbols of their bytes."""
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
