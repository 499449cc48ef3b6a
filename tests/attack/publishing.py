"""Hostile documents, and works whose processes are killed: a listener next to them must not notice, and a work
must be complete and the same, or fail with a reason."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.attack.flooding import MAX_GAP_S, MIB, longest_gap_s
from tests.attack.report import Row
from tests.attack.target import Target, command_line, until
from tests.soak.watched import alive

WORKS = "/v1/audio/works"
WORK_PROCESS = "serving.books.process"
STORY = "\n\n".join(f"# Chapter {number}\n\nThe old man told a story." for number in (1, 2, 3))
OPTIONS = json.dumps({"seed": 7, "max_new_tokens": 12})
CONTAINER = '<container><rootfiles><rootfile full-path="OPS/a.opf"/></rootfiles></container>'
MAX_GROWTH_MIB = 250  # of the HTTP process: a document is held while it is read
COMPLETE_S, DONE_S = 120.0, 60.0
DEEP = 200_000
STATUSES = (200, 400, 413, 507)
OUTSIDE = ("../../evil.md", "/etc/evil.md", "..\\..\\evil.md", ".hidden.md", "a\x00b.md", "x" * 5000 + ".md")


def attack(directory: Path) -> Iterator[Row]:
    works = directory / "works"
    with Target("tiny", directory, "--works-dir", str(works), "--max-works", "40") as target:
        target.speak(voice="vivian")
        first = book_of(target, added(target))
        for name, document in documents().items():
            yield read_next_to_a_listener(target, name, *document)
        yield names_outside(target, works)
        yield killed_reader(target, first)
        yield killed_joiner(target, first)
        yield deleted_at_any_time(target, works)
    yield killed_http_process(directory, first)


# documents


def epub(pages: dict[str, str | bytes], package: str | None = None, level: int = 9) -> bytes:
    """Return an EPUB of pages that are read in their order."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as book:
        book.writestr("META-INF/container.xml", CONTAINER)
        items = "".join(f'<item id="{name}" href="{name}"/>' for name in pages)
        order = "".join(f'<itemref idref="{name}"/>' for name in pages)
        plain = f"<package><manifest>{items}</manifest><spine>{order}</spine></package>"
        book.writestr("OPS/a.opf", plain if package is None else package)
        for name, page in pages.items():
            book.writestr(f"OPS/{name}", page)
    return file.getvalue()


def documents() -> dict[str, tuple[str, bytes]]:
    """Return hostile documents by what they are: a file's name and its content."""
    large = b"<p>" + b"word " * (12 * MIB)
    laughs = '<!DOCTYPE a [<!ENTITY b "lol"><!ENTITY c "' + "&b;" * 1000 + '">]><p>&c;&c;</p>'
    paths = {"../../../../etc/passwd": "x", "/etc/passwd": "y", "a.html": "<p>Words.</p>"}
    return {
        "an EPUB with a page of 60 MB": ("a.epub", epub({"a.html": large})),
        "an EPUB with 30 pages of 60 MB": ("a.epub", epub({f"{n}.html": large for n in range(30)}, level=1)),
        "an EPUB with 200,000 tags in each other": ("a.epub", epub({"a.html": "<div>" * DEEP + "words"})),
        "an EPUB whose package is 200,000 tags deep": ("a.epub", epub({"a": "x"}, "<manifest>" * DEEP)),
        "an EPUB with entities of entities": ("a.epub", epub({"a.html": laughs})),
        "an EPUB that names files outside": ("a.epub", epub(dict(paths))),
        "an EPUB that is damaged": ("a.epub", damaged(epub({"a.html": os.urandom(100_000)}))),
        "a ZIP file in the name of a text": ("a.txt", epub({"a.html": "words"})),
        "a Word document": ("a.docx", epub({"word/document.xml": "<w:t>words</w:t>"})),
        "2,000,001 characters": ("a.txt", b"word " * 400_001),
        "40 MB of text": ("a.txt", b"word " * (8 * MIB)),
        "5,000 chapters": ("a.md", "\n\n".join(f"# {n}\n\nwords" for n in range(5000)).encode()),
        "1 MB of opening brackets": ("a.md", b"[" * MIB),
        "1 MB of quotes in quotes": ("a.md", b"> " * (MIB // 2)),
        "1 MB of lists in lists": ("a.md", b"- " * (MIB // 2)),
        "1 MB of stars": ("a.md", b"*a " * (MIB // 3)),
        "1 MB of one word": ("a.txt", b"a" * MIB),
        "a text without a word": ("a.txt", b"...\n\n" * 1000),
        "bytes that are no text": ("a.md", os.urandom(100_000)),
    }


def damaged(data: bytes) -> bytes:
    """Return a ZIP file whose compressed bytes are wrong in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


def read_next_to_a_listener(target: Target, name: str, file: str, document: bytes) -> Row:
    """Upload a document while another client listens. It becomes a work, or is refused with a reason."""
    before, errors = target.resident_bytes("http"), num_errors(target)
    target.forget_peaks()
    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(longest_gap_s, target)
        answer = post(target, file, document)
        took_s = time.monotonic() - began_s
        gap_s = listening.result()
    grown_mib = (target.peak_bytes("http") - before) / MIB
    error = {} if answer.status_code == 200 else answer.json()["error"]
    if answer.status_code == 200:
        target.http.delete(f"{WORKS}/{answer.json()['id']}")
    is_left = not until(lambda: not processes(target), DONE_S)
    wrong = answer.status_code not in STATUSES or (answer.status_code != 200 and not error["message"])
    failed = wrong + (gap_s > MAX_GAP_S) + (grown_mib > MAX_GROWTH_MIB) + is_left
    failed += num_errors(target) - errors
    said = f" {error['message'][:60]!r}" if error else ""
    seen = f"{answer.status_code}{said} in {took_s:.1f} s; a listener waited {gap_s:.1f} s, http {grown_mib:+.0f} MiB"
    return Row(name, 1, int(failed), seen)


def num_errors(target: Target) -> int:
    lines = [json.loads(line) for line in target.lines if line.startswith("{")]
    return sum(line.get("level") in ("error", "critical") for line in lines) + target.said.count("Traceback")


def processes(target: Target) -> list[int]:
    """Return the processes that read a document or join speech."""
    return [pid for pid in alive(target.process.pid) if WORK_PROCESS in command_line(pid)]


def post(target: Target, file: str = "story.md", document: bytes | str = STORY) -> httpx.Response:
    form = {"voice": "vivian", "options": OPTIONS}
    return target.http.post(WORKS, data=form, files={"document": (file, document)}, timeout=200)


def added(target: Target) -> str:
    answer = post(target)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def work_at(target: Target, id: str) -> dict[str, Any]:
    return target.http.get(f"{WORKS}/{id}").json()


def book_of(target: Target, id: str) -> bytes:
    """Wait for a book, and return it. It is empty if the work failed or takes too long."""
    until(lambda: work_at(target, id).get("state") in ("complete", "failed"), COMPLETE_S)
    answer = target.http.get(f"{WORKS}/{id}/book.m4b")
    return answer.content if answer.status_code == 200 else b""


def names_outside(target: Target, works: Path) -> Row:
    """A file's name never leads out of the directory of works."""
    before = set(works.parent.glob("*"))
    statuses = Counter(post(target, name).status_code for name in OUTSIDE)
    for work in target.http.get(WORKS).json()["data"]:
        target.http.delete(f"{WORKS}/{work['id']}")
    new = set(works.parent.glob("*")) - before
    left = [path.name for path in works.glob("*")]
    paths = [f"{WORKS}/..%2f..%2fetc", f"{WORKS}/%2e%2e/book.m4b", f"{WORKS}/../../../../etc/passwd"]
    found = [path for path in paths if target.http.get(path).status_code == 200]
    wrong = sum(number for status, number in statuses.items() if status not in STATUSES)
    failed = wrong + len(new) + len(left) + len(found)
    return Row(
        "names that lead out", len(OUTSIDE) + len(paths), failed, f"{dict(statuses)}, {len(new)} outside"
    )


# kills


def kill_one(target: Target, what: str) -> bool:
    """Kill the first process that reads or joins, as soon as there is one."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [pid for pid in processes(target) if f"\0{what}\0" in command_line(pid)]
        return bool(found)

    if not until(is_there, DONE_S):
        return False
    with suppress(ProcessLookupError):
        os.kill(found[0], signal.SIGKILL)
    return True


def killed_reader(target: Target, first: bytes) -> Row:
    """A document whose process is killed is refused, and the next one is read."""
    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(post, target)
        is_killed = kill_one(target, "read")
        status = posting.result().status_code
    if status == 200:  # it had ended
        is_killed = False
    is_same = book_of(target, added(target)) == first
    failed = (not is_killed) + (status != 400) + (not is_same)
    return Row(
        "SIGKILL to the process that reads", 2, failed, f"{status}; the next book is the same: {is_same}"
    )


def killed_joiner(target: Target, first: bytes) -> Row:
    """A work whose process is killed fails with a reason, and is complete and the same once it is resumed."""
    id = added(target)
    is_killed = kill_one(target, "join")
    until(lambda: work_at(target, id)["state"] in ("failed", "complete"), COMPLETE_S)
    work = work_at(target, id)
    why = work["error"]["message"] if work["error"] else work["state"]
    target.http.post(f"{WORKS}/{id}/resume")
    is_same = book_of(target, id) == first
    failed = (not is_killed) + (work["state"] != "failed") + (not is_same)
    return Row(
        "SIGKILL to the process that joins", 1, failed, f"{why[:60]!r}; resumed, it is the same: {is_same}"
    )


def deleted_at_any_time(target: Target, works: Path) -> Row:
    """Works that are deleted while they are spoken or joined leave no file and no process."""
    for work in target.http.get(WORKS).json()["data"]:
        target.http.delete(f"{WORKS}/{work['id']}")
    tried, wrong = 12, 0
    for number in range(tried):
        id = added(target)
        time.sleep(0.35 * number)
        wrong += target.http.delete(f"{WORKS}/{id}").status_code != 200
        wrong += target.http.get(f"{WORKS}/{id}").status_code != 404
    is_clean = until(lambda: not processes(target) and not list(works.glob("*")), DONE_S)
    left = [path.name for path in works.glob("*")]
    return Row("works deleted at any time", tried, wrong + (not is_clean), f"{wrong} wrong, {len(left)} left")


def killed_http_process(directory: Path, first: bytes) -> Row:
    """A work goes on where the HTTP process was killed."""
    works = directory / "killed-works"
    with Target("tiny", directory, "--works-dir", str(works)) as target:
        id = added(target)
        until(lambda: work_at(target, id)["progress"] > 0, COMPLETE_S)
        target.signal("http", signal.SIGKILL)
        until(lambda: is_up(lambda: work_at(target, id)["state"]), COMPLETE_S)
        is_same = book_of(target, id) == first
        left = [path.name for path in works.glob(".*")]
    failed = (not is_same) + len(left)
    return Row("SIGKILL to HTTP while a work is spoken", 1, failed, f"complete and the same: {is_same}")


def is_up(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except (httpx.TransportError, KeyError):
        return False
    return True
