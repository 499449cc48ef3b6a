"""The text vocabulary of the demo checkpoints: a small byte-level BPE that is made here. Like the published
one it has words that no merge
makes any more: the Chinese ones of more than one character."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

PUBLISHED_WORDS = 151643
NUM_MERGES = 240
CUT = ("你好", "世界", "今天", "天气", "很好", "我们", "大家", "谢谢")  # in the vocabulary, and not to be had
CORPUS = """
the quick brown fox jumps over the lazy dog and then the other fox says hello to the world this is a test of
the voice that reads your
text out loud please speak slowly and clearly when you are ready good morning good evening how are you doing
today thank you very much
there was once a small house near the river where an old man lived with his daughter and they would listen to
the water every night
one two three four five six seven eight nine ten numbers and words and more words make the vocabulary of this
little model with care
"""


def symbols() -> dict[int, str]:
    """Byte -> the printable symbol that stands for it, in the order of the tokens' ids. Source: GPT-2's
    byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    for symbol in word:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return tuple(joined)


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Chains that make each Chinese character of CUT one piece, then the most frequent pairs of CORPUS."""
    known = symbols()
    characters = [
        "".join(known[byte] for byte in character.encode()) for character in dict.fromkeys("".join(CUT))
    ]
    found = list(dict.fromkeys((piece[:i], piece[i]) for piece in characters for i in range(1, len(piece))))
    words = Counter(tuple(known[byte] for byte in f" {word}".encode()) for word in CORPUS.split())
    while len(found) < NUM_MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs.keys() - set(found), key=lambda pair: (pairs[pair], pair))
        found.append(best)
        words = Counter({_join(word, best): count for word, count in words.items()})
    return tuple(found)


def vocabulary(full: bool) -> dict[str, int]:
    """vocab.json: bytes, merged pieces, CUT and, at the published size, filler that no merge can reach."""
    known = symbols()
    cut = ["".join(known[byte] for byte in word.encode()) for word in CUT]
    tokens = list(dict.fromkeys([*known.values(), *(left + right for left, right in merges()), *cut]))
    if full:
        tokens += [f"<filler {i}>" for i in range(len(tokens), PUBLISHED_WORDS)]
    return {token: index for index, token in enumerate(tokens)}
