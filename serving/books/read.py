"""Read a book: its title, its author and its chapters as they are read aloud.

    EPUB      ─ files in reading order, cut where the table of contents has an entry ┐
    Markdown  ─ cut at the highest heading that occurs more than once                ├─> Book
    text      ─ cut at lines such as "Chapter 2" between blank lines                 ┘

Text before the first chapter becomes a chapter.
"""

from __future__ import annotations

import lzma
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING
from urllib.parse import unquote

import sentencex
from markdown_it import MarkdownIt

from zoo.text.markdown import spoken
from zoo.text.pauses import HAS_WORD

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

BEGINNING = "Beginning"
ENDINGS = (".epub", ".md", ".markdown", ".txt")
PART_CHARS = 6000  # what is made at once: small enough to keep little in memory and to lose little
MAX_FILE_BYTES = 64 << 20  # of one file in an EPUB, unpacked
# What zipfile and its decompressors raise for a file that is damaged, encrypted or in an unknown format.
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(RuntimeError, NotImplementedError),
)
_CHAPTER = re.compile(r"(?:\A|\n[ \t]*\n)[ \t]*(chapter\b[^\n]{0,80})\n[ \t]*(?=\n|\Z)", re.IGNORECASE)
_BLOCKS = (
    "p",
    "li",
    "dt",
    "dd",
    "div",
    "blockquote",
    "pre",
    "tr",
    "section",
    "figure",
    "figcaption",
    "hr",
    "br",
)
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_UNSPOKEN = ("script", "style", "head", "nav", "img", "svg", "audio", "video", "math")


@dataclass(frozen=True)
class Chapter:
    """text: what is spoken, with the title in front if the chapter shows it."""

    title: str
    text: str


@dataclass(frozen=True)
class Book:
    title: str
    author: str | None
    chapters: tuple[Chapter, ...]


def read_book(path: Path) -> Book:
    """Read an EPUB, a Markdown or a text file. Raises ValueError."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} is not a book that can be read; its name must end in {', '.join(ENDINGS)}")
    try:
        book = _epub(path) if path.suffix.lower() == ".epub" else _plain(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: it is not in UTF-8 (byte {error.start})") from None
    if not book.chapters:
        raise ValueError(f"{path} has no text")
    return book


def parts(text: str, max_chars: int = PART_CHARS) -> Iterator[str]:
    """Yield stretches of at most `max_chars` characters, cut between paragraphs or else sentences. Joined,
    they are the text."""
    part = ""
    for piece in _pieces(text, max_chars):
        if part and len(part) + len(piece) > max_chars:
            yield part
            part = ""
        part += piece
    if part:
        yield part


def spoken_parts(text: str, max_chars: int = PART_CHARS) -> list[str]:
    """Return the parts that have a word. A model refuses to speak the others, such as "* * *"."""
    return [part for part in parts(text, max_chars) if HAS_WORD.search(part)]


def _pieces(text: str, max_chars: int) -> Iterator[str]:
    for paragraph in re.findall(r"[\s\S]+?(?:\n\s*\n|\Z)", text):
        for sentence in [paragraph] if len(paragraph) <= max_chars else sentencex.segment("en", paragraph):
            for at in range(0, len(sentence), max_chars):  # a sentence that is too long is cut anywhere
                yield sentence[at : at + max_chars]


def _plain(path: Path) -> Book:
    text = path.read_text("utf-8-sig")
    if path.suffix.lower() == ".txt":
        return Book(path.stem, None, _present(_cut(text, _CHAPTER)))
    title, found = _of_markdown(text)
    return Book(title or path.stem, None, _present(found))


def _cut(text: str, mark: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield titles and texts. A mark's first group is the title of what follows."""
    marks = list(mark.finditer(text))
    yield BEGINNING, text[: marks[0].start()] if marks else text
    for at, found in enumerate(marks):
        end = marks[at + 1].start() if at + 1 < len(marks) else len(text)
        title = found[1].strip()
        yield title, f"{_ended(title)}\n\n{text[found.end() : end]}"


def _of_markdown(text: str) -> tuple[str | None, Iterator[tuple[str, str]]]:
    """Return the book's title, which is a single heading above those of the chapters, and the chapters."""
    tokens = MarkdownIt("commonmark").parse(text)
    headings = [
        (int(opened.tag[1]), opened.map[0], spoken(inline.content))
        for opened, inline in pairwise(tokens)
        if opened.type == "heading_open" and opened.level == 0 and opened.map
    ]
    counts = Counter(level for level, _, _ in headings)
    level = min((level for level, count in counts.items() if count > 1), default=max(counts, default=1))
    title = next((words for above, _, words in headings if above < level), None)
    marks = [(line, words) for found, line, words in headings if found == level]
    return title, _between(text.split("\n"), marks)


def _between(lines: list[str], marks: list[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    starts = [(0, BEGINNING), *marks, (len(lines), "")]
    for (start, title), (end, _) in pairwise(starts):
        yield title, spoken("\n".join(lines[start:end]))


def _present(found: Iterator[tuple[str, str]]) -> tuple[Chapter, ...]:
    return tuple(Chapter(title, text.strip()) for title, text in found if HAS_WORD.search(text))


def _ended(line: str) -> str:
    return f"{line}." if line[-1:].isalnum() else line


# EPUB


class _Epub:
    """The files of an EPUB. Raises ValueError for one that is damaged, missing, or too large."""

    def __init__(self, path: Path):
        try:
            self.files = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise ValueError(f"{path} is not an EPUB: it is not a ZIP file") from None
        except UNREADABLE as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        self.path = path

    def read(self, name: str) -> BeautifulSoup:
        try:
            from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
        except ImportError:
            raise ValueError(
                "reading an EPUB needs the package beautifulsoup4: pip install -e '.[books]'"
            ) from None
        try:
            if self.files.getinfo(name).file_size > MAX_FILE_BYTES:
                raise ValueError(f"{self.path}: {name} has more than {MAX_FILE_BYTES >> 20} MiB")
            with warnings.catch_warnings():  # pages that begin as XML does
                warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
                return BeautifulSoup(self.files.read(name), "html.parser")
        except KeyError:
            raise ValueError(f"{self.path} is not an EPUB: it has no {name}") from None
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: {name} cannot be read: {error}") from None


def _epub(path: Path) -> Book:
    epub = _Epub(path)
    with epub.files:
        root = epub.read("META-INF/container.xml").find("rootfile")
        if root is None or not root.get("full-path"):
            raise ValueError(f"{path} is not an EPUB: META-INF/container.xml names no package")
        name = str(root["full-path"])
        package = epub.read(name)
        items = {str(item.get("id")): item for item in package.find_all("item")}
        order = [
            items[str(ref.get("idref"))]
            for ref in package.find_all("itemref")
            if str(ref.get("idref")) in items and ref.get("linear") != "no"
        ]
        titles = _titles(epub, name, package, items)
        texts = [(file := _beside(name, item.get("href")), _text(epub.read(file))) for item in order]
        title, author = (_first(package, tag) for tag in ("dc:title", "dc:creator"))
        return Book(title or path.stem, author, _present(_joined(texts, titles)))


def _titles(epub: _Epub, name: str, package: BeautifulSoup, items: dict[str, Tag]) -> dict[str, str]:
    """Return the first entry of the table of contents for each file: that of EPUB 3, or else of EPUB 2."""
    nav = next((item for item in items.values() if "nav" in str(item.get("properties", "")).split()), None)
    spine = package.find("spine")
    ncx = items.get(str(spine.get("toc"))) if spine is not None else None
    found: dict[str, str] = {}
    entries: list[tuple[object, Tag | None]] = []
    if nav is not None:
        file = _beside(name, nav.get("href"))
        toc = epub.read(file).find("nav", attrs={"epub:type": "toc"})
        entries += [(link.get("href"), link) for link in toc.find_all("a")] if toc is not None else []
    elif ncx is not None:
        file = _beside(name, ncx.get("href"))
        points = epub.read(file).find_all("navpoint")
        entries += [(point.content.get("src"), point.find("text")) for point in points if point.content]
    for href, label in entries:
        if href and label is not None:
            found.setdefault(_beside(file, href), " ".join(label.get_text().split()))
    return found


def _beside(name: str, href: object) -> str:
    """Return the name of the file that `href` in the file `name` means."""
    return normpath(str(PurePosixPath(name).parent / unquote(str(href).partition("#")[0])))


def _first(package: BeautifulSoup, tag: str) -> str | None:
    found = package.find(tag)
    return (" ".join(found.get_text().split()) or None) if found is not None else None


def _joined(texts: list[tuple[str, str]], titles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield chapters: a file without an entry belongs to the chapter before it."""
    title, told = BEGINNING, ""
    for file, text in texts:
        if file in titles:
            yield title, told
            title, told = titles[file], ""
        told += f"{text}\n\n"
    yield title, told


def _text(page: BeautifulSoup) -> str:
    """Return the words of a page, with a blank line between paragraphs. Marks of footnotes are left out."""
    for tag in page.find_all(_UNSPOKEN):
        tag.decompose()
    for tag in page.find_all(True, attrs={"epub:type": "noteref"}):
        tag.decompose()
    for words in page.find_all(string=True):
        words.replace_with(re.sub(r"\s+", " ", words))
    for tag in page.find_all((*_BLOCKS, *_HEADINGS)):
        if tag.name in _HEADINGS:
            tag.string = _ended(" ".join(tag.get_text().split()))
        tag.insert_before("\n\n")
        tag.insert_after("\n\n")
    lines = (line.strip() for line in page.get_text().split("\n\n"))
    return "\n\n".join(line for line in lines if line)
