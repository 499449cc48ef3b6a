"""Write a file completely or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a part, which replaces the file when this context ends without an error. Otherwise the part
    is removed: on a full disk it would take the room of other files. A link stays a link, and a pipe or a device
    has no part. Raises OSError."""
    file = file.resolve()
    if file.exists() and not file.is_file():
        yield file
        return
    part = file.with_name(f".{file.name}.part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
