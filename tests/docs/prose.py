"""Count constructions that make English sentences hard to read, per 1,000 words.

    python tests/docs/prose.py            one line per part of the repository
    python tests/docs/prose.py 20         and the 20 worst sentences of each part

Each pattern marks a sentence that a reader must decode, for one of these reasons:

- The sentence has no named actor: "Who leaves early is dropped", "what it holds is kept", "somebody waits".
- The verb is missing or hidden: "where there is none", "that is no name".
- The word means something else today: "beside" for "next to", "of late" for "recently".

The patterns find candidates, not errors: some good sentences match, and most bad ones do not. The tests
therefore limit the rate and not the number.
"""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
VERBS = "is|are|was|has|had|waits?|speaks?|leaves?|comes?|would|may|listens?|asks?|goes|plays?|hears?|ends?|gives?"
HOLDS = (
    "takes|take|has|have|had|holds|hold|makes|make|made|says|say|said|needs|allows|leaves|kept|costs|knows|reads"
    "|gives|was|were|is|are"
)
PATTERNS = {
    "a relative clause as the subject": (
        r"^(Who|What|Whose|Whoever|Whatever|Where|Of (what|whom|which|those|a|an|all|such|late))\b(?!.*\?$)"
    ),
    "'who' without a noun": (
        r"\b(and|but|for|of|by|that|than|as|to|with|from|or|then|while|if|where|so) (who|whoever) "
        rf"({VERBS})\b"
    ),
    "'is none', 'that is no'": (r"\b(is|are|was) none\b|\bthat (is|are) no\b|\bis no (?!longer|way|need)\w+"),
    "'beside'": r"\bbeside\b",
    "'so many', 'so much'": r"\bso (many|much)\b(?! (of|that|as) )",
    "'of late', 'by itself', 'alike'": (
        r"\bof late\b|\bby itself\b|\bof (its|their|his) own\b|\blikewise\b|\balike\b"
    ),
    "'where there is'": (
        r"\bwhere (there|they|it|that|one|none|nothing|somebody|nobody|who|this) (is|are|was|were)\b"
    ),
    "'somebody', 'nobody'": r"\b(somebody|nobody|everybody|anybody)\b",
    "'what' without a noun": rf"\bwhat (\w+ ){{1,3}}({HOLDS})\b",
}


class Sentence(NamedTuple):
    path: Path
    text: str

    @property
    def num_words(self):
        return len(self.text.split())

    @property
    def marks(self):
        """The names of the patterns that match."""
        return [name for name, pattern in PATTERNS.items() if re.search(pattern, self.text)]


def sentences(path):
    """Return the sentences of a Markdown file, or of the docstrings of a Python file."""
    paragraphs = docstrings(path.read_text()) if path.suffix == ".py" else prose(path.read_text())
    return [Sentence(path, text) for paragraph in paragraphs for text in split(paragraph)]


def split(paragraph):
    """Yield the sentences of a paragraph. Code becomes X; fewer than three words are not a sentence."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|al)\.", "X", text)
    text = re.sub(r"(\d)\.(\d)", r"\1\2", text)
    for sentence in re.split(r'(?<=[.!?:])\s+(?=["(A-Z0-9X])', text):
        if len(sentence.split()) >= 3:
            yield sentence.strip()


def prose(text):
    """Return the paragraphs and list items of Markdown, without code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text, flags=re.S)
    paragraphs = [""]
    for line in text.splitlines():
        if not line.strip() or re.match(r"\s*(#|\||!\[|\[!\[|    )", line):
            paragraphs.append("")
            continue
        item = re.match(r"\s*([-*]|\d+\.)\s", line)
        if item:
            paragraphs.append("")
        paragraphs[-1] += " " + line[item.end() if item else 0 :].strip()
    return [paragraph for paragraph in paragraphs if paragraph]


def docstrings(code):
    """Return the paragraphs of all docstrings, without drawings (lines indented by three or more)."""
    paragraphs = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            text = "\n".join(line for line in text.splitlines() if not re.match(r"\s{3,}", line))
            paragraphs += [re.sub(r"\s+", " ", part) for part in text.split("\n\n")]
    return paragraphs


def rate(found):
    """Return the marks per 1,000 words."""
    return 1000 * sum(len(one.marks) for one in found) / max(sum(one.num_words for one in found), 1)


def worst(found, count=15):
    """Return the sentences with the most marks, one per line, with their files and marks."""
    marked = sorted((one for one in found if one.marks), key=lambda one: -len(one.marks))
    return "\n".join(
        f"  {one.path.relative_to(ROOT)}: {one.text}  [{', '.join(one.marks)}]" for one in marked[:count]
    )


MARKDOWN = {
    "README": ["README.md"],
    "docs": ["docs/*.md"],
    "CONTRIBUTING": ["CONTRIBUTING.md"],
    "CHANGELOG": ["CHANGELOG.md"],
    "READMEs of families": ["zoo/*/README.md"],
    "examples": ["examples/README.md"],
}
DOCSTRINGS = {
    "zoo": ["zoo/**/*.py"],
    "serving/http": ["serving/http/**/*.py"],
    "serving/cli": ["serving/cli/*.py"],
    "serving/tools": ["serving/tools/**/*.py"],
    "serving/*.py": ["serving/*.py"],
    "compile_cache": ["compile_cache/*.py"],
}


def files(patterns):
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def found_in(patterns):
    return [sentence for path in files(patterns) for sentence in sentences(path)]


if __name__ == "__main__":
    for part, patterns in (MARKDOWN | DOCSTRINGS).items():
        here = found_in(patterns)
        print(f"{part}: {rate(here):.1f} per 1,000 words, {sum(one.num_words for one in here)} words")
        if len(sys.argv) > 1:
            print(worst(here, int(sys.argv[1])))
