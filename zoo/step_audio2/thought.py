"""Finding the end of a thought while the model writes it, a token per step and slot, without a look at the text.

The end, </think>, may be any tokens that spell it. A table says for every token how much of the end the text spells
behind it, given how much it spelled before: Knuth, Morris and Pratt's automaton, a token at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from zoo.step_audio2.prompt import BEHIND_THOUGHT
from zoo.step_audio2.vocabulary import SPEECH_START, THOUGHT_END, Vocabulary

END = THOUGHT_END.encode()


def automaton() -> np.ndarray:
    """Return the automaton [len + 1, 256]: bytes of `</think>` matched so far, and the next byte -> bytes matched
    then. A full match stays full."""
    after = np.zeros((len(END) + 1, 256), np.int64)
    for spelled in range(len(END)):
        for byte in range(256):
            text = END[:spelled] + bytes([byte])
            after[spelled, byte] = max(n for n in range(len(END) + 1) if text.endswith(END[:n]))
    after[len(END)] = len(END)
    return after


def table(num_tokens: int, bytes_of: Callable[[int], bytes]) -> Tensor:
    """Return how much of the end is spelled behind each token [tokens, len + 1] int8, by how much was before."""
    after, words = automaton(), [bytes_of(token) for token in range(num_tokens)]
    spelled = np.tile(np.arange(len(END) + 1), (num_tokens, 1))
    lengths = np.array([len(word) for word in words])
    for i in range(int(lengths.max(initial=0))):
        is_longer = np.flatnonzero(lengths > i)
        byte = np.array([words[token][i] for token in is_longer])
        spelled[is_longer] = after[spelled[is_longer], byte[:, None]]
    return torch.from_numpy(spelled.astype(np.int8))


def closing(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the tokens that end a thought, from the one on that completes </think>, and begin the speech.

    The reference tokenizes the thought and what follows it anew. So the last token of the end may hold a line end, too.
    """
    ids = vocabulary.own(BEHIND_THOUGHT)
    spelled, k = b"", -1
    while len(spelled) < len(END):
        k += 1
        spelled += vocabulary.bytes_of(ids[k])
    return (*ids[k:], vocabulary.special[SPEECH_START])
