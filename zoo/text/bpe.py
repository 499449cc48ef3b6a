"""Small BPE vocabularies, made here for demo checkpoints with a real tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

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
