"""Fills the modules from either published layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from zoo.checkpoint import loading
from zoo.checkpoint.tensor_files import contents, open_file
from zoo.csm import moshi, weights
from zoo.csm.clone import EncoderFiles
from zoo.csm.config import Config
from zoo.csm.model import Lm
from zoo.hub import codec_directory

CODEC_FOLDER = "mimi"
CODEC_REPOSITORY = "kyutai/mimi"


class Checkpoint(nn.Module):
    """All modules of transformers' layout."""

    def __init__(self, lm: Lm, codec: weights.Codec):
        super().__init__()
        self.lm, self.codec = lm, codec


def fill(
    lm: Lm, codec: weights.Codec, config: Config, directory: Path, device: torch.device, dtype: torch.dtype
) -> EncoderFiles:
    """Fill the LM, in `dtype`, and the codec, in fp32; return where the encoder's tensors are. Raises
    ValueError."""
    source = weights.find(directory)
    found = contents(source)
    if weights.is_original(found, source):
        change = partial(weights.in_halves, config)
        loading.load(lm, weights.original(config), source, device, dtype, change=change)
        files = _fill_codec(codec, config, directory, device)
    else:
        table = weights.transformers(config, weights.check_copies(found))
        both = Checkpoint(lm, codec)
        loading.load(both, table, source, device, dtype, skip="codec.unread", fp32="codec")
        paths = [header.path for name, header in found.items() if name.startswith(weights.CODEC)]
        files = EncoderFiles(tuple(dict.fromkeys(paths)), weights.CODEC)
    lm.prepare()
    codec.decoder.prepare()
    return files


def _fill_codec(codec: weights.Codec, config: Config, directory: Path, device: torch.device) -> EncoderFiles:
    table, of_moshi = weights.codec(config.codec), directory / moshi.FILE
    if of_moshi.is_file():
        view = partial(moshi.as_transformers, config.codec)
        loading.load_file(codec, table, view(open_file(of_moshi)), device, torch.float32, skip="unread")
        return EncoderFiles((of_moshi,), view=view)
    source = find_codec(directory)
    loading.load(codec, table, source, device, torch.float32, skip="unread")
    paths = [header.path for header in contents(source).values()]
    return EncoderFiles(tuple(dict.fromkeys(paths)))


def find_codec(directory: Path) -> Path:
    """Return the directory of Mimi for the original layout, which has no codec. Raises ValueError."""
    return codec_directory(directory, CODEC_FOLDER, CODEC_REPOSITORY, "CSM")
