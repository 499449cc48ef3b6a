"""A process that reads a document or joins speech, so that neither delays the streams of a server.

    python -m serving.books.process read DOCUMENT OUT_DIR MAX_CHARS    writes book.json, with parts of MAX_CHARS
    python -m serving.books.process join DIRECTORY [CHAPTER]           writes the book, or a chapter

It prints an Outcome as JSON, has the lowest priority, and ends when its standard input is closed.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

from serving.books.join import join
from serving.books.manuscript import (
    BOOK,
    MAX_CHAPTERS,
    MAX_CHARS,
    TEXTS,
    ChapterTexts,
    Manuscript,
    Outcome,
    chapter_file,
    manuscript_at,
    part_file,
)
from serving.books.read import Book, Chapter, read_book, spoken_parts
from serving.exit_with_parent import exit_with_parent

MAX_UTF8_BYTES = 4  # of a character
MAX_READ_CPU_S = 60  # a novel takes one or two seconds
MAX_READ_BYTES = 2 << 30  # of address space, Python and its packages included


def main() -> None:
    exit_with_parent(sys.stdin.fileno())
    os.nice(19)
    if sys.argv[1] == "read":
        limit()
    sys.stdout.buffer.write(msgspec.json.encode(outcome_of(*sys.argv[1:])))


def limit() -> None:
    """Limit this process's memory and processor time: the document may be hostile."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_READ_CPU_S, MAX_READ_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_READ_BYTES, MAX_READ_BYTES))


def outcome_of(what: str, where: str, *more: str) -> Outcome:
    """Do what the arguments of this process say."""
    try:
        return read(Path(where), Path(more[0]), int(more[1])) if what == "read" else joined(where, *more)
    except OSError as error:
        return Outcome(error=str(error), errno=error.errno)
    except (ValueError, MemoryError) as error:
        return Outcome(error=str(error) or "reading it takes too much memory")


def read(document: Path, out: Path, max_chars: int) -> Outcome:
    """Write the texts of a document. Raises ValueError, OSError."""
    if document.suffix.lower() != ".epub" and document.stat().st_size > MAX_UTF8_BYTES * MAX_CHARS:
        raise ValueError(f"{document} is too long; a work has up to {MAX_CHARS} characters")
    book = read_book(document)
    num_chars = sum(len(chapter.text) for chapter in book.chapters)
    if num_chars > MAX_CHARS:
        raise ValueError(f"{document} has {num_chars} characters; a work has up to {MAX_CHARS}")
    (out / TEXTS).write_bytes(msgspec.json.encode(manuscript_of(document, book, max_chars)))
    return Outcome()


def manuscript_of(document: Path, book: Book, max_chars: int) -> Manuscript:
    """Return the texts of a book. Raises ValueError."""
    chapters = tuple(
        ChapterTexts(chapter.title, tuple(spoken_parts(chapter.text, max_chars))) for chapter in book.chapters
    )
    if len(chapters) > MAX_CHAPTERS:
        raise ValueError(f"{document} has {len(chapters)} chapters; a work has up to {MAX_CHAPTERS}")
    return Manuscript(book.title, book.author, chapters)


def joined(where: str, chapter: str | None = None) -> Outcome:
    """Join the speech of one chapter, or of all. Raises OSError, ValueError."""
    directory = Path(where)
    texts = manuscript_at(directory)
    numbers = range(1, len(texts.chapters) + 1) if chapter is None else [int(chapter)]
    chosen = [texts.chapters[number - 1] for number in numbers]
    files = [
        [directory / part_file(number, part) for part in range(1, len(each.parts) + 1)]
        for number, each in zip(numbers, chosen, strict=True)
    ]
    book = Book(texts.title, texts.author, tuple(Chapter(each.title, "") for each in chosen))
    return Outcome(join(book, files, directory / (BOOK if chapter is None else chapter_file(int(chapter)))))


if __name__ == "__main__":
    main()
