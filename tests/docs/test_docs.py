"""The site builds without a warning and has a page for every family, route, command and metric."""

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
    """Build a copy of the tree, so that files of earlier builds in docs/ are not used."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root)
    for name in ("docs", "zoo", "serving", "compile_cache", "benchmarks", "examples", "train_a_voice"):
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


def test_every_family_has_a_page(site):
    assert len(zoo.families()) >= 5
    for name, folder in zoo.families().items():
        page = (site / "generated" / "families" / f"{name}.html").read_text()
        assert "At a glance" in page and "Options" in page
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


def test_every_metric_is_on_the_page(site):
    page = (site / "generated" / "metrics.html").read_text()
    named = set(re.findall(r'"(zoo_[a-z_]+)"', (ROOT / "serving" / "http" / "metrics.py").read_text()))
    assert len(named) > 30
    for name in named:
        assert re.search(rf">{name}(_total)?<", page), name


def test_every_shared_field_is_on_the_page_about_http():
    """The page is written by hand, so a new field needs a line there."""
    from serving.http.schemas import FIELDS

    page = (ROOT / "docs" / "http.md").read_text()
    missing = [field for field in FIELDS["/v1/audio/speech"] if f"`{field}`" not in page]
    assert not missing, f"docs/http.md does not name: {', '.join(missing)}"


def test_no_link_leads_outside_the_site(site):
    """Sphinx reports links to missing pages. Links to files of the repository must have become plain text."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        targets = [part.partition('"')[0] for part in text.split('href="')[1:]]
        assert not [one for one in targets if one.endswith(".md") and "://" not in one], page
