"""Run the command `zoo` in this process, so that torch is imported only once."""

import io
import logging
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from serving.__main__ import main

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@contextmanager
def same_log():
    """Keep the log of this process as it is. Some commands set up their own."""
    root, config = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        structlog.configure(**config)
        root.handlers[:] = handlers
        root.setLevel(level)


def zoo(*arguments, stdin=""):
    """Run the command and return its exit status and output."""
    out, err = io.StringIO(), io.StringIO()
    with (
        same_log(),
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", ["zoo", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setenv("COLUMNS", "200")
        patch.chdir(ROOT)
        main()
    return Done(end.value.code, out.getvalue(), err.getvalue())
