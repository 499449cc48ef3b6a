"""The whole of the compile cache: what is in it, what is dropped of it, how it is taken to another machine."""

from __future__ import annotations

import fcntl
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compile_cache.artifacts import damage, locked, remove

DAY_S = 86_400.0
MAX_AGE_S = 90 * DAY_S
MAX_BYTES = 8 << 30


@dataclass(frozen=True)
class Stored:
    """An entry, or what a process that was killed left of one. age_s: since it was last read."""

    place: Path
    num_bytes: int
    age_s: float


def stored(root: Path) -> list[Stored]:
    """All in ROOT/compiled, the last read first."""
    now_s = time.time()
    found = []
    for place in _places(root):
        with suppress(FileNotFoundError):  # another process has dropped or finished it meanwhile
            found.append(Stored(place, _num_bytes(place), now_s - place.stat().st_mtime))
    return sorted(found, key=lambda entry: entry.age_s)


def prune(root: Path, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> list[Stored]:
    """Drop what nobody has read for so long, and of the rest what was read longest ago until it fits -> what was
    dropped. What is being read or made is left alone; a server that is ready needs its files no more."""
    dropped, total = [], 0
    for entry in stored(root):
        total += entry.num_bytes
        if (total > max_bytes or entry.age_s > max_age_s) and _drop(entry.place):
            dropped.append(entry)
            total -= entry.num_bytes
    return dropped


def export(root: Path, file: Path) -> list[Path]:
    """A tar file of all entries that are whole -> their names below the root. Raises OSError."""
    names = []
    with tarfile.open(file, "w") as tar:
        for place in _places(root):
            with locked(place, fcntl.LOCK_SH):
                if damage(place) is None:
                    names.append(place.relative_to(root))
                    tar.add(place, str(names[-1]))
    return names


def take_in(root: Path, file: Path) -> list[Path]:
    """The entries of a tar file that are not there yet -> their names below the root. It is code, which runs as
    whoever serves with it: take in what comes from those who may run code here. Raises ValueError for a file that is
    none of `export`, OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = []
    with tempfile.TemporaryDirectory(dir=root, prefix=".import-") as temporary:
        try:
            with tarfile.open(file) as tar:
                tar.extractall(temporary, filter="data")
        except tarfile.TarError as error:
            raise ValueError(f"{file} is no exported cache: {error}") from None
        for made in _places(Path(temporary)):
            name = made.relative_to(temporary)
            if why := damage(made):
                raise ValueError(f"{file} is no exported cache: in {name} {why}")
            place = root / name
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(place, fcntl.LOCK_EX):
                if damage(place) is not None:
                    remove(place)
                    made.rename(place)
                    names.append(name)
    return names


def _places(root: Path) -> Iterator[Path]:
    """ROOT/versions/target/name; of `.name.making`, the left-over of a killed process, itself."""
    for place in sorted(root.glob("*/*/*")):
        if place.is_dir() and not place.parts[-3].startswith("."):
            yield place


def _num_bytes(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def _drop(place: Path) -> bool:
    """Whether nobody held it, and it is gone."""
    entry = place.with_name(place.name.removeprefix(".").removesuffix(".making"))
    try:
        with locked(entry, fcntl.LOCK_EX | fcntl.LOCK_NB):
            remove(place)
            entry.with_name(f".{entry.name}.lock").unlink()
    except BlockingIOError:
        return False
    return True
