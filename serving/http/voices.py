"""Uploaded voices, on disk: a directory for each, which holds its sample and what is known of it.

    VOICES/anna/voice.safetensors            what was uploaded
    VOICES/anna/FAMILY-*.safetensors         what a model's encoder made of it (zoo/encoded_files.py)

voice.safetensors has one tensor, `samples` [N] F32: mono, as the upload was decoded. Its metadata, all of it text: `format`
(FORMAT), `version`, `name`, `created_at` (seconds since 1970), `sample_rate_hz`, `ref_text` and `consent` where they were given, and
`blake2b`, 32 digits: of all the others, as lines NAME=VALUE in the order of their names, then of the samples' bytes.

A voice appears and disappears by one rename, so whoever reads it, in whichever process, finds all of it or
nothing. Before and after it is in a hidden directory, which stays behind if its maker is killed: `tidy`.
Names are lower-cased: some file systems cannot tell Anna from anna, and neither can listeners.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import re
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np
import safetensors.numpy
import structlog

from serving.protocol import AudioClip

MAX_NAME_CHARS = 50
HIDDEN = (".new-", ".old-")
VOICE_FILE = "voice.safetensors"
FORMAT, VERSION = "speechzoo.voice", "1"
MAX_HEADER_BYTES = 1 << 20  # ref_text and consent have 4096 characters at most
SILENT = 1e-3  # a peak of -60 dB of full scale

log = structlog.get_logger()
T = TypeVar("T")


class StoredVoice(msgspec.Struct):
    """What is known of a voice beside its samples."""

    name: str
    created_at: int  # seconds since 1970
    duration_s: float
    # what the sample says; without it only the sound of the voice is taken from it
    ref_text: str | None = None
    consent: str | None = None  # whatever the uploader gave for the speaker's consent


class Taken(ValueError):
    """There is a voice of that name."""


class Damaged(ValueError):
    """What is kept of a voice is not what was written."""


class TooMany(ValueError):
    """No more voices are kept."""


def clean_name(name: str) -> str:
    """The name as it is kept and looked for. Raises ValueError."""
    clean = unicodedata.normalize("NFC", name).lower()
    if len(clean) > MAX_NAME_CHARS or not re.fullmatch(r"\w[\w.-]*", clean):
        raise ValueError(
            f"{name[:80]!r} is no name for a voice: one has up to {MAX_NAME_CHARS} letters, digits, '_', '-' and '.', and does not begin "
            "with '-' or '.'"
        )
    return clean


class Voices:
    """The store. Every method reads the disk, so a voice that another process adds or removes is seen at
    once."""

    def __init__(self, directory: str | Path, max_voices: int = 1000):
        self.directory = Path(directory)
        self.max_voices = max_voices

    def names(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(
            entry.name
            for entry in os.scandir(self.directory)
            if not entry.name.startswith(".") and entry.is_dir()
        )

    def list(self) -> list[StoredVoice]:
        return self.survey()[0]

    def survey(self) -> tuple[builtins.list[StoredVoice], builtins.list[str]]:
        """The voices, and the names of the damaged ones. Raises OSError."""
        whole, damaged = [], []
        for name in self.names():
            try:
                if (found := self._open(name, self._look)) is not None:
                    whole.append(found)
            except Damaged:
                damaged.append(name)
        return whole, damaged

    def problem(self) -> str | None:
        """Why no voice can be kept here, in a line; None: they can."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError as error:
            return f"voices cannot be kept in {self.directory}: {error.strerror}"
        return None

    def has(self, name: str) -> bool:
        try:
            return (self.directory / clean_name(name)).is_dir()
        except ValueError:
            return False

    def load(self, name: str) -> tuple[StoredVoice, AudioClip] | None:
        """A voice and its sample; None where there is none of that name (any more). Raises ValueError for a
        name that is none, Damaged, OSError."""
        return self._open(clean_name(name), self._read)

    def _open(self, name: str, read: Callable[[int], T]) -> T | None:
        """What `read` gives of a voice's open directory: of this very one, even if the name means another one
        by now."""
        try:
            place = os.open(self.directory / name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            return read(place)
        except (FileNotFoundError, Damaged) as error:
            if not is_at(place, self.directory / name):  # removed a moment ago
                return None
            log.error("voice", name=name, error=f"{self.directory / name} is damaged: {error}")
            raise Damaged(
                f"what is kept of voice {name!r} is damaged; upload it again, or remove it"
            ) from None
        finally:
            os.close(place)

    def _read(self, place: int) -> tuple[StoredVoice, AudioClip]:
        return unpacked(read_at(place, VOICE_FILE))

    def _look(self, place: int) -> StoredVoice:
        """As `_read`, by the file's header and its size alone."""
        with open(os.open(VOICE_FILE, os.O_RDONLY, dir_fd=place), "rb") as file:
            return header_of(file, os.fstat(file.fileno()).st_size).voice

    def directory_of(self, voice: StoredVoice) -> Path:
        """Where the engine keeps what it made of it."""
        return (self.directory / voice.name).absolute()

    def add(
        self, name: str, sample: AudioClip, ref_text: str | None = None, consent: str | None = None
    ) -> StoredVoice:
        """Raises ValueError for a name that is none, or a silent sample; Taken; TooMany; OSError for a disk
        that does not take it."""
        name = clean_name(name)
        samples = np.frombuffer(sample.samples, "<f4")
        if not np.abs(samples).max() >= SILENT:  # or is NaN
            raise ValueError(
                f"the sample is silent: its loudest value is {np.abs(samples).max():.2g} of full scale"
            )
        if len(self.names()) >= self.max_voices:
            raise TooMany(
                f"there are {self.max_voices} voices already, and no more are possible: remove one first"
            )
        voice = StoredVoice(
            name, int(time.time()), round(sample.duration_s, 3), (ref_text or "").strip() or None, consent
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write(voice, {VOICE_FILE: packed(voice, sample)})
        return voice

    def rename(self, name: str, new_name: str) -> StoredVoice | None:
        """-> the voice under its new name; None where there is none of the old one. For a moment it has both. Raises
        ValueError for a name that is none, Taken, Damaged, OSError."""
        name, new_name = clean_name(name), clean_name(new_name)
        found = self._open(name, lambda place: (*self._read(place), encoded_at(place)))
        if found is None or name == new_name:
            return found and found[0]
        voice, sample, encoded = found
        voice = msgspec.structs.replace(voice, name=new_name)
        self._write(voice, encoded | {VOICE_FILE: packed(voice, sample)})
        self.remove(name)
        return voice

    def _write(self, voice: StoredVoice, files: dict[str, bytes]) -> None:
        """Raises Taken, OSError."""
        with self._hidden_place(".new-") as new:
            for name, content in files.items():
                (new / name).write_bytes(content)
            if voice.name in self.survey()[1]:  # what is damaged makes room
                self.remove(voice.name)
            try:
                new.rename(self.directory / voice.name)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise Taken(
                        f"there is a voice {voice.name!r} already: remove it first, or take another name"
                    ) from None
                raise

    def remove(self, name: str) -> bool:
        """-> whether there was such a voice. Requests that speak in it have its sample already. Raises
        ValueError, OSError."""
        place = self.directory / clean_name(name)
        if not place.is_dir():
            return False
        with self._hidden_place(".old-") as old:
            try:
                place.rename(old / "voice")
            except FileNotFoundError:
                return False
        return True

    def tidy(self) -> None:
        """Remove what was left behind by whoever was killed while adding or removing a voice. Where somebody
        is at it now, in whichever process, nothing is done: the next start will find it."""
        with suppress(OSError), self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for entry in os.scandir(self.directory):
                if entry.name.startswith(HIDDEN):
                    shutil.rmtree(entry.path, ignore_errors=True)

    @contextmanager
    def _hidden_place(self, prefix: str) -> Iterator[Path]:
        """A new directory in the store, gone afterwards unless it was renamed."""
        assert prefix in HIDDEN, f"{prefix!r} is not of {HIDDEN}, which are tidied"
        with self._locked(fcntl.LOCK_SH):
            place = Path(tempfile.mkdtemp(prefix=prefix, dir=self.directory))
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """A lock on the store, which the system takes back from a process that ends. Raises OSError."""
        place = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(place, how)
            yield
        finally:
            os.close(place)


# voice.safetensors


class Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct):
    """size_bytes: of the header, with the eight bytes that tell it."""

    samples: Tensor
    metadata: dict[str, str] = msgspec.field(name="__metadata__")
    size_bytes: int = 0

    @property
    def voice(self) -> StoredVoice:
        """Raises KeyError, ValueError."""
        facts = self.metadata
        duration_s = round(self.samples.shape[0] / self.sample_rate_hz, 3)
        created_at = int(facts["created_at"])
        return StoredVoice(facts["name"], created_at, duration_s, facts.get("ref_text"), facts.get("consent"))

    @property
    def sample_rate_hz(self) -> int:
        rate_hz = int(self.metadata["sample_rate_hz"])
        if rate_hz <= 0:
            raise ValueError(f"its sample rate is {rate_hz} Hz")
        return rate_hz


def packed(voice: StoredVoice, sample: AudioClip) -> bytes:
    """voice.safetensors"""
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "name": voice.name,
        "created_at": str(voice.created_at),
        "sample_rate_hz": str(sample.sample_rate_hz),
        "ref_text": voice.ref_text,
        "consent": voice.consent,
    }
    metadata = {name: value for name, value in facts.items() if value is not None}
    metadata["blake2b"] = digest(metadata, sample.samples)
    samples = np.frombuffer(sample.samples, "<f4")
    return safetensors.numpy.save({"samples": samples}, metadata)


def unpacked(content: bytes) -> tuple[StoredVoice, AudioClip]:
    """Raises Damaged."""
    header = header_of(io.BytesIO(content), len(content))
    samples = content[header.size_bytes :]
    if header.metadata.get("blake2b") != digest(header.metadata, samples):
        raise Damaged(f"{VOICE_FILE} is not what was written")
    return header.voice, AudioClip(samples, header.sample_rate_hz)


def header_of(file: BinaryIO, size_bytes: int) -> Header:
    """Of a whole file of so many bytes. Raises Damaged."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = msgspec.json.decode(file.read(length), type=Header)
        header.size_bytes = 8 + length
        _ = header.voice
    except (KeyError, ValueError) as error:  # msgspec's are ValueErrors
        raise Damaged(f"{VOICE_FILE} has no header of a voice: {error}") from None
    form, version = header.metadata.get("format"), header.metadata.get("version")
    if (form, version) != (FORMAT, VERSION):
        raise Damaged(f"{VOICE_FILE} is {form} {version}, and {FORMAT} {VERSION} is needed")
    num_bytes = 4 * header.samples.shape[0]
    if header.samples.dtype != "F32" or header.samples.data_offsets != (0, num_bytes):
        raise Damaged(f"{VOICE_FILE} has other samples than [N] F32")
    if num_bytes == 0 or size_bytes != header.size_bytes + num_bytes:
        raise Damaged(
            f"{VOICE_FILE} has {size_bytes} bytes, and {header.size_bytes + num_bytes} were written"
        )
    return header


def digest(metadata: dict[str, str], samples: bytes) -> str:
    lines = [f"{name}={value}\n" for name, value in sorted(metadata.items()) if name != "blake2b"]
    found = blake2b("".join(lines).encode(), digest_size=16)
    found.update(samples)
    return found.hexdigest()


def encoded_at(directory: int) -> dict[str, bytes]:
    """The files beside a voice's own, by name: they say nothing of its name."""
    names = [name for name in os.listdir(directory) if name.endswith(".safetensors") and name[0] != "."]
    return {name: read_at(directory, name) for name in names if name != VOICE_FILE}


def is_at(place: int, path: Path) -> bool:
    """Whether an open directory is the one of this name."""
    return path.is_dir() and os.path.samestat(os.fstat(place), path.stat())


def read_at(directory: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory), "rb") as file:
        return file.read()


def default_directory() -> Path:
    """ZOO_VOICES_DIR, else speechzoo/voices below where a user's data is kept."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(os.environ.get("ZOO_VOICES_DIR") or data / "speechzoo" / "voices")
