"""Find the snippets of the documentation: every sh or python fence in Markdown, in reading order.

A comment in the line before a fence changes how it is run:

<!-- snippet: skip, WHY -->          it is not run
<!-- snippet: server=clone -->       its server serves a model that clones, not the small voice
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shell import ROOT

FENCE = re.compile(r"(?:<!-- snippet: (.*?) -->\n)?^```(sh|python)\n(.*?)^```$", re.M | re.S)
ADDRESS = "127.0.0.1:8000"  # the server in every snippet, over HTTP or WebSocket


@dataclass
class Snippet:
    path: Path
    line: int
    language: str
    code: str
    marker: str

    @property
    def skipped(self):
        """Return the reason why it is not run, or None if it is."""
        word, _, reason = self.marker.partition(",")
        return reason.strip() if word == "skip" else None

    @property
    def server(self):
        return self.marker.partition("server=")[2] or "small"

    @property
    def results(self):
        """Return the names of the files that it writes."""
        return re.findall(r"(?:-o |write_to_file\(\"|stream_to_file\(\")([\w.]+\.\w+)", self.code)


def pages():
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for pattern in ("docs/*.md", "zoo/*/README.md", "examples/README.md", "train_a_voice/README.md"):
        found += sorted(ROOT.glob(pattern))
    return found


def snippets(path):
    text = path.read_text()
    return [
        Snippet(path, text[: match.start(2)].count("\n") + 1, match[2], match[3], match[1] or "")
        for match in FENCE.finditer(text)
    ]
