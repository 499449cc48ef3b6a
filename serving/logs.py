"""Log lines on stderr: text on a terminal, one JSON object per line elsewhere. ZOO_LOG (`zoo serve --log`)
overrides this."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

VARIABLE = "ZOO_LOG"  # json or text, for this process and its children


def form() -> str:
    """Return the form of log lines: "json" or "text"."""
    return os.environ.get(VARIABLE) or ("text" if sys.stderr.isatty() else "json")


def has_colors() -> bool:
    """Return whether log lines have colours: stderr is a terminal, or the supervisor relays them to one."""
    return sys.stderr.isatty() or "FORCE_COLOR" in os.environ


def write(text: str) -> None:
    """Write to stderr at once. Text that it refuses is lost: a full disk or a closed pipe ends no request."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Stderr(io.TextIOBase):
    """A file for log lines that `write` takes."""

    def write(self, text: str) -> int:
        write(text)
        return len(text)


def configure(process: str) -> None:
    """Set up logging; call it once per process. Lines that libraries log through `logging`, from WARNING up,
    get the same form."""

    def name_process(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {"process": process, **event}

    shared: list[Processor] = [
        name_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor]
    if form() == "text":
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=has_colors(), exception_formatter=plain)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Each line is one write with its end: processes share stderr, and their lines must not mix.
    file = cast(TextIO, Stderr())
    structlog.configure(processors=[*shared, *last], logger_factory=structlog.WriteLoggerFactory(file))
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
