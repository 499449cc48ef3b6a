"""The flags that describe a request, for `zoo say`, `zoo batch` and `zoo bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from zoo.request import MAX_GAP_S

# Panels of `--help`.
VOICE = "Voice"
SAMPLING = "Sampling"

TextFormat = Annotated[
    Literal["plain", "markdown"],
    Option(help="markdown leaves marks, addresses of links, images, emoji and blocks of code unspoken."),
]
Loudness = Annotated[
    float | None,
    Option(
        min=-36,
        max=-8,
        help="Every file has this loudness in LUFS (EBU R128), such as -16. Default: that of the model's speech.",
    ),
]
Pronunciations = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="This JSON file says how terms are spoken.",
    ),
]
ModelOptions = Annotated[
    list[str],
    Option(
        "-O",
        "--option",
        metavar="NAME=VALUE",
        help="The request sets this option of the model (zoo inspect lists them). May be repeated.",
        rich_help_panel=SAMPLING,
    ),
]


@dataclass(frozen=True)
class RequestFlags:
    """Flags for the voice, the sampling and the speed."""

    voice: Annotated[
        str | None,
        Option(
            help="The model speaks in one of its voices (zoo inspect lists them), or in a mix such as "
            "vivian(2)+ryan(1). Default: its first one.",
            rich_help_panel=VOICE,
        ),
    ] = None
    reference: Annotated[
        Path | None,
        Option(
            help="The model speaks in the voice of this recording, if it can clone voices.",
            rich_help_panel=VOICE,
        ),
    ] = None
    reference_text: Annotated[
        str | None,
        Option(help="The recording says this text, word for word.", rich_help_panel=VOICE),
    ] = None
    language: Annotated[
        str | None, Option(help="The model speaks this one of its languages.", rich_help_panel=VOICE)
    ] = None
    instructions: Annotated[
        str | None,
        Option(help="The model speaks as these words describe.", rich_help_panel=VOICE),
    ] = None
    seed: Annotated[
        int,
        Option(min=0, max=2**63 - 1, help="Equal seeds give equal speech.", rich_help_panel=SAMPLING),
    ] = 0
    temperature: Annotated[
        float | None,
        Option(
            min=0,
            max=2,
            help="The model samples with this temperature; 0 is greedy. Default: the model's.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option(
            min=0,
            help="The model samples from this many most likely codes; 0 allows all. Default: the model's.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="The model samples from the most likely codes up to this total probability. Default: the "
            "model's.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(
            min=0.5,
            max=2,
            help="A value above 1 makes codes that were used before less likely. Default: the model's.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="The model speaks at most this many frames. Default: the model's limit.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    sentence_gap_s: Annotated[
        float | None,
        Option(
            min=0,
            max=MAX_GAP_S,
            help="Between sentences there are this many seconds of silence. Each sentence is spoken in a separate pass.",
        ),
    ] = None
    speed: Annotated[
        float,
        Option(min=0.25, max=4, help="The speech is this many times as fast, at the same pitch."),
    ] = 1.0

    def check(self) -> None:
        """Raise ValueError for a flag that would have no effect."""
        if self.reference_text is not None and self.reference is None:
            raise ValueError(
                "--reference-text needs the recording that it belongs to; name it with --reference"
            )
