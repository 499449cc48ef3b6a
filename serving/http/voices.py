"""The store of uploaded voices on disk. Each voice has a directory with its sample and metadata.

    VOICES/anna/voice.safetensors            the upload
    VOICES/anna/FAMILY-*.safetensors         outputs of a model's encoder (zoo/voices/encoded_files.py)

voice.safetensors has one tensor, `samples` [N] F32: the decoded upload, mono. Its metadata is text:
`format` (FORMAT), `version`, `name`, `created_at` (seconds since 1970), `sample_rate_hz`, and `ref_text`
and `consent` if they were given. The entry `blake2b` has 32 digits: the digest of the other entries, as
lines NAME=VALUE sorted by name, followed by the samples' bytes.

A voice appears and disappears by one rename, so every reader, in any process, finds all of it or nothing.
Before and after that it is in a hidden directory, which remains if the process is killed; `tidy` removes
it. Names are lower-cased, because some file systems cannot tell Anna from anna, and neither can listeners.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import re
import secrets
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
NEW, OLD = ".new-", ".old-"  # prefixes of hidden directories
VOICE_FILE = "voice.safetensors"
FORMAT, VERSION = "speechzoo.voice", "1"
MAX_HEADER_BYTES = 1 << 20  # ref_text and consent have 4096 characters at most
SILENT = 1e-3  # a peak of -60 dBFS

log = structlog.get_logger()
T = TypeVar("T")


class StoredVoice(msgspec.Struct):
    """The metadata of a voice."""

    name: str
    created_at: int  # seconds since 1970
    duration_s: float
    ref_text: str | None = None  # the words of the sample; without them, models use only its sound
    consent: str | None = None  # the uploader's proof of the speaker's consent


class Taken(ValueError):
    """A voice of that name already exists."""


class Damaged(ValueError):
    """The stored file of a voice is damaged."""


class TooMany(ValueError):
    """The store has reached its limit of voices."""


def clean_name(name: str) -> str:
    """Return the name as it is stored and looked up. Raises ValueError."""
    clean = unicodedata.normalize("NFC", name).lower()
    if len(clean) > MAX_NAME_CHARS or not re.fullmatch(r"\w[\w.-]*", clean[:1] + without_marks(clean[1:])):
        raise ValueError(
            f"{name[:80]!r} is not a valid name for a voice; use up to {MAX_NAME_CHARS} letters, digits, '_', '-' and '.', "
            "and do not begin with '-' or '.'"
        )
    return clean


def without_marks(text: str) -> str:
    """Remove vowel signs and other combining marks, which belong to the letters of many scripts."""
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


class Voices:
    """The store. Every method reads the disk, so changes by other processes are visible immediately."""

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
        """Return the intact voices and the names of the damaged ones. Raises OSError."""
        whole, damaged = [], []
        for name in self.names():
            try:
                if (found := self._open(name, self._look)) is not None:
                    whole.append(found)
            except Damaged:
                damaged.append(name)
        return whole, damaged

    def problem(self) -> str | None:
        """Return why voices cannot be stored, in one line, or None if they can."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError as error:
            return f"voices cannot be stored in {self.directory}: {error.strerror}"
        return None

    def has(self, name: str) -> bool:
        try:
            return (self.directory / clean_name(name)).is_dir()
        except ValueError:
            return False

    def load(self, name: str) -> tuple[StoredVoice, AudioClip] | None:
        """Return a voice and its sample, or None if there is none of that name. Raises ValueError for an
        invalid name, Damaged, OSError."""
        return self._open(clean_name(name), self._read)

    def _open(self, name: str, read: Callable[[int], T]) -> T | None:
        """Call `read` with a voice's open directory. It reads that directory even if the name now means
        another voice."""
        try:
            place = os.open(self.directory / name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            return read(place)
        except (FileNotFoundError, Damaged) as error:
            if not is_at(place, self.directory / name):  # removed in the meantime
                return None
            log.error("voice", name=name, error=f"{self.directory / name} is damaged: {error}")
            raise Damaged(f"the stored voice {name!r} is damaged; upload it again, or remove it") from None
        finally:
            os.close(place)

    def _read(self, place: int) -> tuple[StoredVoice, AudioClip]:
        return unpacked(read_at(place, VOICE_FILE))

    def _look(self, place: int) -> StoredVoice:
        """Return the voice from the header and the size of its file, without reading the samples."""
        with open(os.open(VOICE_FILE, os.O_RDONLY, dir_fd=place), "rb") as file:
            return header_of(file, os.fstat(file.fileno()).st_size).voice

    def directory_of(self, voice: StoredVoice) -> Path:
        """Return the directory where the engine keeps its encoding of the voice."""
        return (self.directory / voice.name).absolute()

    def add(
        self, name: str, sample: AudioClip, ref_text: str | None = None, consent: str | None = None
    ) -> StoredVoice:
        """Store a voice. Raises ValueError for an invalid name or a silent sample, Taken, TooMany, and
        OSError for a disk that is full or not writable."""
        name = clean_name(name)
        samples = np.frombuffer(sample.samples, "<f4")
        if not np.abs(samples).max() >= SILENT:  # or is NaN
            raise ValueError(f"the sample is silent: its peak is {np.abs(samples).max():.2g} of full scale")
        if len(self.names()) >= self.max_voices:
            raise TooMany(f"the limit of stored voices ({self.max_voices}) is reached; remove a voice first")
        voice = StoredVoice(
            name, int(time.time()), round(sample.duration_s, 3), (ref_text or "").strip() or None, consent
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write(voice, {VOICE_FILE: packed(voice, sample)})
        return voice

    def rename(self, name: str, new_name: str) -> StoredVoice | None:
        """Rename a voice and return it, or None if there is none of the old name. For a moment both names
        exist. Raises ValueError for an invalid name, Taken, Damaged, OSError."""
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
        with self._new_place() as new:
            for name, content in files.items():
                (new / name).write_bytes(content)
            if voice.name in self.survey()[1]:  # a damaged voice is replaced
                self.remove(voice.name)
            try:
                new.rename(self.directory / voice.name)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise Taken(
                        f"voice {voice.name!r} already exists; remove it first, or choose another name"
                    ) from None
                raise

    def remove(self, name: str) -> bool:
        """Remove a voice, and return whether it existed. Running requests are not affected: they have its
        sample already. It makes no file or directory, so it works on a full disk. Raises ValueError,
        OSError."""
        place = self.directory / clean_name(name)
        if not place.is_dir():
            return False
        old = self.directory / f"{OLD}{secrets.token_hex(8)}"
        try:
            place.rename(old)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            old = place  # not even the longer name fits; readers may find the voice damaged for a moment
        shutil.rmtree(old, ignore_errors=old != place)
        return True

    def tidy(self) -> None:
        """Remove hidden directories of processes that were killed while adding or removing a voice. While
        any process is adding one, this does nothing; the next start tries again."""
        with suppress(OSError), self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for entry in os.scandir(self.directory):
                if entry.name.startswith((NEW, OLD)):
                    shutil.rmtree(entry.path, ignore_errors=True)

    @contextmanager
    def _new_place(self) -> Iterator[Path]:
        """Make a new hidden directory in the store. It is removed afterwards unless it was renamed."""
        with self._locked(fcntl.LOCK_SH):
            place = Path(tempfile.mkdtemp(prefix=NEW, dir=self.directory))
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold a lock on the store. The system releases it when the process ends. Raises OSError."""
        place = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(place, how)
            yield
        finally:
            os.close(place)


# The format of voice.safetensors.


class Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct):
    """A safetensors header. size_bytes: its size, including the eight bytes of the length."""

    samples: Tensor
    metadata: dict[str, str] = msgspec.field(name="__metadata__")
    size_bytes: int = 0

    @property
    def voice(self) -> StoredVoice:
        """The voice that the metadata describes. Raises KeyError, ValueError."""
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
    """Return the contents of voice.safetensors."""
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
    """Read the contents of voice.safetensors. Raises Damaged."""
    header = header_of(io.BytesIO(content), len(content))
    samples = content[header.size_bytes :]
    if header.metadata.get("blake2b") != digest(header.metadata, samples):
        raise Damaged(f"the checksum of {VOICE_FILE} is wrong")
    return header.voice, AudioClip(samples, header.sample_rate_hz)


def header_of(file: BinaryIO, size_bytes: int) -> Header:
    """Read the header of a file of size_bytes. Raises Damaged."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = msgspec.json.decode(file.read(length), type=Header)
        header.size_bytes = 8 + length
        _ = header.voice
    except (KeyError, ValueError) as error:  # msgspec's are ValueErrors
        raise Damaged(f"{VOICE_FILE} has no valid header: {error}") from None
    form, version = header.metadata.get("format"), header.metadata.get("version")
    if (form, version) != (FORMAT, VERSION):
        raise Damaged(f"{VOICE_FILE} has the format {form} {version}, not {FORMAT} {VERSION}")
    num_bytes = 4 * header.samples.shape[0]
    if header.samples.dtype != "F32" or header.samples.data_offsets != (0, num_bytes):
        raise Damaged(f"the samples of {VOICE_FILE} are not [N] F32")
    if num_bytes == 0 or size_bytes != header.size_bytes + num_bytes:
        raise Damaged(f"{VOICE_FILE} has {size_bytes} bytes instead of {header.size_bytes + num_bytes}")
    return header


def digest(metadata: dict[str, str], samples: bytes) -> str:
    lines = [f"{name}={value}\n" for name, value in sorted(metadata.items()) if name != "blake2b"]
    found = blake2b("".join(lines).encode(), digest_size=16)
    found.update(samples)
    return found.hexdigest()


def encoded_at(directory: int) -> dict[str, bytes]:
    """Return the encoders' files of a voice, by file name. They do not contain the voice's name."""
    names = [name for name in os.listdir(directory) if name.endswith(".safetensors") and name[0] != "."]
    return {name: read_at(directory, name) for name in names if name != VOICE_FILE}


def is_at(place: int, path: Path) -> bool:
    """Whether a path still names this open directory."""
    return path.is_dir() and os.path.samestat(os.fstat(place), path.stat())


def read_at(directory: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory), "rb") as file:
        return file.read()


def default_directory() -> Path:
    """Return ZOO_VOICES_DIR, or speechzoo/voices in the user's data directory."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(os.environ.get("ZOO_VOICES_DIR") or data / "speechzoo" / "voices")
