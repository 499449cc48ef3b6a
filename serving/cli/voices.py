"""zoo voices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from serving.cli.common import VoicesDir, app, recording

if TYPE_CHECKING:
    from serving.http.voices import Voices

voices = typer.Typer(help="Uploaded voices: recordings that a model for clones can speak in, by name.")
app.add_typer(voices, name="voices")


@voices.command("add")
def add_voice(
    name: Annotated[str, Argument(help="The voice's name: letters, digits, '_', '-' and '.'.")],
    sample: Annotated[
        Path, Argument(help="A recording of the voice: WAV, FLAC, MP3, Ogg, AAC, M4A or WebM.")
    ],
    text: Annotated[
        str | None, Option(help="What the recording says, word for word; a clone sounds better with it.")
    ] = None,
    voices_dir: VoicesDir = None,
) -> int:
    """Keep a recording as a voice."""
    there = store(voices_dir)
    try:
        voice = there.add(name, recording(sample), text)
    except OSError as error:
        raise ValueError(f"voices cannot be kept in {there.directory}: {error.strerror}") from None
    print(f"{voice.name}: {voice.duration_s:.2f} s" + ("" if voice.ref_text else ", without a text"))
    return 0


@voices.command("list")
def list_voices(
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
    voices_dir: VoicesDir = None,
) -> int:
    """The voices that are kept."""
    import msgspec

    there = store(voices_dir)
    kept, damaged = there.survey()
    if as_json:
        print(
            json.dumps(
                {"directory": str(there.directory), "voices": msgspec.to_builtins(kept), "damaged": damaged}
            )
        )
    else:
        for voice in kept:
            print(f"{voice.name}: {voice.duration_s:.2f} s, {voice.ref_text or 'without a text'}")
        for name in damaged:
            print(f"{name}: damaged; add it again, or remove it")
    return 0


@voices.command("remove")
def remove_voice(
    name: Annotated[str, Argument(help="The voice's name.")], voices_dir: VoicesDir = None
) -> int:
    """Forget a voice."""
    there = store(voices_dir)
    try:
        removed = there.remove(name)
    except OSError as error:
        raise ValueError(f"voices cannot be removed from {there.directory}: {error.strerror}") from None
    if not removed:
        raise no_voice(name, there)
    return 0


@voices.command("rename")
def rename_voice(
    name: Annotated[str, Argument(help="The voice's name.")],
    new_name: Annotated[str, Argument(help="Its new one.")],
    voices_dir: VoicesDir = None,
) -> int:
    """Give a voice another name."""
    there = store(voices_dir)
    try:
        voice = there.rename(name, new_name)
    except OSError as error:
        raise ValueError(f"voices cannot be kept in {there.directory}: {error.strerror}") from None
    if voice is None:
        raise no_voice(name, there)
    print(f"{voice.name}: {voice.duration_s:.2f} s")
    return 0


def no_voice(name: str, there: Voices) -> ValueError:
    kept = ", ".join(there.names()) or "none"
    return ValueError(f"there is no voice {name!r} in {there.directory}; there is: {kept}")


def store(directory: Path | None) -> Voices:
    from serving.http.voices import Voices, default_directory

    return Voices(directory or default_directory())
