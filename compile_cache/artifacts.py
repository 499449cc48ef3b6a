"""Where compiled code is kept between processes: a directory for each model, there as a whole or not at all.

    ROOT/compiled / torch-2.13.0-python-3.11 / avx512 / qwen3_tts-5f0c…           manifest.json, step.saved, libraries
                                                        .qwen3_tts-5f0c….lock     held while it is read or made
                                                        .qwen3_tts-5f0c….making   until it is complete

The name says all that the code depends on: the model's tensors, dtype, settings and strategy, and the meaning of the
source (a comment has none). Inductor's own key leaves some of that out: code for AVX-512 that is read on a machine
without it gives NaN. What is there is checked against the manifest before it is run; what is damaged is made again.

Whoever may write here can run code as whoever reads it: a directory is made for its owner alone.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn

from compile_cache import choices

MANIFEST = "manifest.json"
LIBRARIES = (".so", ".o", ".gch", ".pch")
SETTINGS = (bool, int, float, torch.dtype, type(None))  # of a module: what a graph may hold as a constant


@dataclass(frozen=True)
class Entry:
    """directory: where compiled code is read from, or is to be written to."""

    directory: Path
    is_found: bool


def root_directory(root: str | Path | None = None) -> Path:
    """`root`, else ZOO_CACHE_DIR, else ~/.cache/speechzoo."""
    return Path(root or os.environ.get("ZOO_CACHE_DIR") or Path.home() / ".cache" / "speechzoo") / "compiled"


def place(name: str, key: str, root: str | Path | None = None) -> Path:
    """Of an entry. name: for the eye; key: of `digest`."""
    versions = f"torch-{torch.__version__}-python-{sys.version_info.major}.{sys.version_info.minor}"
    return root_directory(root) / versions / target() / f"{name}-{key}"


def target() -> str:
    """The machine as far as compiled code cares."""
    if torch.cuda.is_available():
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    return f"{platform.machine()}-{capability}"


@contextmanager
def opened(place: Path) -> Iterator[Entry]:
    """What is compiled within is looked for in the entry; where there is none, it is kept, and the entry is there once
    this ends without an error. One process makes it, others wait and find it. Raises ValueError if the directory
    cannot be written."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(place, fcntl.LOCK_SH):
            pass
    except OSError as error:
        raise ValueError(f"{place} cannot hold compiled code: {error.strerror}") from None
    for operation in (
        fcntl.LOCK_SH,
        fcntl.LOCK_EX,
    ):  # look; then wait for whoever makes it, look again, make it
        with locked(place, operation):
            why = damage(place)
            if why is None:
                os.utime(place)  # `prune` goes by it
                with _compiling_in(place):
                    yield Entry(place, True)
                return
            if operation == fcntl.LOCK_EX:
                if place.exists():
                    sys.stderr.write(
                        f"zoo: compiled code in {place} is damaged ({why}): it is compiled again\n"
                    )
                making = place.with_name(f".{place.name}.making")
                remove(making)
                making.mkdir(mode=0o700)
                with _compiling_in(making):
                    yield Entry(making, False)
                write_manifest(making)
                remove(place)
                making.rename(place)


@contextmanager
def locked(place: Path, operation: int) -> Iterator[None]:
    """operation: `fcntl.LOCK_SH` to read an entry, `fcntl.LOCK_EX` to make or remove it; with `fcntl.LOCK_NB`,
    BlockingIOError instead of waiting. The lock ends with the process however it ends."""
    path = place.with_name(f".{place.name}.lock")
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, operation)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):  # else `prune` was first
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
    """What is in the directory is whole."""
    files = {str(file.relative_to(directory)): _hash(file.read_bytes()) for file in _files(directory)}
    (directory / MANIFEST).write_text(json.dumps({"files": files}, indent=1))


def damage(place: Path) -> str | None:
    """What is wrong with an entry; None where it is whole. Libraries that nobody listed are removed: they would be
    run if they were ever compiled for."""
    if not place.is_dir():
        return "it is no directory" if place.exists() else "it is not there"
    try:
        listed = dict(json.loads((place / MANIFEST).read_text())["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is not there"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    there = {str(file.relative_to(place)): file for file in _files(place)}
    for name, expected in listed.items():
        if name not in there:
            return f"{name} is not there"
        if _hash(there[name].read_bytes()) != expected:
            return f"{name} has changed"
    for name in there.keys() - listed.keys():
        if name.endswith(LIBRARIES):
            there[name].unlink(missing_ok=True)
    return None


def remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _files(directory: Path) -> list[Path]:
    return sorted(
        file
        for file in directory.rglob("*")
        if file.is_file() and file.suffix not in (".lock", choices.SUFFIX) and file != directory / MANIFEST
    )


def digest(model: nn.Module, facts: object, code: Iterable[Path]) -> str:
    """Names the graphs of a model: the shapes, dtypes and layouts of its tensors, the settings of its modules,
    `facts`, the meaning of the code that they are traced from, and the compiler's settings."""
    from torch._inductor import config  # takes a second, which only who compiles has to spend

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
    sources = (part for file in files for part in (file.name.encode(), meaning(file.read_bytes())))
    compiler = repr(sorted(config.save_config_portable().items()))
    return _hash(*(line.encode() for line in lines), repr(facts).encode(), compiler.encode(), *sources)


def _is_setting(value: object) -> bool:
    return all(map(_is_setting, value)) if isinstance(value, tuple) else isinstance(value, SETTINGS)


def meaning(source: bytes) -> bytes:
    """A Python file without what changes nothing: comments, docstrings, where its lines begin and end."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    return ast.dump(tree).encode()


def _hash(*parts: bytes) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
