"""Documents damaged in every way: read as the process of a work reads them, and some of them uploaded."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hypothesis import given, seed
from hypothesis import strategies as st

from serving.books.process import outcome_of
from tests.attack.target import Target
from tests.fuzz.recordings import WAYS
from tests.fuzz.trials import trials

WORKS = "/v1/audio/works"
POSSIBLE = (200, 400, 413)
PART_CHARS = 800
UPLOADED = 25  # one of so many is uploaded, which takes a process of a second
CONTAINER = '<container><rootfiles><rootfile full-path="OPS/a.opf"/></rootfiles></container>'
PACKAGE = """<package><metadata><dc:title>The sea</dc:title><dc:creator>Anna</dc:creator></metadata><manifest>
<item id="nav" href="nav.html" properties="nav"/><item id="one" href="one.html"/><item id="two" href="two.html"/>
</manifest><spine toc="nav"><itemref idref="one"/><itemref idref="two"/></spine></package>"""
NAV = '<nav epub:type="toc"><ol><li><a href="one.html">One</a></li><li><a href="two.html#a">Two</a></li></ol></nav>'
PAGE = '<h1>One</h1><p>It was <em>long</em> ago.</p><table><tr><td>a</td></tr></table><img alt="x"/>'
MARKDOWN = (
    "---\ntitle: x\n---\n# The sea\n\n## One\n\n- It was *long* ago.\n\n## Two\n\n> She `opened` [it](x).\n"
)
TEXT = "Chapter 1\n\nIt was long ago.\n\nChapter 2\n\nShe opened it.\n"


@cache
def documents() -> list[tuple[str, bytes]]:
    """Return a document of each kind, by the name of its file."""
    books = [
        ("a.epub", epub(method)) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)
    ]
    return [*books, ("a.md", MARKDOWN.encode()), ("a.txt", TEXT.encode())]


def epub(method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as book:
        book.writestr("META-INF/container.xml", CONTAINER)
        book.writestr("OPS/a.opf", PACKAGE)
        book.writestr("OPS/nav.html", NAV)
        for name in ("one.html", "two.html"):
            book.writestr(f"OPS/{name}", PAGE)
    return file.getvalue()


@st.composite
def damaged(draw: Callable) -> tuple[str, bytes]:
    name, whole = draw(st.sampled_from(documents()))
    data = bytearray(whole)
    for way in draw(st.lists(st.sampled_from(WAYS), min_size=1, max_size=3)):
        data = way(data, draw)
    return name, bytes(data)


def fuzz(target: Target, examples: int, start: int) -> Counter[str]:
    """Return documents by what became of them. Raises the first failure, shrunk."""
    counts = read_all(examples, start)
    for number in range(max(1, examples // UPLOADED)):
        name, data = example(start + number)
        counts[f"uploaded: {uploaded(target, name, data)}"] += 1
    return counts


def read_all(examples: int, start: int) -> Counter[str]:
    """Read damaged documents in this process. Each becomes a book, or an error in one line."""
    counts: Counter[str] = Counter()

    @seed(start)
    @trials(examples)
    @given(document=damaged())
    def tried(document: tuple[str, bytes]) -> None:
        name, data = document
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / name
            path.write_bytes(data)
            outcome = outcome_of("read", str(path), directory, str(PART_CHARS))
        assert outcome.errno is None, outcome
        assert outcome.error is None or (outcome.error and "\n" not in outcome.error), outcome
        counts["read" if outcome.error is None else "refused"] += 1

    tried()
    return counts


def example(start: int) -> tuple[str, bytes]:
    """Return the damaged document of a seed."""
    found: list[tuple[str, bytes]] = []

    @seed(start)
    @trials(3)
    @given(document=damaged())
    def draw(document: tuple[str, bytes]) -> None:
        found.append(document)

    draw()
    return found[-1]


def uploaded(target: Target, name: str, data: bytes) -> int:
    """Return the status of an upload. What becomes a work is deleted at once."""
    form = {"voice": "vivian", "options": '{"max_new_tokens": 2}'}
    answer = target.http.post(WORKS, data=form, files={"document": (name, data)})
    assert answer.status_code in POSSIBLE, f"{name}: {answer.status_code} {answer.text[:500]}"
    if answer.status_code == 200:
        assert target.http.delete(f"{WORKS}/{answer.json()['id']}").status_code == 200
    return answer.status_code
