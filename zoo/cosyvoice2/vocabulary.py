"""The text vocabulary of the demo checkpoints: a small byte-level BPE, built here. Like the published one it
contains words that no merge produces: Chinese words of more than one character."""

from __future__ import annotations

from functools import cache

from zoo.text.bpe import ENGLISH, Pair, byte_symbols, in_symbols, learn

PUBLISHED_WORDS = 151643
NUM_MERGES = 240
# in the vocabulary, but no merge produces them
CUT = ("你好", "世界", "今天", "天气", "很好", "我们", "大家", "谢谢")


@cache
def merges() -> tuple[Pair, ...]:
    """Return chains that make each character of CUT one piece, then frequent pairs of English words."""
    characters = [in_symbols(character) for character in dict.fromkeys("".join(CUT))]
    return learn(characters, [in_symbols(f" {word}") for word in ENGLISH.split()], NUM_MERGES)


def vocabulary(full: bool) -> dict[str, int]:
    """Return vocab.json: bytes, merged pieces, CUT and, at the published size, unused filler."""
    pieces = ["".join(pair) for pair in merges()]
    tokens = list(dict.fromkeys([*byte_symbols().values(), *pieces, *map(in_symbols, CUT)]))
    if full:
        tokens += [f"<filler {i}>" for i in range(len(tokens), PUBLISHED_WORDS)]
    return {token: index for index, token in enumerate(tokens)}
