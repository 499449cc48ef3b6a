"""The documentation as it is built: strictly, with every family in it."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
from shell import ROOT

import zoo

HAS_SPHINX = importlib.util.find_spec("sphinx") and importlib.util.find_spec("myst_parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A copy is built, so that what lies in docs/ from earlier builds helps nothing."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, root)
    for name in ("docs", "zoo", "serving", "compile_cache", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("generated", "__pycache__"))
    (root / "tests" / "parity").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "parity" / "README.md", root / "tests" / "parity")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", root / "docs", root / "site"]
    done = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "site"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_SPHINX, reason="Sphinx is not installed: pip install -e .[docs]"),
]


def test_every_family_has_its_page(site):
    assert len(zoo.families()) >= 5
    for name, folder in zoo.families().items():
        page = (site / "generated" / "families" / f"{name}.html").read_text()
        assert "At a glance" in page and "Options" in page and "How fast" in page
        own = (ROOT / "zoo" / name / "README.md").read_text()
        assert own.splitlines()[0].removeprefix("# ") in page
        assert name == folder.NAME


def test_every_route_and_field_is_on_the_page(site):
    schema = json.loads((site / "openapi.json").read_text())
    page = (site / "generated" / "api.html").read_text()
    assert len(schema["paths"]) >= 7
    for path in schema["paths"]:
        assert path in page
    fields = schema["components"]["schemas"]["SpeechRequest"]["properties"]
    assert {"input", "ref_audio", "cfg_scale", "text_mode"} <= set(fields)
    for field in fields:
        assert f">{field}<" in page, field


def test_every_command_is_on_the_page(site):
    page = re.sub("<[^>]*>", "", (site / "generated" / "commands.html").read_text())
    for command in ("serve", "say", "batch", "load", "warm", "cache", "parity", "bench"):
        assert f"zoo {command}" in page
    assert "--private-metrics" in page and "--otel" in page


def test_links_of_readmes_lead_to_pages(site):
    """Sphinx itself complains of links to nowhere; those to files outside the site must not be there at all."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        targets = [part.partition('"')[0] for part in text.split('href="')[1:]]
        assert not [one for one in targets if one.endswith(".md") and "://" not in one], page
