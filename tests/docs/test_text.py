"""The text of the project: short, plain, and with links that lead somewhere. Nothing here needs a server."""

import re

import prose
import pytest
from shell import ROOT

MAX_README_BYTES = 12_500
MAX_COLUMNS = 120
MAX_WORDS = 40  # in a sentence
# marks per 1,000 words; `python tests/docs/prose.py 20` shows them
MAX_IN_MARKDOWN = 2.0
MAX_IN_DOCSTRINGS = 3.0

WRITTEN = [*prose.files(prose.MARKDOWN["README"]), *prose.files(prose.MARKDOWN["docs"])]
WRITTEN += [*prose.files(prose.MARKDOWN["CONTRIBUTING"]), *prose.files(prose.MARKDOWN["READMEs of families"])]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = ("api", "commands", "metrics")  # pages that docs/pages.py makes, to which pages link


def name_of(path):
    return str(path.relative_to(ROOT))


def test_readme_is_short():
    num_bytes = (ROOT / "README.md").stat().st_size
    assert num_bytes <= MAX_README_BYTES, f"README.md has {num_bytes} bytes, at most {MAX_README_BYTES}"


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_lines_of_prose_fit_on_a_screen(path):
    """Tables, code and pictures may be wider."""
    text = re.sub(r"^```.*?^```", blank, path.read_text(), flags=re.M | re.S)
    lines = enumerate(text.splitlines(), 1)
    long = [
        f"{name_of(path)}:{number}: {len(line)} columns: {line[:80]}..."
        for number, line in lines
        if len(line) > MAX_COLUMNS and not re.match(r"\s*(\||!\[|\[!\[|<|    )", line)
    ]
    assert not long, "\n".join(long)


def blank(fence):
    """Keep the numbers of the lines after a code block."""
    return "\n" * fence[0].count("\n")


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_sentences_are_short(path):
    long = [one for one in prose.sentences(path) if one.num_words > MAX_WORDS]
    assert not long, "\n".join(f"{name_of(path)}: {one.num_words} words: {one.text}" for one in long)


@pytest.mark.parametrize("part", prose.MARKDOWN)
def test_markdown_is_plain_english(part):
    check_rate(part, prose.MARKDOWN[part], MAX_IN_MARKDOWN)


@pytest.mark.parametrize("part", prose.DOCSTRINGS)
def test_docstrings_are_plain_english(part):
    check_rate(part, prose.DOCSTRINGS[part], MAX_IN_DOCSTRINGS)


def check_rate(part, patterns, most):
    found = prose.found_in(patterns)
    assert found, f"{part} has no text"
    rate = prose.rate(found)
    assert rate <= most, (
        f"{part}: {rate:.1f} hard constructions per 1,000 words, at most {most}\n{prose.worst(found)}"
    )


@pytest.mark.parametrize(
    "sentence, name",
    [
        ("Who leaves early is dropped.", "a relative clause as the subject"),
        ("Requests go first, and who waits is next.", "'who' without a noun"),
        ("The list of voices is none.", "'is none', 'that is no'"),
        ("The decoder runs beside the model.", "'beside'"),
        ("The limit is for so many requests.", "'so many', 'so much'"),
        ("An average of late is enough.", "'of late', 'by itself', 'alike'"),
        ("A file is read where there is one.", "'where there is'"),
        ("The slot is free when nobody listens.", "'somebody', 'nobody'"),
        ("It is read by what the request says.", "'what' without a noun"),
    ],
)
def test_each_pattern_finds_its_construction(sentence, name):
    assert name in prose.Sentence(ROOT, sentence).marks


def test_plain_sentences_are_not_marked():
    plain = "If a client disconnects, its slot is freed. What does a window hold? There is no need to wait."
    assert not [one for text in prose.split(plain) for one in prose.Sentence(ROOT, text).marks]


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_relative_links_lead_to_files_and_headings(path):
    wrong = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if is_generated(file):
            continue
        if not file.exists():
            wrong.append(f"{name_of(path)}: {target}: there is no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            wrong.append(f"{name_of(path)}: {target}: there is no such heading")
    assert not wrong, "\n".join(wrong)


def links(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def is_generated(file):
    """Whether docs/pages.py makes the file."""
    return file.parent == ROOT / "docs/generated" and file.stem in GENERATED


def anchors(file):
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def test_every_page_is_reached_from_the_first_one():
    """The map of pages on docs/index.md names every page that is written by hand."""
    index = (ROOT / "docs/index.md").read_text()
    for path in prose.files(prose.MARKDOWN["docs"]):
        assert path.stem == "index" or re.search(rf"^{path.stem}$", index, re.M), path
