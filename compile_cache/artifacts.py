"""Keep compiled code between processes. Each model has an entry: a directory that is complete or absent.

    ROOT/compiled / torch-2.13.0-python-3.11 / x86_64-avx512-9d1e… /
        qwen3_tts-5f0c…            manifest.json, step.saved, libraries
        .qwen3_tts-5f0c….lock      held while it is read or made
        .qwen3_tts-5f0c….making    until it is complete

The name covers everything that the code depends on: the model's tensors, dtype, settings and strategy, and
the meaning of the source (comments have none). Inductor's own key omits some of this: AVX-512 code that is
loaded on a machine without AVX-512 returns NaN, and an instruction that a processor lacks ends the process.
An entry is checked against its manifest before it is run, and a damaged one is made again.

A process that can write to an entry can run code as any user who reads it. So only the owner has access, and
what others own or may write is refused (ownership.py). An entry of a cache that can only be read is used from
a temporary copy.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn

from compile_cache import choices, processor
from compile_cache.ownership import make_levels, seal, stranger, stranger_above, walked
from compile_cache.source import meaning_of

MANIFEST = "manifest.json"
VERSIONS = "torch-*-python-*"  # the first level of all entries; nothing else below the root is touched
SET_ANOTHER = "set ZOO_CACHE_DIR to a directory that can be written"
LIBRARIES = (".so", ".o", ".gch", ".pch")
MAKING = ".making"  # the end of a file's name until it is complete
SETTINGS = (bool, int, float, torch.dtype, type(None))  # module attributes that a graph may hold as constants


@dataclass(frozen=True)
class Entry:
    """An entry of the cache: the directory to read compiled code from, or, if not found, to write it to.

    added: names of files that were written to a found entry. They become part of it when its context ends, if it
    can be written."""

    directory: Path
    is_found: bool
    added: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return whether a file is part of the entry. One that its manifest does not list is not trusted."""
        return self.is_found and name in listed_files(self.directory)

    def add(self, name: str) -> None:
        """Make a file that was written to the entry's directory part of it."""
        if self.is_found:
            self.added.append(name)


def root_directory(root: str | Path | None = None) -> Path:
    """Return the directory of all entries, below `root`, else ZOO_CACHE_DIR, else ~/.cache/speechzoo."""
    return Path(root or os.environ.get("ZOO_CACHE_DIR") or Path.home() / ".cache" / "speechzoo") / "compiled"


def place(name: str, key: str, device: str = "cpu") -> Path:
    """Return the path of an entry. name: for people who list the directory; key: from `digest`; device: the
    type of the device that the code is for."""
    versions = f"torch-{torch.__version__}-python-{sys.version_info.major}.{sys.version_info.minor}"
    return root_directory() / versions / target(device) / f"{name}-{key}"


def target(device: str) -> str:
    """Return the kind of machine that compiled code for a device of this type depends on."""
    if device == "cuda" and torch.cuda.is_available():
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    # Inductor's own key has the paths of the headers, so it finds no library of another environment.
    facts = *processor.instruction_sets(), torch.__file__, sysconfig.get_path("include")
    return f"{platform.machine()}-{capability}-{_hash(*map(str.encode, facts))[:8]}"


@contextmanager
def opened(place: Path) -> Iterator[Entry]:
    """Open an entry. Code that is compiled in this context is read from it, or written to it if it is new.

    A new entry appears when the context ends without an error. One process makes it while others wait for it.
    Raises ValueError if others can write to the directory, or if an entry must be made and cannot be written.
    """
    try:
        make_levels(place.parent)
        if (why := stranger_above(place.parent)) is not None:
            raise ValueError(f"{place} cannot hold compiled code: {why}")
        is_writable = os.access(place.parent, os.W_OK)
        if is_writable:
            _tell_if_made(place)
    except OSError as error:
        raise ValueError(
            f"{place} cannot hold compiled code: {error.strerror or error}; {SET_ANOTHER}"
        ) from None
    with _found_or_made(place) if is_writable else _copied(place) as entry:
        yield entry


def _tell_if_made(place: Path) -> None:
    """Say so if another process makes the entry, which takes minutes. Raises OSError."""
    try:
        with locked(place, fcntl.LOCK_SH | fcntl.LOCK_NB):
            pass
    except BlockingIOError:
        sys.stderr.write(f"zoo: waiting for another process, which compiles {place}\n")


@contextmanager
def _copied(place: Path) -> Iterator[Entry]:
    """Open an intact entry as a private copy, because compilers lock and write next to what they read."""
    if (why := damage(place)) is not None:
        raise ValueError(
            f"{place} cannot hold compiled code: its directory cannot be written, and {why}; {SET_ANOTHER}"
        )
    with tempfile.TemporaryDirectory(prefix="zoo-compiled-") as directory:
        copy = Path(directory) / place.name
        shutil.copytree(place, copy)
        seal(copy)
        drop_unlisted(copy)
        with _compiling_in(copy):
            yield Entry(copy, True)


@contextmanager
def _found_or_made(place: Path) -> Iterator[Entry]:
    _drop_what_killed_processes_left(place)
    # First look with a shared lock. Then wait for a process that makes the entry, look again, and make it.
    for operation in (fcntl.LOCK_SH, fcntl.LOCK_EX):
        with locked(place, operation):
            why = damage(place)
            if why is None:
                os.utime(place)  # `prune` reads it as the time of the last use
                found = Entry(place, True)
                with _compiling_in(place):
                    yield found
                if found.added:
                    extend_manifest(place, found.added)
                return
            if operation == fcntl.LOCK_EX:
                if place.exists():
                    sys.stderr.write(
                        f"zoo: compiled code in {place} cannot be used ({why}); compiling it again\n"
                    )
                making = _emptied(place)
                with _compiling_in(making):
                    yield Entry(making, False)
                write_manifest(making)
                seal(making)
                making.rename(place)


def _drop_what_killed_processes_left(place: Path) -> None:
    """Remove unlisted libraries, unless another process holds the entry: it may be compiling them. An entry whose
    manifest cannot be read is made again anyway."""
    with (
        suppress(OSError, ValueError, KeyError, TypeError),
        locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB),
    ):
        drop_unlisted(place)


def _emptied(place: Path) -> Path:
    """Remove an entry and what a killed process left of one. Returns the new directory to make it in."""
    making = place.with_name(f".{place.name}.making")
    try:
        remove(making)
        remove(place)
        making.mkdir(mode=0o700)
    except OSError as error:
        raise ValueError(f"{place} cannot hold compiled code: {error}; {SET_ANOTHER}") from None
    return making


@contextmanager
def locked(place: Path, operation: int) -> Iterator[None]:
    """Lock an entry: `fcntl.LOCK_SH` to read it, `fcntl.LOCK_EX` to make or remove it.

    With `fcntl.LOCK_NB` it raises BlockingIOError instead of waiting. The lock always ends with the process.
    """
    path = place.with_name(f".{place.name}.lock")
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, operation)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):  # else `prune` removed it
                yield
                return
        finally:
            os.close(handle)


@contextmanager
def _compiling_in(directory: Path) -> Iterator[None]:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    try:
        with choices.kept_in(directory):
            yield
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def write_manifest(directory: Path) -> None:
    """List the files of a complete entry and their hashes in its manifest."""
    files = {str(file.relative_to(directory)): _hash(file.read_bytes()) for file in _files(directory)}
    (directory / MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def extend_manifest(place: Path, names: Iterable[str]) -> None:
    """List more files of an entry. Processes that read it meanwhile see the old manifest or the new one. Of processes
    that extend it at once, each waits for the other and keeps its lines."""
    with locked(place / MANIFEST, fcntl.LOCK_EX):
        files = listed_files(place) | {name: _hash((place / name).read_bytes()) for name in names}
        with tempfile.NamedTemporaryFile("w", dir=place, prefix=MANIFEST, delete=False) as manifest:
            json.dump({"files": files}, manifest, indent=1)
        Path(manifest.name).rename(place / MANIFEST)
        seal(place)


def damage(place: Path) -> str | None:
    """Return why an entry is unusable, or None if it is intact and written by its owner or root."""
    if place.is_symlink() or not place.is_dir():
        return "it is not a directory" if os.path.lexists(place) else "it does not exist"
    try:
        listed = listed_files(place)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, expected in listed.items():
        file = place / name
        if not file.is_file():
            return f"{name} is missing"
        if _hash(file.read_bytes()) != expected:
            return f"{name} has changed"
    files = [place / name for name in (MANIFEST, *listed)]
    levels = {level for file in files for level in (file, *file.parents) if level.is_relative_to(place)}
    return next((why for level in sorted(levels) if (why := stranger(level)) is not None), None)


def listed_files(place: Path) -> dict[str, str]:
    """Return the hashes in an entry's manifest, by file name. Raises OSError, ValueError, KeyError,
    TypeError."""
    return dict(json.loads((place / MANIFEST).read_text())["files"])


def unlisted_libraries(place: Path) -> list[Path]:
    """Return libraries and unfinished files in an intact entry that its manifest does not list. Inductor would
    run the libraries if it compiled their code."""
    listed = listed_files(place)
    files = [file for file in _files(place) if str(file.relative_to(place)) not in listed]
    return [file for file in files if file.name.endswith((*LIBRARIES, MAKING))]


def drop_unlisted(place: Path) -> None:
    """Remove the libraries and unfinished files that an entry's manifest does not list."""
    for file in unlisted_libraries(place):
        file.unlink(missing_ok=True)


def remove(place: Path) -> None:
    """Remove an entry if it exists."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _files(directory: Path) -> list[Path]:
    return sorted(
        file
        for file in walked(directory)
        if file.is_file() and file.suffix not in (".lock", choices.SUFFIX) and file != directory / MANIFEST
    )


def digest(model: nn.Module, facts: object, code: Iterable[Path]) -> str:
    """Return a key for the graphs of a model.

    It covers the shapes, dtypes and layouts of its tensors, the settings of its modules, `facts`, the meaning
    of the code that the graphs are traced from, and the compiler's settings.
    """
    from torch._inductor import config  # this import takes a second, which only compiling should cost

    tensors = (*model.named_parameters(), *model.named_buffers())
    lines = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.layout}" for name, tensor in tensors)
    for name, module in model.named_modules():
        settings = {key: value for key, value in vars(module).items() if _is_setting(value)}
        lines.append(f"{name} {type(module).__qualname__} {settings!r}")
    files = [
        file
        for path in (*code, Path(__file__).parent)
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else (path,))
    ]
    sources = (part for file in files for part in (file.name.encode(), meaning_of(file)))
    compiler = repr(sorted(config.save_config_portable().items()))
    return _hash(*(line.encode() for line in lines), repr(facts).encode(), compiler.encode(), *sources)


def _is_setting(value: object) -> bool:
    return all(map(_is_setting, value)) if isinstance(value, tuple) else isinstance(value, SETTINGS)


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
