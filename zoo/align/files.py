"""The files of an aligner: a directory that transformers' Wav2Vec2ForCTC or HubertForCTC reads. `check` finds
what is wrong with it before a server starts. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.align.words import Vocabulary

CLASSES = ("Wav2Vec2ForCTC", "HubertForCTC")
POSSIBLE = (
    f"an aligner is a directory of transformers' {' or '.join(CLASSES)}, with config.json and vocab.json"
)
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class Aligned:
    """The facts in the files of an aligner. is_normalized: whether its input has mean 0 and variance 1."""

    directory: Path
    architecture: str
    sample_rate_hz: int
    is_normalized: bool
    vocabulary: Vocabulary


def check(directory: str | Path) -> Aligned:
    """Return what the files of an aligner say. Raises ValueError that names the fault."""
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(f"aligner {str(directory)!r} is not a directory; {POSSIBLE}")
    config = _read(path, "config.json")
    named = config.get("architectures") or [None]
    if named[0] not in CLASSES:
        raise ValueError(f"aligner {path}: its architecture is {named[0]!r}; {POSSIBLE}")
    if not any((path / name).is_file() for name in WEIGHTS):
        raise ValueError(f"aligner {path} has no weights; it needs one of: {', '.join(WEIGHTS)}")
    tokens = _read(path, "vocab.json")
    kind = _read(path, "tokenizer_config.json", is_needed=False)
    if not all(type(id) is int for id in tokens.values()):
        raise ValueError(f"aligner {path} has a vocabulary for each language; use one for a single language")
    if "Phoneme" in kind.get("tokenizer_class", ""):
        raise ValueError(f"aligner {path} writes phonemes; use one that writes letters")
    size = config.get("vocab_size", 32)
    if not tokens or not all(0 <= id < size for id in tokens.values()):
        raise ValueError(f"aligner {path}: vocab.json has ids beyond the model's {size} columns")
    # Letters are aligned by the column of the blank, which the tokenizer calls the padding.
    blank = config.get("pad_token_id", 0)
    if type(blank) is not int or not 0 <= blank < size:
        raise ValueError(f"aligner {path}: pad_token_id is {blank!r}; it must be the id of the blank")
    audio = _read(path, "preprocessor_config.json", is_needed=False)
    delimiter = kind.get("word_delimiter_token", "|")
    rate_hz = audio.get("sampling_rate", 16_000)
    if type(rate_hz) is not int or rate_hz < 1:
        raise ValueError(f"aligner {path}: its sampling_rate is {rate_hz!r}, not a number of samples")
    vocabulary = Vocabulary(tokens, blank, delimiter if isinstance(delimiter, str) else None, size)
    if not vocabulary.letters:
        raise ValueError(f"aligner {path}: vocab.json has no single letters")
    return Aligned(path, named[0], rate_hz, audio.get("do_normalize", True) is not False, vocabulary)


def _read(directory: Path, name: str, is_needed: bool = True) -> Mapping[str, Any]:
    """Return a JSON object of the directory. Raises ValueError."""
    path = directory / name
    if not is_needed and not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"aligner {directory}: {name} cannot be read: {error.strerror}; {POSSIBLE}"
        ) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise ValueError(f"aligner {directory}: {name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"aligner {directory}: {name} must hold a JSON object")
    return found
