"""Voice prompts: frames of nine codes, from files next to the model.

A voice is `voices/NAME.safetensors` with one tensor, `codes` [F, 9]: the cluster, then the eight codes of the
codec. Speech that the model made has such frames, and ESPnet encodes recordings to them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from zoo.checkpoint.tensor_files import open_file
from zoo.opuslm.ids import STREAMS, Vocabulary

FOLDER = "voices"
DEFAULT = "default"  # a random voice


def find(directory: Path) -> dict[str, Path]:
    """Return the files of a model's voices by lower-case name. Raises ValueError for a name that is taken."""
    found: dict[str, Path] = {}
    for path in sorted((directory / FOLDER).glob("*.safetensors")):
        name = path.stem.lower()
        if name == DEFAULT or name in found:
            raise ValueError(f"{path}: the voice {name!r} exists already; rename the file")
        found[name] = path
    return dict(sorted(found.items()))


def read(path: Path, vocabulary: Vocabulary) -> Tensor:
    """Return the codes of a voice [F, 9] int64. Raises ValueError."""
    file = open_file(path)
    header = file.headers.get("codes")
    if header is None or len(header.shape) != 2 or header.shape[1] != STREAMS or header.shape[0] == 0:
        raise ValueError(f"{path} holds no tensor `codes` [F, {STREAMS}]")
    if header.dtype not in ("int64", "int32", "int16"):
        raise ValueError(f"{path}: codes are {header.dtype}; integers are possible")
    codes = file.read("codes").long()
    sizes = torch.tensor([vocabulary.num_clusters] + [vocabulary.num_codes] * (STREAMS - 1))
    if ((codes < 0) | (codes >= sizes)).any():
        raise ValueError(
            f"{path}: codes are out of range; 0 to {sizes[0] - 1} and 0 to {sizes[1] - 1} are possible"
        )
    return codes
