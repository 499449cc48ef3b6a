"""`zoo batch`: speak every line of a file into a file, at the throughput of the whole machine.

    lines ─> items ─> engine in this process ─> files, then their lines in results.jsonl
    thread:  feeder   main                      writers

A file is written completely or not at all, and its line follows, so a killed run leaves nothing that looks
finished. An item is finished if its file and its line exist and the line has the item's digest; it is then
not made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from compile_cache import threads
from serving.audio import encode
from serving.audio.loudness import MAX_LUFS, MIN_LUFS
from serving.audio.pcm import pcm16
from serving.audio.speed import MAX_SPEED, MIN_SPEED
from serving.engine.engine import Audio, Engine, Event, Failed, Finished, Full, Text
from serving.engine.wire import reference_of
from serving.protocol import AudioClip, Reference
from serving.replacing import replacing
from zoo.check import check
from zoo.contract import Spec
from zoo.request import MAX_GAP_S, Request, RequestError
from zoo.text.markdown import spoken
from zoo.text.pronunciations import Lexicon, Pronunciation

RESULTS = "results.jsonl"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
WRITERS = 2
MAX_RECORDINGS = 16  # decoded recordings that stay in memory for later lines


class Fields(msgspec.Struct, omit_defaults=True):
    """The fields of a line, named like the flags of `zoo say`. Any other field is an option of the model."""

    text: str
    id: str | int | None = None
    voice: str | None = None
    reference: str | None = None  # a path, relative to the directory of the file of lines
    reference_text: str | None = None
    language: str | None = None
    instructions: str | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    speed: Annotated[float, msgspec.Meta(ge=MIN_SPEED, le=MAX_SPEED)] | None = None
    loudness: Annotated[float, msgspec.Meta(ge=MIN_LUFS, le=MAX_LUFS)] | None = None
    split_text: bool | None = None
    normalize: bool | None = None
    sentence_gap_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GAP_S)] | None = None
    text_format: Literal["plain", "markdown"] | None = None
    pronunciations: list[Pronunciation] | None = None


PLAIN = (
    "text",
    "voice",
    "language",
    "instructions",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "split_text",
    "normalize",
    "sentence_gap_s",
)


@dataclass
class Item:
    """A line of the file: its fields (with the defaults of all lines), its model options, and any error."""

    line: int
    id: str
    fields: Fields = field(default_factory=lambda: Fields(""))
    options: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def digest(self, base: Path, common: Sequence[object]) -> str:
        """Return a digest that is equal for equal items. common: the settings that all items share."""
        clip = None if self.fields.reference is None else content(base / self.fields.reference)
        fields = msgspec.to_builtins(msgspec.structs.asdict(self.fields))
        asked = [fields | {"id": None}, self.options, clip, *common]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


@cache
def content(path: Path) -> str | None:
    """Return the digest of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:  # the item's own error says why
        return None


def read_items(path: Path, defaults: dict[str, Any]) -> list[Item]:
    """Read the lines of a file that are not blank. Raises ValueError if it has none or cannot be read."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: it is not in UTF-8 (byte {error.start})") from None
    items = [read_item(number, line, defaults) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ValueError(f'{path} has no lines; it needs at least one, such as {{"text": "Good morning."}}')
    seen: dict[str, int] = {}
    for item in items:
        if item.error is None and seen.setdefault(item.id, item.line) != item.line:
            first = seen[item.id]
            item.error = f"id {item.id!r} is also the id of line {first}; every item needs its own id"
            item.id = f"{item.line:06}"
    return items


def read_item(number: int, line: str, defaults: dict[str, Any]) -> Item:
    """Parse a line. An unusable line becomes an item with an error."""
    name = f"{number:06}"
    try:
        given = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        return Item(number, name, error=f"the line is not JSON: {error}")
    try:
        if not isinstance(given, dict):
            raise ValueError(f"the line must be a JSON object, not {line[:60]!r}")
        given = defaults | {key: value for key, value in given.items() if value is not None}
        if "text" not in given:
            raise ValueError("the line has no text")
        fields = msgspec.convert(given, Fields, str_keys=True)
    except ValueError as error:  # includes msgspec.ValidationError
        return Item(number, name, error=str(error))
    name = name if fields.id is None else str(fields.id)
    if not NAME.fullmatch(name):
        return Item(
            number,
            f"{number:06}",
            error=f"id {name[:60]!r} cannot name a file; use letters, digits, '_', '-' and '.'",
        )
    return Item(
        number,
        name,
        fields,
        {key: value for key, value in given.items() if key not in Fields.__struct_fields__},
    )


def check_defaults(
    items: Sequence[Item], defaults: Mapping[str, Any], options: Mapping[str, Any], spec: Spec
) -> None:
    """Raise RequestError if the model refuses a default field or option, and an item does not set another value."""
    given = {name: defaults[name] for name in PLAIN if name in defaults}
    usual = {"text": "Hello.", "voice": next(iter(spec.voices), None)}
    try:
        check(Request(**usual | given, options=dict(options)), spec)
    except RequestError as error:
        if any(has_default(item, error.param, given, options) for item in items):
            raise


def has_default(item: Item, name: str, given: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether an item has a value that the command gave. A recording may decide what its voice means."""
    if name in options:
        return name not in item.options
    if name == "voice" and item.fields.reference is not None:
        return False
    return name in given and getattr(item.fields, name) == given[name]


def result_of(line: bytes) -> dict[str, Any] | None:
    """Return a line of results.jsonl, or None for an incomplete one or another file's."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):  # it may end within a character
        return None
    is_result = isinstance(result, dict) and isinstance(result.get("id"), str)
    return result if is_result and ("file" in result or "error" in result) else None


class Results:
    """The output directory of a batch. Only one process at a time can hold it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.path = directory / RESULTS
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create and lock the directory. A new one is removed if nothing was written. Raises ValueError if it is not
        writable or already locked."""
        is_new = not self.directory.exists()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{self.directory} cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another zoo batch writes to {self.directory}") from None
            try:
                yield
            finally:
                if is_new:
                    with suppress(OSError):  # it is not empty
                        self.directory.rmdir()
        finally:
            os.close(lock)

    def finished(self, ids: set[str], digests: dict[str, str], suffix: str) -> set[str]:
        """Return the ids whose speech already exists.

        It also rewrites results.jsonl without the lines of unfinished ids and incomplete lines, so that each
        item ends up with one line. Lines of other input files stay. Raises ValueError for a file of somebody else.
        """
        kept: list[bytes] = []
        done: set[str] = set()
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        found = [(line, result) for line in lines if (result := result_of(line)) is not None]
        is_cut = len(lines) == 1 and lines[0].startswith(b'{"id"') and not lines[0].endswith(b"}")
        if any(lines) and not found and not is_cut:
            raise ValueError(f"{self.path} was not written by zoo batch; choose another directory")
        for line, result in found:
            id = result["id"]
            is_same = id in digests and result.get("digest") == digests[id]
            is_done = is_same and (self.directory / f"{id}{suffix}").exists()
            if is_done:
                done.add(id)
            if is_done or id not in ids:
                kept.append(line)
        if lines:
            self.write(RESULTS, b"".join(line + b"\n" for line in kept))
        return done

    def write(self, name: str, data: bytes) -> None:
        """Write a file completely or not at all. Raises OSError."""
        with replacing(self.directory / name) as part:
            part.write_bytes(data)

    def add(self, result: dict[str, Any]) -> None:
        """Append a line to results.jsonl."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")


@dataclass
class Tally:
    """The counts of a batch so far."""

    found: int = 0
    made: int = 0
    failed: int = 0
    audio_s: float = 0.0
    wall_s: float = 0.0
    is_interrupted: bool = False


class Batch:
    """A run of items through an engine, up to twice its slots at once. It calls `report` after each item."""

    def __init__(
        self,
        engine: Engine,
        results: Results,
        digests: dict[str, str],
        form: str,
        recording: Callable[[str], AudioClip],
        options: dict[str, Any],
        tally: Tally,
        report: Callable[[Tally, dict[str, Any]], None],
        pronunciations: Sequence[Pronunciation] = (),
    ):
        [worker] = engine.models.values()
        self.engine = engine
        self.family = worker.family
        self.results = results
        self.digests = digests
        self.form = form
        self.options = options
        self.tally = tally
        self.report = report
        self.pronunciations = pronunciations  # of all items
        self.recording = lru_cache(maxsize=MAX_RECORDINGS)(recording)
        self.room = 2 * worker.runner.num_slots
        self.places = threading.Semaphore(self.room)
        self.writers = ThreadPoolExecutor(WRITERS, "write")
        self.lock = threading.Lock()
        self.error: BaseException | None = None  # of a writer

    def run(self, items: Sequence[Item]) -> None:
        """Make all items, or stop at a signal. The engine runs on this thread, which must be the main one."""
        began_s = time.perf_counter()
        with self.stopped_by_signals(), ThreadPoolExecutor(1, "feed", threads.use_one_thread) as pool:
            feeding = pool.submit(self.feed, items)
            self.engine.run()
            feeding.result()
        if self.error is not None:
            raise self.error
        self.tally.wall_s = time.perf_counter() - began_s

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        def stop(*_: object) -> None:
            self.tally.is_interrupted = True
            self.engine.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def feed(self, items: Sequence[Item]) -> None:
        """Submit the items and wait until all are done. Runs on the feeder's thread."""
        try:
            for item in items:
                self.places.acquire()
                try:
                    self.speak(item)
                except Full:  # the engine was stopped
                    self.places.release()
                    break
                except ValueError as error:
                    self.end(item, {"error": str(error)})
            for _ in range(self.room):
                self.places.acquire()
        finally:
            self.engine.stop()
            self.writers.shutdown()

    def speak(self, item: Item) -> None:
        """Submit an item. Raises ValueError if the model refuses it, and Full if the engine was stopped."""
        chunks: list[np.ndarray] = []
        texts: list[str] = []

        def deliver(event: Event) -> None:  # on the engine's thread
            match event:
                case Audio(samples=samples):
                    chunks.append(samples)
                case Text(text=text):
                    texts.append(text)
                case Failed(code="engine_stopped"):
                    self.places.release()
                case Failed(message=message):
                    self.end(item, {"error": message})
                case Finished():
                    writing = self.writers.submit(self.keep, item, event, chunks, "".join(texts))
                    writing.add_done_callback(self.check)

        self.engine.speak(item.id, self.request(item), deliver)

    def check(self, writing: Future[None]) -> None:
        """End the batch if a writer raised an unexpected error."""
        if (error := writing.exception()) is not None:
            self.error = error
            self.engine.stop()
            self.places.release()

    def request(self, item: Item) -> Request:
        """Return the request of an item. Raises ValueError."""
        fields = item.fields
        given: dict[str, Any] = {
            name: value for name in PLAIN if (value := getattr(fields, name)) is not None
        }
        given["text"] = self.words(fields)
        if fields.max_new_tokens is not None:
            given["max_frames"] = fields.max_new_tokens
        if fields.reference is not None:
            reference = Reference(self.recording(fields.reference), fields.reference_text)
            given["references"] = (reference_of(reference),)
        return Request(**given, options=self.options | item.options)

    def words(self, fields: Fields) -> str:
        """Return the words that the model reads."""
        text = spoken(fields.text) if fields.text_format == "markdown" else fields.text
        voice = fields.voice
        if voice is None and fields.reference is None:
            voice = next(iter(self.family.spec.voices), None)
        lexicon = Lexicon.of(fields.pronunciations or (), self.pronunciations, fields.language, voice)
        return text if lexicon is None else lexicon.said(text)

    def keep(self, item: Item, finished: Finished, chunks: list[np.ndarray], text: str) -> None:
        """Write the file of a finished item. Runs on a writer's thread."""
        samples = np.concatenate(chunks)
        rate_hz = self.family.spec.sample_rate_hz
        name = f"{item.id}.{self.form}"
        speed = item.fields.speed or 1.0
        try:
            loudness = item.fields.loudness
            data = encode.file(self.form, pcm16(samples), rate_hz, speed=speed, loudness=loudness)
            self.results.write(name, data)
        except OSError as error:
            return self.end(item, {"error": f"{name} cannot be written: {error.strerror}"})
        result = {
            "file": name,
            "audio_s": round(len(samples) / rate_hz / speed, 6),
            "frames": finished.frames,
            "reason": finished.reason,
            "sample_rate_hz": rate_hz,
        }
        self.end(item, result | ({"written_text": text} if text else {}) | {"digest": self.digests[item.id]})

    def end(self, item: Item, result: dict[str, Any]) -> None:
        """Write the line of an item, count it, and make room for the next."""
        result = {"id": item.id, "line": item.line, **result}
        self.results.add(result)
        with self.lock:
            self.tally.failed += "error" in result
            self.tally.made += "error" not in result
            self.tally.audio_s += result.get("audio_s", 0.0)
            self.report(self.tally, result)
        self.places.release()
