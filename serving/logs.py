"""Log lines on stderr: for people on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor


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
    if sys.stderr.isatty():
        last = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
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
