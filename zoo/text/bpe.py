"""Small BPE vocabularies, made here for demo checkpoints with a real tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

Pair = tuple[str, str]
ENGLISH = """
the quick brown fox jumps over the lazy dog and then the other fox says hello to the world this is a test of
the voice that reads your text out loud please speak slowly and clearly when you are ready good morning good
evening how are you doing today thank you very much there was once a small house near the river where an old
man lived with his daughter and they would listen to the water every night some people like tea others like
coffee but everyone likes a good story what is your name my name is long and it is not easy to say one two
three four five six seven eight nine ten numbers and words and more words make the vocabulary of this little
model with care
"""


# How GPT-2 and its successors treat bytes.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
# Qwen2's split: contractions | letters after at most one other character | single digits | punctuation |
# line ends | spaces
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def byte_symbols() -> dict[int, str]:
    """Return byte -> the printable symbol that represents it, ordered by token id. Source: GPT-2's byte-level
    BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def in_symbols(text: str) -> str:
    """Return a text's bytes as the symbols that represent them."""
    symbols = byte_symbols()
    return "".join(symbols[byte] for byte in text.encode())


def in_bytes(token: str) -> bytes | None:
    """Return the bytes that a token's symbols represent, or None if it has another character."""
    bytes_of = _bytes_of_symbols()
    is_known = all(symbol in bytes_of for symbol in token)
    return bytes(bytes_of[symbol] for symbol in token) if is_known else None


@cache
def _bytes_of_symbols() -> dict[str, int]:
    return {symbol: byte for byte, symbol in byte_symbols().items()}


def chain(piece: str) -> list[Pair]:
    """Return the merges that build a piece, symbol by symbol."""
    return [(piece[:i], piece[i]) for i in range(1, len(piece))]


def learn(
    pieces: Iterable[str], words: Iterable[str], num_merges: int, is_last_first: bool = False
) -> tuple[Pair, ...]:
    """Return `num_merges` merges: the chains of `pieces`, then the most frequent pairs of `words`.

    is_last_first: among equally frequent pairs, take the last one by name instead of the first. Source:
    Sennrich et al. 2016 (arXiv 1508.07909).
    """
    found = [pair for piece in pieces for pair in chain(piece)]
    counts = Counter(tuple(word) for word in words)
    while len(found) < num_merges:
        pairs: Counter[Pair] = Counter()
        for word, count in counts.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(sorted(pairs.keys() - set(found), reverse=is_last_first), key=pairs.__getitem__)
        found.append(best)
        counts = Counter({_join(word, best): count for word, count in counts.items()})
    return tuple(found)


def _join(word: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    joined: list[str] = []
    for symbol in word:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return tuple(joined)


def added_token(token_id: int, content: str, is_special: bool = True) -> dict[str, Any]:
    """Return an entry of tokenizer.json's added_tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": is_special}


def split_bytes(pattern: str, byte_level: dict[str, Any] = BYTE_LEVEL) -> dict[str, Any]:
    """Return a pre-tokenizer: pieces of the pattern, as symbols of their bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


QWEN_PARTS = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": split_bytes(QWEN_SPLIT),
    "post_processor": BYTE_LEVEL,
    "decoder": BYTE_LEVEL,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
}


def tokenizer_json(
    vocab: dict[str, int], merges: Iterable[object], added: Iterable[dict[str, Any]], **parts: Any
) -> dict[str, Any]:
    """Return the content of tokenizer.json. merges: pairs as lists, or as texts
    (the older form). parts: its normalizer, pre_tokenizer, post_processor and decoder;
    others are settings of the model that differ from BPE's."""
    steps = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"vocab": vocab, "merges": list(merges)}
    model |= {name: parts.pop(name) for name in list(parts) if name not in steps}
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added)}
    return head | steps | parts | {"model": BPE | model}
