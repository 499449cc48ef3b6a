"""Snippets of the documentation: every fence of sh or python in Markdown, in the order in which a reader meets them.

<!-- snippet: skip, WHY -->          in the line before a fence: nobody runs it
<!-- snippet: server=clone -->       it asks a server of a model that clones, not the small voice
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shell import ROOT

FENCE = re.compile(r"(?:<!-- snippet: (.*?) -->\n)?^```(sh|python)\n(.*?)^```$", re.M | re.S)
ADDRESS = "127.0.0.1:8000"  # of the server in every snippet, by http or ws


@dataclass
class Snippet:
    path: Path
    line: int
    language: str
    code: str
    marker: str

    @property
    def skipped(self):
        """Why nobody runs it, or None."""
        what, _, why = self.marker.partition(",")
        return why.strip() if what == "skip" else None

    @property
    def server(self):
        return self.marker.partition("server=")[2] or "small"

    @property
    def results(self):
        """The files that it says it writes."""
        return re.findall(r"(?:-o |write_to_file\(\"|stream_to_file\(\")([\w.]+\.\w+)", self.code)


def pages():
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for pattern in ("docs/*.md", "zoo/*/README.md", "examples/**/README.md"):
        found += sorted(ROOT.glob(pattern))
    return found


def snippets(path):
    text = path.read_text()
    return [
        Snippet(path, text[: match.start(2)].count("\n") + 1, match[2], match[3], match[1] or "")
        for match in FENCE.finditer(text)
    ]
