"""Runs a command of `zoo`. A user's mistake prints one line on stderr and exits with status 2, and a file that
the system refuses one with status 1."""

from __future__ import annotations

import sys

import typer

# Each module registers its commands. `cli.common.COMMANDS` sets the order of `zoo --help`.
# isort: off
from serving.cli import serve as serve
from serving.cli import say as say
from serving.cli import chat as chat
from serving.cli import batch as batch
from serving.cli import audiobook as audiobook
from serving.cli import tools as tools
from serving.cli import load as load
from serving.cli import wyoming as wyoming
from serving.cli import voices as voices
from serving.cli import cache as cache

# isort: on
from serving.cli.common import app, fail


def run() -> None:
    """Run the command that the arguments name, and exit."""
    command = typer.main.get_command(app)
    try:
        status = command.main(sys.argv[1:] or ["--help"], prog_name="zoo", standalone_mode=False)
    except typer.TyperException as error:
        why = error.format_message().removesuffix(".").replace("Value error, ", "")  # pydantic's words
        context = getattr(error, "ctx", None)  # of a usage error, a class that typer does not export
        fail(f"{why} (see {context.command_path if context else 'zoo'} --help)", error.exit_code)
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:  # such as a full disk; commands name the files that they check
        named = filter(None, (error.filename, error.strerror or str(error)))
        fail(": ".join(map(str, named)), 1)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    sys.exit(status)
