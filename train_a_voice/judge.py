"""Measure how many words are understood: word error rates by pocketsphinx and its English model.

It needs neither a network nor a GPU. It is strict: it misses one word in ten of flite itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from train_a_voice.sentences import NUM_COMMON, Lexicon, read_dictionary

RATE_HZ = 16_000
LOG_BASE = math.log(1.0001)  # of pocketsphinx's logarithms
UNKNOWN = -100.0  # nats: a word that its language model lacks has about -50,000


def _pocketsphinx() -> Any:
    try:
        import pocketsphinx
    except ImportError:
        raise ValueError("pocketsphinx is not installed; pip install pocketsphinx") from None
    return pocketsphinx


@cache
def _decoder() -> Any:
    return _pocketsphinx().Decoder(samprate=RATE_HZ, loglevel="FATAL")


def dictionary() -> Path:
    """Return the path of its dictionary, in CMUdict's format."""
    return Path(_pocketsphinx().get_model_path()) / "en-us" / "cmudict-en-us.dict"


def lexicon() -> Lexicon:
    """Return the words that it knows, with their probabilities in its language model."""
    words = read_dictionary(dictionary())
    model = _decoder().get_lm(_decoder().current_search())
    nats = {word: model.prob([word]) * LOG_BASE for word in [*read_dictionary(dictionary(), least=1)]}
    common = sorted(
        (word for word, nat in nats.items() if nat > UNKNOWN), key=lambda word: (-nats[word], word)
    )
    common = common[:NUM_COMMON]
    return Lexicon(words, common, [nats[word] for word in common])


def transcribe(samples: np.ndarray, rate_hz: int) -> str:
    """Return the words in float samples [N]."""
    audio = soxr.resample(samples, rate_hz, RATE_HZ) if rate_hz != RATE_HZ else samples
    quiet = np.zeros(RATE_HZ // 4)  # the recogniser expects silence around speech
    audio = np.concatenate((quiet, audio / max(1e-3, float(np.abs(audio).max())) * 0.7, quiet))
    decoder = _decoder()
    decoder.start_utt()
    decoder.process_raw((audio * 32767).astype("<i2").tobytes(), full_utt=True)
    decoder.end_utt()
    heard = decoder.hyp()
    return heard.hypstr if heard is not None else ""


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


def num_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return insertions, deletions and substitutions: the Levenshtein distance."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


def word_error_rate(texts: Sequence[str], heard: Sequence[str]) -> float:
    errors = sum(num_errors(words(text), words(other)) for text, other in zip(texts, heard, strict=True))
    return errors / sum(len(words(text)) for text in texts)
