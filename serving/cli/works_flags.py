"""The flags of `zoo serve` for long works."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from serving.cli.common import WORKS, num_bytes
from serving.settings import WorksSettings


@dataclass(frozen=True)
class Works:
    """Flags for long works and their limits."""

    works_dir: Annotated[
        Path | None,
        Option(
            help="The server speaks whole documents into audiobooks, which it keeps in this directory. Default: it "
            "takes none.",
            rich_help_panel=WORKS,
        ),
    ] = None
    max_works: Annotated[
        int, Option(min=0, help="The server keeps at most this many works.", rich_help_panel=WORKS)
    ] = 100
    max_document_bytes: Annotated[
        str,
        Option(help="A document has at most this size (32MiB or bytes).", rich_help_panel=WORKS),
    ] = "32MiB"
    max_works_bytes: Annotated[
        str,
        Option(help="The files of all works take at most this much room (20GiB).", rich_help_panel=WORKS),
    ] = "20GiB"

    def settings(self) -> WorksSettings:
        """Raises ValueError."""
        return WorksSettings(
            directory=None if self.works_dir is None else str(self.works_dir.resolve()),
            num=self.max_works,
            document_bytes=num_bytes(self.max_document_bytes),
            disk_bytes=num_bytes(self.max_works_bytes),
        )
