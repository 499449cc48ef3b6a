"""Pronunciations from clients: one list for all requests, in a file next to the voices."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from zoo.text.pronunciations import Pronunciation, read_file

FILE = ".pronunciations.json"  # hidden: the store of voices lists the other names

log = structlog.get_logger()


class Dictionary:
    """directory: of the voices. shared: the entries of the server's own file, which uploaded ones win over."""

    def __init__(self, directory: Path, shared: Sequence[Pronunciation] = ()):
        self._path = directory / FILE
        self._shared = list(shared)
        self.uploaded: list[Pronunciation] = []
        if self._path.exists():
            try:
                self.uploaded = read_file(self._path)
            except ValueError as error:
                log.error("pronunciations", error=str(error))
        self.entries = [*self.uploaded, *self._shared]

    def replace(self, entries: Sequence[Pronunciation]) -> None:
        """Replace the uploaded entries, for all requests that begin from now on. Raises OSError, and then nothing
        changes."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = msgspec.json.encode(entries)
        place, name = tempfile.mkstemp(prefix=FILE, dir=self._path.parent)
        try:
            with open(place, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(place)
            os.replace(name, self._path)
        except OSError:
            os.unlink(name)
            raise
        self.uploaded = list(entries)
        self.entries = [*self.uploaded, *self._shared]
