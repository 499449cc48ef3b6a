"""`zoo audiobook`: the chapters that it finds in books, and the file that it makes of them."""

import os
import sys
import zipfile

import av
import numpy as np
import pytest
import shell
import soundfile

from serving.books import join
from serving.books.read import PART_CHARS, Book, Chapter, parts, read_book
from serving.tools.audiobook import items_of

MARKDOWN = """# The old man

Before it begins.

## The *sea*

The *old man* told a [story](http://x.y).

```
# not a heading
```

## The door

She opened the door.
"""
TEXT = "The old man\n\nCHAPTER I. The sea\n\nIt was about\nthe chapter.\n\nChapter 2\n\nThe end.\n"
CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
PACKAGE = """<?xml version="1.0"?><package><metadata><dc:title>The old
 man</dc:title><dc:creator>A. Writer</dc:creator></metadata><manifest>
<item id="toc" href="toc.xhtml" properties="nav"/><item id="ncx" href="toc.ncx"/>
<item id="c" href="text/cover.xhtml"/><item id="a" href="text/a%20b.xhtml"/><item id="a2" href="text/a2.xhtml"/>
<item id="b" href="text/b.xhtml"/><item id="notes" href="text/notes.xhtml"/></manifest>
<spine toc="ncx"><itemref idref="c"/><itemref idref="a"/><itemref idref="a2"/><itemref idref="b"/>
<itemref idref="notes" linear="no"/></spine></package>"""
NAV = """<html><body><nav epub:type="landmarks"><a href="text/cover.xhtml">No</a></nav><nav epub:type="toc"><ol>
<li><a href="text/a%20b.xhtml">The sea</a><ol><li><a href="text/a%20b.xhtml#x">Deeper</a></li></ol></li>
<li><a href="text/b.xhtml">The
 door</a></li></ol></nav></body></html>"""
NCX = """<ncx><navMap><navPoint><navLabel><text>The sea</text></navLabel><content src="text/a%20b.xhtml"/>
</navPoint><navPoint><navLabel><text>The door</text></navLabel><content src="text/b.xhtml#top"/></navPoint></navMap></ncx>"""
PAGES = {
    "META-INF/container.xml": CONTAINER,
    "OEBPS/book.opf": PACKAGE,
    "OEBPS/toc.xhtml": NAV,
    "OEBPS/toc.ncx": NCX,
    "OEBPS/text/cover.xhtml": "<html><head><title>Cover</title></head><body><img src='c.png'/></body></html>",
    "OEBPS/text/a b.xhtml": """<html><head><style>p {}</style></head><body><h1>The <i>sea</i></h1>
        <div>The old
        man<a epub:type="noteref" href="#n">1</a> told a <em>story</em>.<p>It was &amp; is long.</p></div></body></html>""",
    "OEBPS/text/a2.xhtml": "<html><body><p>The children<br/>listened.</p></body></html>",
    "OEBPS/text/b.xhtml": "<html><body><h2>The door</h2><p>She opened it.</p></body></html>",
    "OEBPS/text/notes.xhtml": "<html><body><p>A note.</p></body></html>",
}


def epub(path, **changed):
    with zipfile.ZipFile(path, "w") as file:
        for name, page in (PAGES | changed).items():
            if page is not None:
                file.writestr(name, page)
    return path


def written(path, text):
    path.write_text(text)
    return path


def told(book):
    return [(chapter.title, chapter.text) for chapter in book.chapters]


def test_markdown_has_chapters_at_its_highest_repeated_heading(tmp_path):
    book = read_book(written(tmp_path / "b.md", MARKDOWN))
    assert (book.title, book.author) == ("The old man", None)
    assert told(book) == [
        ("Beginning", "The old man.\nBefore it begins."),
        ("The sea", "The sea.\nThe old man told a story."),
        ("The door", "The door.\nShe opened the door."),
    ]


def test_plain_text_has_chapters_at_lines_that_say_so(tmp_path):
    book = read_book(written(tmp_path / "b.txt", TEXT))
    assert (book.title, told(book)) == (
        "b",
        [
            ("Beginning", "The old man"),
            ("CHAPTER I. The sea", "CHAPTER I. The sea.\n\n\nIt was about\nthe chapter."),
            ("Chapter 2", "Chapter 2.\n\n\nThe end."),
        ],
    )
    assert told(read_book(written(tmp_path / "c.txt", "No chapter.\n"))) == [("Beginning", "No chapter.")]


def test_chapters_and_parts_without_a_word_are_left_out(tmp_path):
    """A model refuses to speak them, so the book would never be complete."""
    book = read_book(written(tmp_path / "b.txt", "* * *\n\nChapter 1\n\nThe end.\n"))
    assert [title for title, _ in told(book)] == ["Chapter 1"]
    text = "word " * 1199 + "\n\n* * *\n\n" + "word " * 1199
    [items] = items_of(Book("b", None, (Chapter("One", text),)), {})
    assert len(list(parts(text))) == 3 and [item.id for item in items] == ["0001-001", "0001-002"]


def test_a_directory_is_no_audiobook(tmp_path):
    (tmp_path / "b.m4b").mkdir()
    done = shell.zoo("audiobook", written(tmp_path / "b.md", MARKDOWN))
    assert done.returncode == 2 and "is a directory" in done.stderr


@pytest.mark.parametrize("version", ["EPUB 3", "EPUB 2"])
def test_an_epub_has_the_chapters_of_its_table_of_contents(tmp_path, version):
    package = PACKAGE if version == "EPUB 3" else PACKAGE.replace(' properties="nav"', "")
    book = read_book(epub(tmp_path / "b.epub", **{"OEBPS/book.opf": package}))
    assert (book.title, book.author) == ("The old man", "A. Writer")
    assert told(book) == [
        (
            "The sea",
            "The sea.\n\nThe old man told a story.\n\nIt was & is long.\n\nThe children\n\nlistened.",
        ),
        ("The door", "The door.\n\nShe opened it."),
    ]


def test_an_epub_without_a_table_of_contents_is_one_chapter(tmp_path):
    package = PACKAGE.replace(' properties="nav"', "").replace(' toc="ncx"', "")
    [chapter] = read_book(epub(tmp_path / "b.epub", **{"OEBPS/book.opf": package})).chapters
    assert chapter.title == "Beginning" and chapter.text.endswith("She opened it.")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"META-INF/container.xml": None}, "it has no META-INF/container.xml"),
        ({"META-INF/container.xml": "<container/>"}, "names no package"),
        ({"OEBPS/text/b.xhtml": None}, "it has no OEBPS/text/b.xhtml"),
        ({"OEBPS/book.opf": PACKAGE.replace("itemref", "x")}, "has no text"),
    ],
)
def test_a_damaged_epub_is_refused_in_one_line(tmp_path, changed, says):
    with pytest.raises(ValueError, match=says):
        read_book(epub(tmp_path / "b.epub", **changed))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_bytes_that_cannot_be_unpacked_are_refused_in_one_line(tmp_path, method):
    """Each decompressor has an error of its own."""
    path = tmp_path / "b.epub"
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("META-INF/container.xml", CONTAINER * 50)
    data = bytearray(path.read_bytes())
    at = data.index(b"container.xml") + len("container.xml")
    data[at + 9 : at + 40] = b"\xff" * 31
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read"):
        read_book(path)


def test_an_epub_of_a_later_zip_version_is_refused_in_one_line(tmp_path):
    path = epub(tmp_path / "b.epub")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 127
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot be read: zip file version 12\.7"):
        read_book(path)


def test_other_files_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.epub, \.md, \.markdown, \.txt"):
        read_book(tmp_path / "b.pdf")
    with pytest.raises(ValueError, match="not a ZIP file"):
        read_book(written(tmp_path / "b.epub", "no"))
    with pytest.raises(ValueError, match=r"absent\.md cannot be read: No such file or directory$"):
        read_book(tmp_path / "absent.md")
    (tmp_path / "latin.txt").write_bytes("Café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"cannot be read: it is not in UTF-8 \(byte 3\)$"):
        read_book(tmp_path / "latin.txt")
    with pytest.raises(ValueError, match="has no text"):
        read_book(written(tmp_path / "b.md", " \n"))


def test_without_beautifulsoup_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bs4", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[books\]'"):
        read_book(epub(tmp_path / "b.epub"))


@pytest.mark.parametrize(
    "text",
    ["\n\n".join(["word " * 500] * 9), "A sentence. " * 2000, "字" * 13_000, "这是一句话。" * 3000, "short"],
    ids=["paragraphs", "sentences", "no end", "chinese", "short"],
)
def test_parts_of_a_chapter_join_to_its_text(text):
    found = list(parts(text))
    assert "".join(found) == text and max(map(len, found)) <= PART_CHARS
    assert len(found) <= len(text) // PART_CHARS + 2
    if "。" in text:
        assert all(part.endswith("。") for part in found)


@pytest.mark.slow
def test_an_interrupted_book_continues_and_becomes_one_file(tmp_path, monkeypatch):
    book, out = written(tmp_path / "b.md", MARKDOWN), tmp_path / "b.m4b"
    say = ("audiobook", book, "--no-compile", "--max-new-tokens", 4)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(join, "join", lambda *_: 1 / 0)
        shell.zoo(*say)
    files = sorted((tmp_path / "b.m4b.parts").glob("*.flac"))
    expected_s = [soundfile.info(file).duration + join.PAUSE_S for file in files]
    assert not out.exists() and len(files) == 3
    done = shell.zoo(*say)
    assert done.returncode == 0 and all(part in done.stdout for part in ("3 chapters", "0 made", "3 found"))
    assert sorted(path for path in tmp_path.iterdir() if path.name != "cache") == [out, book]
    check_marks(out, ["Beginning", "The sea", "The door"], expected_s)


def test_a_matroska_file_has_chapter_marks_too(tmp_path):
    book = Book("The old man", "A. Writer", (Chapter("One", "a"), Chapter("Two", "b")))
    for name, samples in (("a", 5000), ("b", 44_100), ("c", 1)):
        soundfile.write(tmp_path / f"{name}.flac", np.zeros(samples, np.int16), 22_050)
    a, b, c = (tmp_path / f"{name}.flac" for name in "abc")
    assert join.join(book, [[a, b], [c]], tmp_path / "b.mka") == pytest.approx(49_101 / 22_050 + 2)
    check_marks(tmp_path / "b.mka", ["One", "Two"], [49_100 / 22_050 + 1, 1 + 1 / 22_050])


def test_a_book_that_cannot_be_written_leaves_no_part(tmp_path, monkeypatch):
    book = Book("The old man", None, (Chapter("One", "a"),))
    soundfile.write(tmp_path / "a.flac", np.zeros(50_000, np.int16), 22_050)
    before = sorted(tmp_path.iterdir())

    def full(container, stream, chapters):
        encode(container, stream, chapters)
        assert (tmp_path / ".b.m4b.part").exists()
        raise OSError(28, "No space left on device")

    encode = join._encode
    monkeypatch.setattr(join, "_encode", full)
    with pytest.raises(OSError, match="No space left"):
        join.join(book, [[tmp_path / "a.flac"]], tmp_path / "b.m4b")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("num_bytes", [0, 200, 20_000])
def test_a_damaged_part_is_named_in_one_line(tmp_path, num_bytes):
    book, part = Book("The old man", None, (Chapter("One", "a"),)), tmp_path / "a.flac"
    soundfile.write(part, np.random.default_rng(0).integers(-9999, 9999, 50_000, np.int16), 22_050)
    os.truncate(part, num_bytes)
    with pytest.raises(ValueError, match=f"{part} is damaged; remove it and start again"):
        join.join(book, [[part]], tmp_path / "b.m4b")
    assert list(tmp_path.iterdir()) == [part]


def check_marks(out, titles, expected_s):
    with av.open(out) as file:
        marks = file.chapters()
        assert [mark["metadata"]["title"] for mark in marks] == titles
        assert {name.lower(): value for name, value in file.metadata.items()}["title"] == "The old man"
        samples = sum(frame.samples for frame in file.decode(audio=0))
    long_s = [float((mark["end"] - mark["start"]) * mark["time_base"]) for mark in marks]
    assert long_s == pytest.approx(expected_s, abs=0.01)
    assert samples / join.RATE_HZ == pytest.approx(sum(expected_s), abs=0.1)


@pytest.mark.slow
def test_what_cannot_be_made_is_refused_in_one_line(tmp_path):
    book = written(tmp_path / "b.md", MARKDOWN)
    done = shell.zoo("audiobook", book, "-o", tmp_path / "b.mp3")
    assert done.returncode == 2 and "must end in one of: .m4b, .m4a, .mka" in done.stderr
    done = shell.zoo("audiobook", book, "--voice", "nobody", "--no-compile")
    assert done.returncode == 2 and done.stderr.count("has no voice 'nobody'") == 1
    assert not (tmp_path / "b.m4b.parts").exists()
    done = shell.zoo("audiobook", ".")
    assert done.returncode == 2 and "must end in .epub" in done.stderr
