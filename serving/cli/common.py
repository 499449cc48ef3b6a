"""Options and output that several commands share."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from zoo.hub import name_of, repository_of, resolved

if TYPE_CHECKING:
    from serving.protocol import AudioClip

# The order of `zoo --help`: most used first.
COMMANDS = (
    "serve",
    "say",
    "chat",
    "batch",
    "audiobook",
    "voices",
    "inspect",
    "load",
    "bench",
    "parity",
    "warm",
    "cache",
    "wyoming",
    "demo-checkpoint",
)

# Panels of `--help`.
MODEL = "Model"
MEMORY = "Memory"
LATENCY = "Latency"
LIMITS = "Limits"
WORKS = "Long works"
SECURITY = "Security"
LOGS = "Logs"
REPLICAS = "Replicas"
ON_DEMAND = "Models on demand"


def directory_path(path: str) -> Path:
    """Return the path that an option gives. Raises BadParameter for an empty one, as of a shell variable that is not
    set: it would mean the working directory."""
    if not path:
        raise typer.BadParameter("it is empty; give the path of a directory")
    return Path(path)


class Commands(TyperGroup):
    """The group of all commands. It lists them in the order of COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=COMMANDS.index)


# Markdown joins the lines of a docstring into paragraphs.
app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode="markdown")

MAX_REFERENCE_S = 60.0
MAX_BYTES = 1 << 50
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

MODEL_HELP = (
    "The model is a directory, or ORG/NAME on the Hugging Face Hub. Default: the bundled small voice."
)

Device = Annotated[
    str | None,
    Option(
        help="The model runs on cpu, cuda or cuda:N. Default: a GPU if there is one.", rich_help_panel=MODEL
    ),
]
Codec = Annotated[
    Literal["float32", "tf32", "fp16", "bf16"],
    Option(
        help="On a GPU, the codec multiplies in this format. Shorter formats are faster, and zoo parity measures "
        "their error.",
        rich_help_panel=MODEL,
    ),
]
Attention = Annotated[
    Literal["auto", "triton", "flashinfer"],
    Option(
        help="On a GPU, these kernels compute the attention of steps: the project's own (triton), or those of the extra "
        "flashinfer. auto times both in the warm-up and takes the faster one.",
        rich_help_panel=MODEL,
    ),
]
Depth = Annotated[
    Literal["layers", "whole"],
    Option(
        help="On a GPU, the code predictor of Qwen3-TTS, Fish Audio S2 or CSM runs layer by layer, or in one launch for "
        "each pass (whole). No GPU has run whole yet.",
        rich_help_panel=MODEL,
    ),
]
Compile = Annotated[
    bool, Option(help="The model is compiled. --no-compile runs it eagerly.", rich_help_panel=MODEL)
]
DType = Annotated[
    Literal["float32", "bfloat16"] | None,
    Option(
        help="The model computes in this type. Default: bfloat16 on a GPU, float32 on a CPU.",
        rich_help_panel=MODEL,
    ),
]
DeviceMap = Annotated[
    str | None,
    Option(
        metavar="auto|balanced|FILE",
        help="Layers that do not fit the GPU lie on other GPUs or on the host, and are copied to it for each launch, "
        "which is slow. balanced gives all GPUs equal parts. FILE is JSON with the device of each layer that lies "
        "elsewhere.",
        rich_help_panel=MODEL,
    ),
]
Weights = Annotated[
    Literal["published", "int8", "fp8"],
    Option(
        help="The weights of large matrices are as published, or rounded: to int8 on a CPU, to fp8 on a GPU of compute "
        "capability 8.9 or newer. Rounding can make steps faster. It changes codes, and zoo parity measures how many.",
        rich_help_panel=MODEL,
    ),
]
Chunked = Annotated[
    bool,
    Option(
        "--chunked",
        help="A model that renders only whole speeches (Chatterbox) renders chunks of a second. First audio comes "
        "earlier, but the samples differ and rendering takes more time.",
        rich_help_panel=MODEL,
    ),
]
MaxSlots = Annotated[
    int | None,
    Option(
        min=1,
        max=1024,
        help="Each model runs at most this many requests at once. Default on a GPU: as many as fit, up to 256. Default on "
        "a CPU: 8, or with --policy throughput as many as fit, up to 64.",
        rich_help_panel=MEMORY,
    ),
]
KVMemory = Annotated[
    str | None,
    Option(
        help="All models share this much memory for the KV cache (4GiB, 512MiB or bytes). Default: enough for the "
        "slots, or on a GPU all memory that weights and states leave.",
        rich_help_panel=MEMORY,
    ),
]
VoicesDir = Annotated[
    Path | None,
    Option(
        parser=directory_path,
        metavar="DIR",
        envvar="ZOO_VOICES_DIR",
        help="Uploaded voices are stored in this directory. Default: speechzoo/voices in your data "
        "directory.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="The command prints one JSON object, for programs.")]

# The model of commands that take only one.
ModelArgument = Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]

SpeechModel = Annotated[
    str, Option("-m", "--model", help=MODEL_HELP, show_default=False, rich_help_panel=MODEL)
]


def tell_version(is_asked: bool) -> None:
    """Print the versions and exit."""
    if is_asked:
        of = ", ".join(f"{name} {metadata.version(name)}" for name in ("speechzoo", "torch"))
        print(f"{of}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def of_all(
    context: typer.Context,
    version: Annotated[
        bool,
        Option(
            "--version",
            callback=tell_version,
            is_eager=True,
            help="Show the versions of speechzoo, torch and Python, and exit.",
        ),
    ] = False,
) -> None:
    """Serve speech language models over HTTP, or speak with them from the shell."""
    from serving import logs  # which `zoo --help` does not need

    logs.configure(context.invoked_subcommand or "zoo")  # to stderr: stdout is the output of commands


def named_directory(model: str) -> tuple[str, str]:
    """Split MODEL or NAME=MODEL into the name for clients and the directory (with its adapter).

    Raises ValueError.
    """
    name, equals, named = model.partition("=")
    if not equals or Path(model).is_dir():
        return name_of(model), resolved(model)
    if not name:
        raise ValueError(f"{model!r} has no name before '='; use MODEL or NAME=MODEL")
    return name, resolved(named)


def repository_names(models: list[str]) -> dict[str, str]:
    """Return the name for clients of each model from the Hub, by its repository. Two models of one repository
    (with different adapters) leave it to the first."""
    names: dict[str, str] = {}
    for model in models:
        name, equals, named = model.partition("=")
        is_named = bool(equals) and not Path(model).is_dir()
        if (repository := repository_of(named if is_named else model)) is not None:
            names.setdefault(repository, name if is_named else name_of(model))
    return names


def named_directories(models: list[str]) -> dict[str, str]:
    """Return the directories of models by name. Raises ValueError."""
    directories: dict[str, str] = {}
    for name, directory in map(named_directory, models):
        if name in directories:
            raise ValueError(f"two models have the name {name!r}; rename one with NAME=MODEL")
        directories[name] = directory
    return directories


def num_bytes(text: str) -> int:
    """Return an amount of memory in bytes: '4GiB' gives 4294967296. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|)", text)
    count = float(match[1]) * UNITS[match[2]] if match is not None else 0.0
    if not 1 <= count < MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is not an amount of memory; use 4GiB, 512MiB or a number of bytes")
    return int(count)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar if stderr is a terminal. Yields a function that sets the fraction and the stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[title]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=1.0, title=title)
        yield lambda fraction, stage: bar.update(task, completed=fraction, description=stage)


def print_numbers(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of numbers without cutting any. On a terminal that is too narrow, rows become columns.

    A column's name may have two lines. If the first line is empty, it is the one of the column before.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    upright = Table(*columns, title=title, title_justify="left")
    names = []
    above = ""
    for column in columns:
        first, _, second = column.rpartition("\n")
        above = first or (above if column.startswith("\n") else "")
        names.append(f"{above} {second}".strip().replace(" /", "/"))
    turned = Table(names[0], *(row[0] for row in rows), title=title, title_justify="left")
    for row in rows:
        upright.add_row(*row)
    for name, *values in list(zip(names, *rows, strict=True))[1:]:
        turned.add_row(name, *values)
    for column_of_any in (*upright.columns, *turned.columns):
        column_of_any.no_wrap = True
        column_of_any.justify = "right"
    turned.columns[0].justify = "left"

    console = Console()

    def width(table: Table) -> int:
        return Measurement.get(console, console.options.update_width(10_000), table).maximum

    table = turned if console.is_terminal and width(upright) > console.width else upright
    Console(width=max(console.width, width(table))).print(table)


def plural(count: int, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: "1 process", "2 processes"."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def readable(value: Any) -> str:
    """Return a value as text for a table."""
    match value:
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(str, value))
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def recording(path: Path) -> AudioClip:
    """Read and decode a recording. Raises ValueError."""
    from serving.http.decode import decode

    try:
        return decode(path.read_bytes(), MAX_REFERENCE_S)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None


def fail(line: str, status: int) -> None:
    """Print a line on stderr and exit."""
    print(f"zoo: {line}", file=sys.stderr)
    sys.exit(status)


def check_writable(out: Path) -> None:
    """Raise ValueError if a file cannot be written."""
    there = out if out.exists() else out.absolute().parent
    if out.is_dir() or not out.absolute().parent.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{out} cannot be written: it must be a file in an existing, writable directory")


def writable_directory(path: Path, option: str) -> str:
    """Make the directory of an option if there is none, and return its absolute path. Raises ValueError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{option}: {path} is not a writable directory: {error.strerror}") from None
    return str(path.resolve())
