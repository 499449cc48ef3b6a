"""The flags of `zoo say` for subtitles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from serving.cli.common import check_writable

if TYPE_CHECKING:
    from zoo.contract import Speech

SUBTITLES = "Subtitles"  # a panel of `--help`


@dataclass(frozen=True)
class SubtitleFlags:
    """Flags for the file of subtitles, and for the model that finds the words."""

    subtitles: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Subtitles of the speech go into this file, .srt or .vtt; it needs --aligner. .vtt has the time of "
            "each word.",
            rich_help_panel=SUBTITLES,
        ),
    ] = None
    aligner: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="This CTC model finds when each word is spoken: a directory of transformers' Wav2Vec2ForCTC or "
            "HubertForCTC.",
            rich_help_panel=SUBTITLES,
        ),
    ] = None

    def check(self) -> None:
        """Raise ValueError for subtitles that cannot be written."""
        from zoo.align.files import check
        from zoo.align.subtitles import SUFFIXES

        if self.subtitles is None and self.aligner is not None:
            raise ValueError("--aligner finds the words of subtitles; name their file with --subtitles FILE")
        if self.subtitles is None:
            return
        if self.aligner is None:
            raise ValueError("--subtitles needs a model that finds the words; name it with --aligner DIR")
        if self.subtitles.suffix.lower() not in SUFFIXES:
            raise ValueError(f"--subtitles {self.subtitles} must end in one of: {', '.join(SUFFIXES)}")
        check(self.aligner)
        check_writable(self.subtitles)

    def write(self, speech: Speech, text: str, speed: float) -> None:
        """Write the subtitles, if there are to be any, and print what was written."""
        if self.subtitles is None or self.aligner is None:
            return
        from serving.tools.subtitles import write

        print(write(self.subtitles, speech, text, speed, self.aligner))
