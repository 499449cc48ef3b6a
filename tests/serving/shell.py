"""Run the command `zoo` in this process, so that torch is imported only once."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.__main__ import main

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def zoo(*arguments, stdin=""):
    """Run the command and return its exit status and output."""
    out, err = io.StringIO(), io.StringIO()
    with (
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
