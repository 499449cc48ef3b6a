"""The command `zoo voices`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from serving.cli.common import AsJson, VoicesDir, app, recording

if TYPE_CHECKING:
    from serving.http.voices import Voices

voices = typer.Typer(help="Add, list, rename or remove the stored voices that cloning models can speak in.")
app.add_typer(voices, name="voices")


@voices.command("add")
def add_voice(
    name: Annotated[
        str, Argument(help="The voice gets this name; it may have letters, digits, '_', '-' and '.'.")
    ],
    sample: Annotated[
        Path, Argument(help="This file has a recording of the voice: WAV, FLAC, MP3, Ogg, AAC, M4A or WebM.")
    ],
    text: Annotated[
        str | None,
        Option(help="The recording says this text, word for word; the clone sounds better with it."),
    ] = None,
    voices_dir: VoicesDir = None,
) -> int:
    """Store a recording as a voice."""
    there = store(voices_dir)
    try:
        voice = there.add(name, recording(sample), text)
    except OSError as error:
        raise ValueError(f"voices cannot be kept in {there.directory}: {error.strerror}") from None
    print(f"{voice.name}: {voice.duration_s:.2f} s" + ("" if voice.ref_text else ", no text"))
    return 0


@voices.command("list")
def list_voices(
    as_json: AsJson = False,
    voices_dir: VoicesDir = None,
) -> int:
    """List the stored voices."""
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
            print(f"{voice.name}: {voice.duration_s:.2f} s, {voice.ref_text or 'no text'}")
        for name in damaged:
            print(f"{name}: damaged; add it again, or remove it")
    return 0


@voices.command("remove")
def remove_voice(
    name: Annotated[str, Argument(help="The voice has this name.")], voices_dir: VoicesDir = None
) -> int:
    """Delete a voice."""
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
    name: Annotated[str, Argument(help="The voice has this name.")],
    new_name: Annotated[str, Argument(help="The voice gets this name.")],
    voices_dir: VoicesDir = None,
) -> int:
    """Rename a voice."""
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
    return ValueError(f"{there.directory} has no voice {name!r}; possible voices: {kept}")


def store(directory: Path | None) -> Voices:
    from serving.http.voices import Voices, default_directory

    return Voices(directory or default_directory())
