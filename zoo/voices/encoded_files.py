"""Files with encoded recordings, next to the recordings, so that a stored voice is encoded once and not in
every process.

    DIRECTORY/qwen3_tts-3f7a91c04be2d856-9b14e07c.safetensors      family, encoder, recording and its use

tensors: named as in the family, with the dtypes and shapes that they have in memory. metadata: `format`
(FORMAT), `version`, `family`, `encoder` (`encoder_key`), `recording` (`zoo.voices.references.content`) and
`blake2b`, a hash of the other fields and of the tensors' bytes. If a file is damaged or was made by another
encoder, the recording is encoded again.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compile_cache.source import meaning_of
from zoo.request import AudioClip

FORMAT, VERSION = "speechzoo.encoded-voice", "1"
MAX_FILES = 8  # per recording; older files may be of encoders that are no longer used
PACKAGES = ("transformers", "vector-quantize-pytorch")
NUM_VALUES = 256  # values hashed per tensor; training changes all values, so a sample identifies the weights

ZOO = Path(__file__).parents[1]
CPU = torch.device("cpu")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoded:
    """A recording as an encoder returns it. Its file holds the fields that are tensors."""

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


@dataclass(frozen=True)
class Codes(Encoded):
    """A recording as codes alone."""

    codes: Tensor  # [F] or [F, K] on the CPU


T = TypeVar("T", bound=Encoded)


def encoder_key(family: str, settings: object, *modules: nn.Module) -> str:
    """Return 16 hex digits that identify an encoder: a hash of what its code means, the `repr` of its
    settings, its weights, and the versions of the packages that it may run. Comments do not change it."""
    versions = [version_of(package) for package in PACKAGES]
    name = blake2b(repr((VERSION, family, settings, versions)).encode(), digest_size=8)
    for file in code(family):
        name.update(meaning_of(file))
    for module in modules:
        for label, tensor in module.state_dict().items():
            name.update(repr((label, tensor.dtype, tuple(tensor.shape))).encode())
            if not tensor.is_meta:
                values = tensor.flatten()[:: max(1, tensor.numel() // NUM_VALUES)]
                name.update(bytes_of(values))
    return name.hexdigest()


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed; it then encodes nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def code(family: str) -> list[Path]:
    """Return the files that the encoders of a family may run."""
    folders = (family, "nn", "kernels")
    files = [file for folder in folders for file in sorted((ZOO / folder).rglob("*.py"))]
    return [*files, ZOO / "voices" / "references.py"]


@dataclass(frozen=True)
class EncodedFiles:
    """The files of one encoder. device: where the tensors go that are read from them."""

    family: str
    encoder: str  # the result of `encoder_key`
    device: torch.device = CPU

    def of(
        self, clip: AudioClip, recording: bytes, restore: Callable[[dict[str, Tensor]], T]
    ) -> EncodedFile[T] | None:
        """Return the file of a clip and its use, or None if the clip is not stored on disk."""
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
        return EncodedFile(path, facts, restore, clip, self.device)


@dataclass(frozen=True)
class EncodedFile(Generic[T]):
    """One encoded recording on disk. restore: tensors on the device -> the family's encoded reference. clip:
    the recording."""

    path: Path
    facts: dict[str, str]
    restore: Callable[[dict[str, Tensor]], T]
    clip: AudioClip
    device: torch.device

    def read_recording(self) -> None:
        """Read the samples of the clip, unless they are there."""
        _ = self.clip.samples

    def read(self) -> T | None:
        """Return the encoded recording, or None if the file is missing, damaged, or of another encoder."""
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
                self._warn(f"its {name} is {metadata.get(name)!r}; {expected!r} is needed")
                return None
        if metadata.get("blake2b") != digest(self.facts, tensors):
            self._warn("its checksum does not match")
            return None
        return self.restore({name: tensor.to(self.device) for name, tensor in tensors.items()})

    def _warn(self, why: str) -> None:
        log.warning("%s cannot be used (%s): the recording is encoded again", self.path, why)

    def write(self, value: T) -> None:
        """Write the file atomically (by a rename). A failure is not an error, because the recording can be
        encoded again: the disk may be full, or the voice deleted."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in value.tensors().items()}
        metadata = self.facts | {"blake2b": digest(self.facts, tensors)}
        try:
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.path.parent) as new:
                save_file(tensors, Path(new) / "encoded", metadata)
                os.replace(Path(new) / "encoded", self.path)
            prune(self.path.parent)
        except (SafetensorError, OSError) as error:
            log.info("%s is not stored: %s", self.path, error)


def prune(directory: Path) -> None:
    """Delete all but the MAX_FILES newest encodings of a recording. Raises OSError."""
    files = directory.glob("*-*-*.safetensors")
    newest = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
    for file in newest[MAX_FILES:]:
        file.unlink(missing_ok=True)


def digest(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hex digits: a hash of the facts and of the tensors' names, types, shapes and bytes."""
    name = blake2b(repr(sorted(facts.items())).encode(), digest_size=16)
    for label, tensor in sorted(tensors.items()):
        name.update(repr((label, tensor.dtype, tuple(tensor.shape))).encode())
        name.update(bytes_of(tensor))
    return name.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
