"""Manage the whole compile cache: list it, prune it, and move it to another machine."""

from __future__ import annotations

import fcntl
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from compile_cache.artifacts import VERSIONS, damage, locked, remove, unlisted_libraries
from compile_cache.ownership import make_levels, seal

DAY_S = 86_400.0
MAX_AGE_S = 90 * DAY_S
MAX_BYTES = 8 << 30


@dataclass(frozen=True)
class Stored:
    """An entry, or the remains of one from a killed process."""

    place: Path
    num_bytes: int
    age_s: float  # since it was last read


def stored(root: Path) -> list[Stored]:
    """Return all entries in ROOT/compiled, the most recently read first."""
    now_s = time.time()
    found = []
    for place in _places(root):
        with suppress(FileNotFoundError):  # another process dropped or finished it meanwhile
            found.append(Stored(place, _num_bytes(place), now_s - place.stat().st_mtime))
    return sorted(found, key=lambda entry: entry.age_s)


def prune(root: Path, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> list[Stored]:
    """Drop entries that were not read for max_age_s, then the least recently read ones until the rest fits.

    Returns the dropped entries. Entries that are being read or made stay; a ready server needs none.
    """
    dropped, total = [], 0
    for entry in stored(root):
        total += entry.num_bytes
        if (total > max_bytes or entry.age_s > max_age_s) and _drop(entry.place):
            dropped.append(entry)
            total -= entry.num_bytes
    return dropped


def export(root: Path, file: Path) -> list[Path]:
    """Write all intact entries to a tar file. Returns their names relative to the root. Raises OSError.

    An entry that can only be read needs no lock: no process can change it.
    """
    names = []
    places = [place for place in _places(root) if not place.name.startswith(".")]
    with tarfile.open(file, "w") as tar:
        for place in places:
            is_writable = os.access(place.parent, os.W_OK)
            with locked(place, fcntl.LOCK_SH) if is_writable else nullcontext():
                if damage(place) is None:
                    names.append(place.relative_to(root))
                    _add(tar, place, str(names[-1]))
    return names


def _add(tar: tarfile.TarFile, place: Path, name: str) -> None:
    """Add an entry without the libraries that its manifest does not list."""
    left_out = {f"{name}/{file.relative_to(place)}" for file in unlisted_libraries(place)}
    tar.add(place, name, filter=lambda part: None if part.name in left_out else part)


def take_in(root: Path, file: Path) -> list[Path]:
    """Import the entries of a tar file that do not exist yet, or none if one is damaged. Returns their names
    relative to the root.

    The entries are code that runs as the server's user, so import only files from people who may run code
    here. Raises ValueError for a file that `export` did not write, and OSError.
    """
    make_levels(root)
    names = []
    with _directory_to_import(root) as temporary:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(temporary, filter="data")
                is_foreign = bool(tar.getmembers()) and next(_places(Path(temporary)), None) is None
        except (tarfile.TarError, EOFError, zlib.error) as error:  # the last two: of a damaged .tar.gz
            reason = str(error).partition("\n")[0].rstrip(":")  # a list of what it tried may follow
            raise ValueError(f"{file} is not an exported cache: {reason}") from None
        if is_foreign:
            raise ValueError(f"{file} is not an exported cache: it has other files and no entry")
        places = list(_places(Path(temporary)))
        for made in places:  # all of them before the first is kept
            if why := damage(made):
                name = made.relative_to(temporary)
                raise ValueError(f"{file} is not an exported cache: in {name}, {why}")
        for made in places:
            name = made.relative_to(temporary)
            place = root / name
            make_levels(place.parent)
            with locked(place, fcntl.LOCK_EX):
                if damage(place) is not None:
                    remove(place)
                    seal(made)
                    os.utime(made)  # otherwise `prune` takes it for as old as it was there
                    made.rename(place)
                    names.append(name)
    return names


@contextmanager
def _directory_to_import(root: Path) -> Iterator[str]:
    """Make a directory for one import at a time, and remove those of imports that were killed."""
    with locked(root / "import", fcntl.LOCK_EX):
        try:
            for left in root.glob(".import-*"):
                remove(left)
            with tempfile.TemporaryDirectory(dir=root, prefix=".import-") as temporary:
                yield temporary
        finally:
            (root / ".import.lock").unlink()


def _places(root: Path) -> Iterator[Path]:
    """Yield ROOT/versions/target/name, and `.name.making` directories that killed processes left. Other directories
    are left alone: they may belong to a project."""
    for place in sorted(root.glob(f"{VERSIONS}/*/*")):
        if place.is_dir():
            yield place


def _num_bytes(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def _drop(place: Path) -> bool:
    """Remove an entry. Returns False if another process holds it."""
    entry = place.with_name(place.name.removeprefix(".").removesuffix(".making"))
    try:
        with locked(entry, fcntl.LOCK_EX | fcntl.LOCK_NB):
            remove(place)
            entry.with_name(f".{entry.name}.lock").unlink()
    except BlockingIOError:
        return False
    return True
