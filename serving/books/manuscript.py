"""A book that is being spoken, on disk: its texts, and the names of the files of speech.

    DIRECTORY/book.json        title, author, and the texts of all parts (Manuscript)
    DIRECTORY/0002-001.flac    the speech of a part: the first one of the second chapter
    DIRECTORY/0002.m4a         a finished chapter
    DIRECTORY/book.m4b         the finished book

serving/books/process.py reads a document into the first of these files, and joins the others.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

TEXTS = "book.json"
BOOK = "book.m4b"
PARTS = "*.flac"
MAX_CHARS = 2_000_000  # of a book
MAX_CHAPTERS = 1000


class ChapterTexts(msgspec.Struct, frozen=True):
    title: str
    parts: tuple[str, ...]


class Manuscript(msgspec.Struct, frozen=True):
    title: str
    author: str | None
    chapters: tuple[ChapterTexts, ...]


class Outcome(msgspec.Struct, frozen=True):
    """The last message of a process. errno: of a disk that is full, for example."""

    audio_s: float | None = None
    error: str | None = None
    errno: int | None = None


def part_file(chapter: int, part: int) -> str:
    """Return the name of the file of a part. Both numbers begin with 1."""
    return f"{chapter:04}-{part:03}.flac"


def chapter_file(chapter: int) -> str:
    return f"{chapter:04}.m4a"


def manuscript_at(directory: Path) -> Manuscript:
    """Raises OSError, and msgspec.DecodeError for a damaged file."""
    return msgspec.json.decode((directory / TEXTS).read_bytes(), type=Manuscript)
