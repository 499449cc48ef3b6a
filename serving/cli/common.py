"""What several commands take and show."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from zoo.hub import name_of, resolved

if TYPE_CHECKING:
    from serving.protocol import AudioClip

app = typer.Typer(
    add_completion=False, rich_markup_mode="markdown"
)  # flowing text: lines of a docstring are joined

MAX_REFERENCE_S = 60.0
MAX_BYTES = 1 << 50
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; the GPU where there is one.")]
Codec = Annotated[
    Literal["float32", "tf32"],
    Option(help="How a GPU multiplies in the codec; tf32 is faster, zoo parity says what it costs."),
]
VoicesDir = Annotated[
    Path | None,
    Option(
        envvar="ZOO_VOICES_DIR",
        help="Where uploaded voices are kept; speechzoo/voices in your data directory otherwise.",
    ),
]
DType = Annotated[
    Literal["float32", "bfloat16"] | None,
    Option(help="bfloat16 on a GPU and float32 on a CPU, when left out."),
]

# A model on the command line, where one will do
ModelArgument = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A directory, or ORG/NAME on the Hugging Face Hub; the small voice of this package when left out.",
        show_default=False,
    ),
]

# What `zoo say` and `zoo batch` ask of a speech
SpeechModel = Annotated[
    str,
    Option(
        "-m",
        "--model",
        help="A directory, or ORG/NAME on the Hugging Face Hub; the small voice of this package when left out.",
        show_default=False,
    ),
]
Voice = Annotated[
    str | None,
    Option(help="One of the model's voices (zoo inspect), or a mix of some, as vivian(2)+ryan(1)."),
]
ReferenceFile = Annotated[
    Path | None, Option(help="A recording of the voice to speak in, for models that take one.")
]
ReferenceText = Annotated[str | None, Option(help="What the recording says, word for word.")]
Language = Annotated[str | None, Option(help="One of the model's languages.")]
Instructions = Annotated[str | None, Option(help="How to speak, in words.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1)]
Temperature = Annotated[float | None, Option(min=0, max=2, help="0 is greedy.")]
TopK = Annotated[int | None, Option(min=0, help="0 is off.")]
TopP = Annotated[float | None, Option(min=0, max=1)]
RepetitionPenalty = Annotated[float | None, Option(min=0.5, max=2)]
MaxNewTokens = Annotated[int | None, Option(min=1, help="The most frames to speak.")]
Speed = Annotated[
    float, Option(min=0.25, max=4, help="How fast, at the same pitch; 1 is as the model speaks.")
]
ModelOptions = Annotated[
    list[str],
    Option(
        "-O",
        "--option",
        metavar="NAME=VALUE",
        help="An option of the model (zoo inspect); may be given several times.",
    ),
]


def tell_version(is_asked: bool) -> None:
    if is_asked:
        of = ", ".join(f"{name} {metadata.version(name)}" for name in ("speechzoo", "torch"))
        print(f"{of}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def of_all(
    version: Annotated[
        bool, Option("--version", callback=tell_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Speech language models: serve them, or let them speak from the shell."""


def named_directory(model: str) -> tuple[str, str]:
    """MODEL or NAME=MODEL -> the name for clients and the directory, with its adapter. Raises ValueError."""
    name, equals, named = model.partition("=")
    if not equals or Path(model).is_dir():
        return name_of(model), resolved(model)
    if not name:
        raise ValueError(f"{model!r} has no name before '='; needed is MODEL or NAME=MODEL")
    return name, resolved(named)


def named_directories(models: list[str]) -> dict[str, str]:
    """Their directories by name. Raises ValueError."""
    directories: dict[str, str] = {}
    for name, directory in map(named_directory, models):
        if name in directories:
            raise ValueError(f"two models have the name {name!r}; NAME=MODEL gives one another name")
        directories[name] = directory
    return directories


def num_bytes(text: str) -> int:
    """'4GiB' -> 4294967296. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|)", text)
    count = float(match[1]) * UNITS[match[2]] if match is not None else 0.0
    if not 1 <= count < MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is not an amount of memory; 4GiB, 512MiB or a number of bytes is")
    return int(count)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr, where that is a terminal -> what moves it: the fraction that is done, and what comes
    next."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[title]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0, title=title)
        yield lambda fraction, stage: bar.update(task, completed=fraction, description=stage)


def print_numbers(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of numbers, none of which is cut: on a terminal that is too narrow for it rows become columns. A column's name
    may have two lines, and the first of them is that of the columns before it where it is empty."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    upright = Table(*columns, title=title, title_justify="left")
    names, above = [], ""
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
        column_of_any.no_wrap, column_of_any.justify = True, "right"
    turned.columns[0].justify = "left"

    console = Console()

    def width(table: Table) -> int:
        return Measurement.get(console, console.options.update_width(10_000), table).maximum

    table = turned if console.is_terminal and width(upright) > console.width else upright
    Console(width=max(console.width, width(table))).print(table)


def readable(value: Any) -> str:
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
    """Raises ValueError."""
    from serving.http.decode import decode

    try:
        return decode(path.read_bytes(), MAX_REFERENCE_S)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None


def fail(line: str, status: int) -> None:
    print(f"zoo: {line}", file=sys.stderr)
    sys.exit(status)
