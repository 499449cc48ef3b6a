"""Log lines on stderr: for people on a terminal, one JSON object a line elsewhere, unless ZOO_LOG says which
(`zoo serve --log`)."""

from __future__ import annotations

import logging
import os
import sys

import structlog
from structlog.typing import Processor

VARIABLE = "ZOO_LOG"  # json or text, for this process and those that it starts


def form() -> str:
    """json or text."""
    return os.environ.get(VARIABLE) or ("text" if sys.stderr.isatty() else "json")


def has_colors() -> bool:
    """Of a terminal, or of a supervisor that passes lines on to one."""
    return sys.stderr.isatty() or "FORCE_COLOR" in os.environ


def configure(process: str) -> None:
    """Once per process. Libraries that log through `logging` come out in the same form, from WARNING up."""

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
    structlog.configure(processors=[*shared, *last], logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
