"""The command `zoo cache`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from serving.cli.common import AsJson, app, directory_path, num_bytes, plural

if TYPE_CHECKING:
    from compile_cache.store import Stored

cache = typer.Typer(
    help="List, prune, export or import the compiled code that is kept between starts.\n\nServers run the "
    "code that they find in the cache. Anyone who can write to it, or gives you a file to import, can run "
    "code as you."
)
app.add_typer(cache, name="cache")

CacheDir = Annotated[
    Path | None,
    Option(
        parser=directory_path,
        metavar="DIR",
        envvar="ZOO_CACHE_DIR",
        help="Compiled code is kept in this directory. Default: ~/.cache/speechzoo.",
    ),
]
TarFile = Annotated[Path, Argument(metavar="FILE", help="The entries are in this tar file.")]


@cache.command("list")
def list_entries(
    as_json: AsJson = False,
    cache_dir: CacheDir = None,
) -> int:
    """List the entries, the most recently read first."""
    from compile_cache.store import stored

    root = root_of(cache_dir)
    entries = stored(root)
    if as_json:
        print(json.dumps({"directory": str(root), "entries": [facts(entry, root) for entry in entries]}))
    else:
        for entry in entries:
            print(line(entry, root))
        total = sum(entry.num_bytes for entry in entries)
        print(f"{root}: {plural(len(entries), 'entry', 'entries')}, {total / 2**20:,.1f} MiB")
    return 0


@cache.command("prune")
def prune_entries(
    max_size: Annotated[
        str, Option(help="The remaining entries take at most this much space (8GiB, 512MiB or bytes).")
    ] = "8GiB",
    max_days: Annotated[
        float, Option(min=0, help="Entries that were not read for this many days are dropped.")
    ] = 90,
    cache_dir: CacheDir = None,
) -> int:
    """Drop unused entries, then the least recently read ones until the rest fits."""
    from compile_cache.store import DAY_S, prune

    root = root_of(cache_dir)
    try:
        dropped = prune(root, num_bytes(max_size), max_days * DAY_S)
    except OSError as error:
        raise ValueError(f"{root} cannot be changed: {error.strerror or error}") from None
    for entry in dropped:
        print(f"dropped {line(entry, root)}")
    return 0


@cache.command("export")
def export_entries(file: TarFile, cache_dir: CacheDir = None) -> int:
    """Write all complete entries to a tar file, for machines of the same kind."""
    from compile_cache.store import export
    from serving.replacing import replacing

    try:
        with replacing(file) as part:
            names = export(root_of(cache_dir), part)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}") from None
    print(f"{file}: {plural(len(names), 'entry', 'entries')}")
    return 0


@cache.command("import")
def import_entries(file: TarFile, cache_dir: CacheDir = None) -> int:
    """Import entries that zoo cache export wrote.

    Your servers will run this code: import it only from people you trust.
    """
    from compile_cache.store import take_in

    root = root_of(cache_dir)
    try:
        names = take_in(root, file)
    except OSError as error:
        raise ValueError(f"{file} cannot be imported into {root}: {error.strerror or error}") from None
    print(f"{root}: {plural(len(names), 'new entry', 'new entries')}")
    if names and not any(is_for_this_machine(name) for name in names):
        print("zoo: none of them is for this machine and its versions of torch and Python", file=sys.stderr)
    return 0


def is_for_this_machine(entry: Path) -> bool:
    """Return whether a server on this machine could read an entry, which is named relative to the root."""
    from compile_cache.artifacts import place, root_directory

    own = [place(entry.name, "", device).parent for device in ("cpu", "cuda")]
    return root_directory() / entry.parent in own


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
