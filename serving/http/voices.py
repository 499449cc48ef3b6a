"""The store of uploaded voices on disk. Each voice has a directory with its sample and metadata.

    VOICES/anna/voice.safetensors            the upload
    VOICES/anna/FAMILY-*.safetensors         outputs of a model's encoder (zoo/voices/encoded_files.py)

serving/voice_file.py describes voice.safetensors.

A voice appears and disappears by one rename, so every reader, in any process, finds all of it or nothing.
Before and after that it is in a hidden directory, which remains if the process is killed; `tidy` removes
it. Names are lower-cased, because some file systems cannot tell Anna from anna, and neither can listeners.
A directory with any other file and no voice.safetensors is somebody's own: it is neither listed nor removed.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import structlog

from serving.protocol import AudioClip, StoredClip
from serving.voice_file import (
    VOICE_FILE,
    Damaged,
    Header,
    StoredVoice,
    header_of,
    packed,
    recording_of,
    unpacked,
)

MAX_NAME_CHARS = 50
DEFAULT = "default"  # the alias of the voice for requests that name none
NEW, OLD = ".new-", ".old-"  # prefixes of hidden directories
ENCODED_FILE = re.compile(
    r"\w+-[0-9a-f]+-[0-9a-f]+\.safetensors"
)  # as zoo/voices/encoded_files.py, which needs torch
SILENT = 1e-3  # a peak of -60 dBFS

log = structlog.get_logger()
T = TypeVar("T")


class Taken(ValueError):
    """A voice of that name already exists."""


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


def new_name(name: str) -> str:
    """Return the name for a voice as it is stored. Raises ValueError, also for the name that means no voice in
    particular."""
    clean = clean_name(name)
    if clean == DEFAULT:
        raise ValueError(
            f"{DEFAULT!r} cannot be the name of a voice: it means the voice of requests that name none, which "
            f"zoo serve --alias-voice {DEFAULT}=NAME chooses; choose another name"
        )
    return clean


def is_clean(name: str) -> bool:
    """Whether a name is valid and has the form in which it is stored."""
    try:
        return clean_name(name) == name
    except ValueError:
        return False


def named(voice: StoredVoice, name: str) -> StoredVoice:
    """Return a voice under the name of its directory, which somebody may have copied or renamed."""
    return msgspec.structs.replace(voice, name=name)


def without_marks(text: str) -> str:
    """Remove vowel signs and other combining marks, which belong to the letters of many scripts."""
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


class Voices:
    """The store. Every method reads the disk, so changes by other processes are visible immediately."""

    def __init__(self, directory: str | Path, max_voices: int = 1000):
        self.directory = Path(directory)
        self.max_voices = max_voices

    def names(self) -> list[str]:
        """Return the names of the voices. Other directories, such as lost+found, are not voices."""
        if not self.directory.is_dir():
            return []
        return sorted(
            name for name in os.listdir(self.directory) if is_clean(name) and is_voice(self.directory / name)
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
            return is_voice(self.directory / clean_name(name))
        except ValueError:
            return False

    def load(self, name: str) -> tuple[StoredVoice, AudioClip] | None:
        """Return the voice of that name and its sample, or None. Raises ValueError for an
        invalid name, Damaged, OSError."""
        return self._open(clean_name(name), self._read)

    def find(self, name: str) -> tuple[StoredVoice, StoredClip] | None:
        """Return a voice and the place of its sample for the engine, or None if no voice has that name.
        Raises ValueError for an invalid name, Damaged, OSError."""
        return self._open(clean_name(name), self._locate)

    def _open(self, name: str, read: Callable[[str, int], T]) -> T | None:
        """Call `read` with the name of a voice and its open directory. It reads that directory even if the
        name now means another voice. A voice that this process may not read counts as damaged."""
        try:
            place = os.open(self.directory / name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise self._damaged(name, error) from None
        try:
            return read(name, place)
        except (FileNotFoundError, PermissionError, Damaged) as error:
            if not is_at(place, self.directory / name):  # removed in the meantime
                return None
            if not is_voice(self.directory / name):
                return None
            raise self._damaged(name, error) from None
        finally:
            os.close(place)

    def _damaged(self, name: str, error: Exception) -> Damaged:
        log.error("voice", name=name, error=f"{self.directory / name} is damaged: {error}")
        return Damaged(f"the stored voice {name!r} is damaged; upload it again, or remove it")

    def _read(self, name: str, place: int) -> tuple[StoredVoice, AudioClip]:
        voice, sample = unpacked(read_at(place, VOICE_FILE))
        return named(voice, name), sample

    def _locate(self, name: str, place: int) -> tuple[StoredVoice, StoredClip]:
        """The samples are read only if their name is not in the header."""
        header = self._header(place)
        recording = header.recording or recording_of(self._read(name, place)[1])
        voice = named(header.voice, name)
        directory = str(self.directory_of(voice))
        return voice, StoredClip(recording, header.samples.shape[0], header.sample_rate_hz, directory)

    def _look(self, name: str, place: int) -> StoredVoice:
        """Return the voice from the header and the size of its file, without reading the samples."""
        return named(self._header(place).voice, name)

    def _header(self, place: int) -> Header:
        with open(os.open(VOICE_FILE, os.O_RDONLY, dir_fd=place), "rb") as file:
            return header_of(file, os.fstat(file.fileno()).st_size)

    def directory_of(self, voice: StoredVoice) -> Path:
        """Return the directory where the engine keeps its encoding of the voice."""
        return (self.directory / voice.name).absolute()

    def add(
        self, name: str, sample: AudioClip, ref_text: str | None = None, consent: str | None = None
    ) -> StoredVoice:
        """Store a voice. Raises ValueError for an invalid name or a silent sample, Taken, TooMany, and
        OSError for a disk that is full or not writable."""
        name = new_name(name)
        samples = np.frombuffer(sample.samples, "<f4")
        if not np.abs(samples).max() >= SILENT:  # or is NaN
            raise ValueError(f"the sample is silent: its peak is {np.abs(samples).max():.2g} of full scale")
        if len(self.names()) >= self.max_voices:
            raise TooMany(f"the limit of stored voices ({self.max_voices}) is reached; remove a voice first")
        voice = StoredVoice(
            name, int(time.time()), round(sample.duration_s, 3), (ref_text or "").strip() or None, consent
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write(voice, packed(voice, sample))
        return voice

    def rename(self, name: str, other: str) -> StoredVoice | None:
        """Rename a voice and return it, or None if no voice has the old name. It writes no file, so it works on a
        full disk. The encoders' files stay with the voice. Raises ValueError for an invalid name, Taken, Damaged,
        OSError."""
        name, other = clean_name(name), new_name(other)
        found = self.load(name)
        if found is None or name == other:
            return found and found[0]
        try:
            self._move(self.directory / name, other)
        except FileNotFoundError:  # another process has renamed or removed it
            return None
        return named(found[0], other)

    def _write(self, voice: StoredVoice, file: bytes) -> None:
        """Raises Taken, OSError."""
        with self._new_place() as new:
            (new / VOICE_FILE).write_bytes(file)
            self._move(new, voice.name)

    def _move(self, place: Path, name: str) -> None:
        """Let a directory of the store have the name of a voice. Raises Taken, OSError."""
        try:
            self._open(name, self._look)
        except Damaged:  # it is replaced
            self.remove(name)
        try:
            place.rename(self.directory / name)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                if not self.has(name):
                    raise Taken(
                        f"{name!r} cannot be the name of a voice: other files are stored under that name; choose another name"
                    ) from None
                raise Taken(
                    f"voice {name!r} already exists; remove it first, or choose another name"
                ) from None
            raise

    def remove(self, name: str) -> bool:
        """Remove a voice, and return whether it existed. Running requests are not affected. A request whose
        model has not encoded the voice yet fails. It makes no file or directory, so it works on a full disk.
        Raises ValueError, OSError."""
        place = self.directory / clean_name(name)
        if not is_voice(place):
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
                if entry.name.startswith((NEW, OLD)) and is_voice(Path(entry.path)):
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


def is_voice(place: Path) -> bool:
    """Whether a path is the directory of a voice, intact or damaged: it has the voice's file, or none but encodings. One
    that cannot be read counts as damaged."""
    try:
        names = os.listdir(place)
        return VOICE_FILE in names or all(
            ENCODED_FILE.fullmatch(name) or name.startswith(NEW) for name in names
        )
    except PermissionError:
        return True
    except OSError:  # it is a file, or removed in the meantime
        return False


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
