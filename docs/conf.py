"""Sphinx, with MyST for Markdown and Furo for looks:

    sphinx-build -W --keep-going docs site       # or `make docs`

mkdocs-material was the other choice: lighter, but it stands on MkDocs, whose last release is of 2024. What is said
elsewhere in this repository is not said again here: pages.py brings it in before anything is read.
"""

import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docs import pages  # noqa: E402

pages.write(HERE / "generated")

project = "speechzoo"
author = "the speechzoo authors"
release = version = importlib.metadata.version("speechzoo")
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["site"]
html_theme = "furo"
html_title = "speechzoo"
html_static_path: list[str] = []
html_extra_path = ["generated/openapi.json"]
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 3
suppress_warnings = [
    "myst.header",  # parts of other pages begin where they begin
]
pygments_style = "friendly"
pygments_dark_style = "monokai"
