"""The works on disk. Each has a directory, and every file in it appears completely or not at all:

    WORKS/ID/work.json       what it is, and which chapters can be heard (Facts)
    WORKS/ID/request.json    the fields of a speech request, without the text
    WORKS/ID/book.json ...   the texts and the speech (serving/books/manuscript.py)

These files are the progress, so a server that is killed loses only the parts that were being spoken.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import structlog

from serving.books.manuscript import BOOK, PARTS, part_file
from serving.http.objects import Error
from serving.http.works.schemas import ChapterObject, State, WorkObject
from serving.replacing import replacing

NEW, OLD = ".zoo-new-", ".zoo-old-"  # prefixes of hidden directories, while a work is added or removed
FACTS, REQUEST = "work.json", "request.json"

log = structlog.get_logger()


class ChapterFacts(msgspec.Struct):
    title: str
    num_chars: tuple[int, ...]  # of each part
    audio_s: float | None = None  # once its file is there


class Facts(msgspec.Struct, kw_only=True):
    """The contents of work.json. key: the name of the API key that the work belongs to."""

    id: str
    title: str
    author: str | None
    document: str
    model: str
    voice: str | None
    seed: int
    key: str | None
    created_at: int
    chapters: list[ChapterFacts]
    audio_s: float | None = None  # once the book is there


class Work:
    """A work in memory. spoken: the parts whose files are there, as (chapter, part)."""

    def __init__(self, directory: Path, facts: Facts):
        self.directory, self.facts = directory, facts
        self.doing: State = "waiting"
        self.error: Error | None = None
        self.not_before_s = 0.0  # by time.monotonic()
        self.num_bytes = 0
        self.num_chars = sum(sum(chapter.num_chars) for chapter in facts.chapters)
        self.num_spoken = 0  # characters
        self.spoken: set[tuple[int, int]] = set()

    def look(self) -> None:
        """Find out which files are there. Raises OSError."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.directory)}
        self.num_bytes = sum(sizes.values())
        self.num_spoken = 0
        self.spoken.clear()
        for number, chapter in enumerate(self.facts.chapters, 1):
            for part in range(1, len(chapter.num_chars) + 1):
                if chapter.audio_s is not None or part_file(number, part) in sizes:
                    self.mark_spoken(number, part)

    def mark_spoken(self, chapter: int, part: int) -> None:
        self.spoken.add((chapter, part))
        self.num_spoken += self.facts.chapters[chapter - 1].num_chars[part - 1]

    @property
    def state(self) -> State:
        if self.error is not None:
            return "failed"
        return "complete" if self.facts.audio_s is not None else self.doing

    def write(self, name: str, content: bytes) -> None:
        """Write a file completely or not at all. Raises OSError."""
        with replacing(self.directory / name) as part, part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def drop_parts(self) -> None:
        """Remove the speech of the parts, which the finished book contains. Raises OSError."""
        for file in self.directory.glob(PARTS):
            file.unlink()

    def save(self, facts: Facts) -> None:
        """Write work.json. Raises OSError."""
        self.write(FACTS, msgspec.json.encode(facts))

    def described(self, *, has_chapters: bool) -> WorkObject:
        facts = self.facts
        numbers = range(1, len(facts.chapters) + 1)
        return WorkObject(
            id=facts.id,
            title=facts.title,
            author=facts.author,
            document=facts.document,
            model=facts.model,
            voice=facts.voice,
            seed=facts.seed,
            created_at=facts.created_at,
            state=self.state,
            progress=round(self.num_spoken / self.num_chars, 4),
            audio_s=facts.audio_s,
            num_bytes=self.num_bytes,
            error=self.error,
            num_chapters=len(facts.chapters),
            chapters=[self._chapter(number) for number in numbers] if has_chapters else None,
        )

    def _chapter(self, number: int) -> ChapterObject:
        facts = self.facts.chapters[number - 1]
        spoken = sum(num for part, num in enumerate(facts.num_chars, 1) if (number, part) in self.spoken)
        num_chars = sum(facts.num_chars)
        return ChapterObject(number, facts.title, num_chars, round(spoken / num_chars, 4), facts.audio_s)


class Taken(Exception):
    """Another server uses the directory."""


class Store:
    """The directory of all works. One server uses it at a time."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock: int | None = None

    def open(self) -> list[Work]:
        """Lock the directory, and return its works, the oldest first. Raises Taken, OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.directory):
            pass  # it is writable
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._works()
        except BlockingIOError:
            self.close()
            raise Taken(f"another server uses {self.directory}") from None
        except OSError:
            self.close()
            raise

    def _works(self) -> list[Work]:
        """Return the works that are there, and remove what is left of others. Raises OSError."""
        found: list[Work] = []
        for entry in list(os.scandir(self.directory)):
            if entry.name.startswith((NEW, OLD)):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.is_dir() and (work := self._load(Path(entry.path))) is not None:
                found.append(work)
        return sorted(found, key=lambda work: (work.facts.created_at, work.facts.id))

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self, directory: Path) -> Work | None:
        try:
            work = Work(directory, msgspec.json.decode((directory / FACTS).read_bytes(), type=Facts))
            for part in directory.glob(".*.part"):  # of a server that was killed
                part.unlink()
            if work.facts.audio_s is not None and not (directory / BOOK).exists():
                raise ValueError(f"it has no {BOOK}")
            if work.facts.audio_s is not None:
                work.drop_parts()
            work.look()
        except (OSError, ValueError) as error:
            log.error("work", error=f"{directory} is damaged and is left alone: {error}")
            return None
        return work

    def new(self) -> Path:
        """Return a new hidden directory, for a work that is being added. Raises OSError."""
        return Path(tempfile.mkdtemp(prefix=NEW, dir=self.directory))

    def add(self, new: Path, facts: Facts, fields: dict[str, Any]) -> Work:
        """Keep a new directory, which has book.json, as a work. Raises OSError."""
        work = Work(new, facts)
        work.write(REQUEST, msgspec.json.encode(fields))
        work.save(facts)
        work.directory = new.rename(self.directory / facts.id)
        work.look()
        return work

    def drop(self, new: Path, id: str) -> None:
        """Remove a work that was not added after all."""
        for directory in (new, self.directory / id):
            shutil.rmtree(directory, ignore_errors=True)

    def remove(self, work: Work) -> None:
        """Remove a work. Nothing may write into it any more. It needs no room on the disk. Raises OSError."""
        old = self.directory / f"{OLD}{secrets.token_hex(8)}"
        try:
            work.directory.rename(old)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            old = work.directory  # not even the longer name fits
        shutil.rmtree(old)


def fields_at(directory: Path) -> dict[str, Any]:
    """Return the fields of a work's requests. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode((directory / REQUEST).read_bytes(), type=dict[str, Any])
