"""zoo cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from serving.cli.common import app, num_bytes

if TYPE_CHECKING:
    from compile_cache.store import Stored

cache = typer.Typer(
    help="Compiled code, kept between starts. It is run by every server that finds it: whoever may write to the cache, or "
    "gives you a file to import, can run code as you."
)
app.add_typer(cache, name="cache")

CacheDir = Annotated[
    Path | None,
    Option(
        envvar="ZOO_CACHE_DIR",
        help="Where compiled code is kept; speechzoo in your cache directory otherwise.",
    ),
]
TarFile = Annotated[Path, Argument(metavar="FILE", help="A tar file.")]


@cache.command("list")
def list_entries(
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
    cache_dir: CacheDir = None,
) -> int:
    """What is kept, the last read first."""
    from compile_cache.store import stored

    root = root_of(cache_dir)
    entries = stored(root)
    if as_json:
        print(json.dumps({"directory": str(root), "entries": [facts(entry, root) for entry in entries]}))
    else:
        for entry in entries:
            print(line(entry, root))
        print(f"{root}: {len(entries)} entries, {sum(entry.num_bytes for entry in entries) / 2**20:,.1f} MiB")
    return 0


@cache.command("prune")
def prune_entries(
    max_size: Annotated[str, Option(help="Of all that stays: 8GiB, 512MiB or bytes.")] = "8GiB",
    max_days: Annotated[float, Option(min=0, help="Since an entry was last read.")] = 90,
    cache_dir: CacheDir = None,
) -> int:
    """Drop what nobody reads, and then what was read longest ago, until the rest fits."""
    from compile_cache.store import DAY_S, prune

    root = root_of(cache_dir)
    try:
        dropped = prune(root, num_bytes(max_size), max_days * DAY_S)
    except OSError as error:
        raise ValueError(f"{root} cannot be changed: {error.strerror}") from None
    for entry in dropped:
        print(f"dropped {line(entry, root)}")
    return 0


@cache.command("export")
def export_entries(file: TarFile, cache_dir: CacheDir = None) -> int:
    """Write all that is whole to a tar file, for machines of the same kind."""
    from compile_cache.store import export

    try:
        names = export(root_of(cache_dir), file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from None
    print(f"{file}: {len(names)} entries")
    return 0


@cache.command("import")
def import_entries(file: TarFile, cache_dir: CacheDir = None) -> int:
    """Take in what zoo cache export wrote: code that your servers will run, so only from those you trust."""
    from compile_cache.store import take_in

    root = root_of(cache_dir)
    try:
        names = take_in(root, file)
    except OSError as error:
        raise ValueError(f"{file} cannot be taken into {root}: {error.strerror}") from None
    print(f"{root}: {len(names)} new entries")
    return 0


def root_of(directory: Path | None) -> Path:
    from compile_cache.artifacts import root_directory

    return root_directory(directory)


def facts(entry: Stored, root: Path) -> dict[str, str | int | float]:
    return {
        "entry": str(entry.place.relative_to(root)),
        "bytes": entry.num_bytes,
        "last_read_s_ago": round(entry.age_s),
    }


def line(entry: Stored, root: Path) -> str:
    name = entry.place.relative_to(root)
    return f"{name}: {entry.num_bytes / 2**20:.1f} MiB, read {entry.age_s / 86_400:.1f} days ago"
