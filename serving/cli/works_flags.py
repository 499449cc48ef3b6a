"""The flags of `zoo serve` for long works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from serving.cli.common import WORKS, directory_path, num_bytes, writable_directory
from serving.settings import WorksSettings


@dataclass(frozen=True)
class Works:
    """Flags for long works and their limits."""

    works_dir: Annotated[
        Path | None,
        Option(
            parser=directory_path,
            metavar="DIR",
            help="The server speaks whole documents into audiobooks, called works, and keeps them in this directory. "
            "Default: it takes no documents.",
            rich_help_panel=WORKS,
        ),
    ] = None
    max_works: Annotated[
        int | None,
        Option(min=0, help="The server keeps at most this many works. Default: 100.", rich_help_panel=WORKS),
    ] = None
    max_document_bytes: Annotated[
        str | None,
        Option(
            help="A document has at most this size (32MiB or bytes). Default: 32MiB.", rich_help_panel=WORKS
        ),
    ] = None
    max_works_bytes: Annotated[
        str | None,
        Option(
            help="The files of all works take at most this much disk space (20GiB or bytes). Default: 20GiB.",
            rich_help_panel=WORKS,
        ),
    ] = None

    def settings(self) -> WorksSettings:
        """Raises ValueError."""
        if self.works_dir is None:
            if self != Works():
                raise ValueError("--max-works, --max-document-bytes and --max-works-bytes need --works-dir")
            return WorksSettings()
        given = {
            "num": self.max_works,
            "document_bytes": None if self.max_document_bytes is None else num_bytes(self.max_document_bytes),
            "disk_bytes": None if self.max_works_bytes is None else num_bytes(self.max_works_bytes),
        }
        limits = {name: value for name, value in given.items() if value is not None}
        return WorksSettings(directory=writable_directory(self.works_dir, "--works-dir"), **limits)
