"""What an encoder made of a recording, in a file beside it, so that a voice that is kept is encoded once and not once a
process.

    DIRECTORY/qwen3_tts-3f7a91c04be2d856-9b14e07c.safetensors      family, encoder, recording and its use

tensors: as the family names them, and as it has them in memory. metadata: `format` (FORMAT), `version`, `family`, `encoder`
(of `encoder_key`), `recording` (of `zoo.references.content`) and `blake2b`, of all the others and of the tensors' bytes. A file
that is damaged, or was made by another encoder, is not read: the recording is encoded again.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.request import AudioClip

FORMAT, VERSION = "speechzoo.encoded-voice", "1"
MAX_FILES = 8  # of one recording: others are of encoders that nobody may use any more
NUM_VALUES = 256  # of each tensor, by which an encoder is known: training moves all of them

log = logging.getLogger(__name__)


class Encoded(Protocol):
    def tensors(self) -> dict[str, Tensor]: ...


T = TypeVar("T", bound=Encoded)


def encoder_key(family: str, settings: object, *modules: nn.Module) -> str:
    """16 digits that name an encoder: its code, its settings by their `repr`, its weights."""
    name = blake2b(repr((VERSION, family, settings)).encode(), digest_size=8)
    here = Path(__file__).parent
    for file in sorted([*(here / family).glob("*.py"), *(here / "nn").glob("*.py"), here / "references.py"]):
        name.update(file.read_bytes())
    for module in modules:
        for label, tensor in module.state_dict().items():
            name.update(repr((label, tensor.dtype, tuple(tensor.shape))).encode())
            if not tensor.is_meta:
                values = tensor.flatten()[:: max(1, tensor.numel() // NUM_VALUES)]
                name.update(bytes_of(values))
    return name.hexdigest()


@dataclass(frozen=True)
class EncodedFiles:
    """Those of one encoder."""

    family: str
    encoder: str  # of `encoder_key`

    def of(
        self, clip: AudioClip, recording: bytes, restore: Callable[[dict[str, Tensor]], T]
    ) -> EncodedFile[T] | None:
        """The file of a clip and its use; None where the clip is nowhere kept."""
        if clip.kept_in is None:
            return None
        path = clip.kept_in / f"{self.family}-{self.encoder}-{recording.hex()[:8]}.safetensors"
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "family": self.family,
            "encoder": self.encoder,
            "recording": recording.hex(),
        }
        return EncodedFile(path, facts, restore)


@dataclass(frozen=True)
class EncodedFile(Generic[T]):
    """restore: tensors on the CPU -> what the family keeps in memory."""

    path: Path
    facts: dict[str, str]
    restore: Callable[[dict[str, Tensor]], T]

    def read(self) -> T | None:
        """None where there is none that is whole and ours."""
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            self._warn(str(error))
            return None
        for name, expected in self.facts.items():
            if metadata.get(name) != expected:
                self._warn(f"its {name} is {metadata.get(name)!r}, and {expected!r} is needed")
                return None
        if metadata.get("blake2b") != digest(self.facts, tensors):
            self._warn("its bytes are not those that were written")
            return None
        return self.restore(tensors)

    def _warn(self, why: str) -> None:
        log.warning("%s is of no use (%s): the recording is encoded again", self.path, why)

    def write(self, value: T) -> None:
        """It appears by a rename. That it cannot be kept is no error, since it can be made again: the disk may be full,
        or the voice gone."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in value.tensors().items()}
        metadata = self.facts | {"blake2b": digest(self.facts, tensors)}
        try:
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.path.parent) as new:
                save_file(tensors, Path(new) / "encoded", metadata)
                os.replace(Path(new) / "encoded", self.path)
            prune(self.path.parent)
        except (SafetensorError, OSError) as error:
            log.info("%s is not kept: %s", self.path, error)


def prune(directory: Path) -> None:
    """Raises OSError."""
    files = [file for file in directory.glob("*-*-*.safetensors") if not file.name.startswith(".")]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MAX_FILES:]:
        file.unlink(missing_ok=True)


def digest(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """32 digits."""
    name = blake2b(repr(sorted(facts.items())).encode(), digest_size=16)
    for label, tensor in sorted(tensors.items()):
        name.update(repr((label, tensor.dtype, tuple(tensor.shape))).encode())
        name.update(bytes_of(tensor))
    return name.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
