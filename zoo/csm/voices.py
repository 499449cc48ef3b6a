"""Voices: the recordings in a model directory, each with its words. They are read like a request's references.

    prompts/NAME.wav     the recording
    prompts/NAME.txt     its words, for a recording that is not among TRANSCRIPTS

The repository `sesame/csm-1b` has the recordings of TRANSCRIPTS without their words. Source of the words:
SesameAILabs/csm at 2d72082, run_csm.py; those of read speech, Sesame's space on the Hub, app.py.
"""

from __future__ import annotations

from pathlib import Path

from zoo.request import BLANK, Reference
from zoo.voices.recordings import read_clip

FOLDER = "prompts"
RANDOM = "random"  # no recording: the seed decides
TRANSCRIPTS = {
    "conversational_a": (
        "like revising for an exam I'd have to try and like keep up the momentum because I'd start really early "
        "I'd be like okay I'm gonna start revising now and then like you're revising for ages and then I just "
        "like start losing steam I didn't do that for the exam we had recently to be fair that was a more of a "
        "last minute scenario but like yeah I'm trying to like yeah I noticed this yesterday that like Mondays I "
        "sort of start the day with this not like a panic but like a"
    ),
    "conversational_b": (
        "like a super Mario level. Like it's very like high detail. And like, once you get into the park, it just "
        "like, everything looks like a computer game and they have all these, like, you know, if, if there's like "
        "a, you know, like in a Mario game, they will have like a question block. And if you like, you know, punch "
        "it, a coin will come out. So like everyone, when they come into the park, they get like this little "
        "bracelet and then you can go punching question blocks around."
    ),
    "read_speech_a": (
        "And Lake turned round upon me, a little abruptly, his odd yellowish eyes, a little like those of the sea "
        "eagle, and the ghost of his smile that flickered on his singularly pale face, with a stern and insidious "
        "look, confronted me."
    ),
    "read_speech_b": (
        "He was such a big boy that he wore high boots and carried a jack knife. He gazed and gazed at the cap, "
        "and could not keep from fingering the blue tassel."
    ),
    "read_speech_c": (
        "All passed so quickly, there was so much going on around him, the Tree quite forgot to look to himself."
    ),
    "read_speech_d": (
        "Suddenly I was back in the old days Before you felt we ought to drift apart. It was some trick-the way "
        "your eyebrows raise."
    ),
}


def find(directory: Path) -> dict[str, Path]:
    """Return the recordings whose words are known, by the lower-case names of their voices. Raises ValueError
    for a name that is taken."""
    found: dict[str, Path] = {}
    for path in sorted((directory / FOLDER).glob("*.wav")):
        name = path.stem.lower()
        if name == RANDOM or name in found:
            raise ValueError(f"{path}: the voice {name!r} exists already; rename the file")
        if name in TRANSCRIPTS or path.with_suffix(".txt").is_file():
            found[name] = path
    return found


def read(directory: Path) -> dict[str, Reference]:
    """Return the voices of a model directory by name. Raises ValueError."""
    return {name: Reference(read_clip(path), _words(name, path)) for name, path in find(directory).items()}


def _words(name: str, path: Path) -> str:
    """Return the words of a recording: those of its text file, else the published ones. Raises ValueError."""
    file = path.with_suffix(".txt")
    if not file.is_file():
        return TRANSCRIPTS[name]
    try:
        words = file.read_text(encoding="utf-8").strip(BLANK)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not words:
        raise ValueError(f"{file} is empty; write the words of {path.name} into it")
    return words
