"""Sphinx, with MyST for Markdown and Furo as the theme:

    sphinx-build -W --keep-going docs site       # or `make docs`

mkdocs-material would be lighter, but MkDocs had its last release in 2024.
"""

import importlib.metadata
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docs import pages  # noqa: E402

project = "speechzoo"
author = "the speechzoo authors"
release = version = importlib.metadata.version("speechzoo")
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["site"]
html_theme = "furo"
html_title = "speechzoo"
html_static_path: list[str] = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["generated/openapi.json"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",  # copied pages may begin below a first-level heading
]
pygments_style = "friendly"
pygments_dark_style = "monokai"


def relink(_: Sphinx, page: str, source: list[str]) -> None:
    """Give a page written by hand links that work on the site. Generated pages have them already."""
    if not page.startswith("generated/"):
        source[0] = pages.relinked(source[0], f"docs/{page}.md", f"{page}.md")


def setup(sphinx: Sphinx) -> None:
    pages.write(HERE / "generated")
    sphinx.connect("source-read", relink)
