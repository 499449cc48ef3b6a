"""The files and headers of the page at GET /. test_playground_in_browser.py tests the page in a browser."""

import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser

import pytest
from http_server import Server, error
from shell import ROOT, zoo

from serving import supervisor
from serving.http.routes.playground import FILES
from serving.http.static_files import TYPES

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NAMES = sorted(path.name for path in FILES.iterdir())
TEXTS = {path.name: path.read_text() for path in FILES.iterdir()}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), api_key="sk-test") as server:
        yield server


class Page(HTMLParser):
    """The elements of a page, as (tag, attributes)."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


def test_browsers_get_the_page_and_other_clients_get_the_api_addresses(server):
    page = server.http.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == TEXTS["index.html"]
    for accept in ("*/*", "application/json"):
        answer = server.http.get("/", headers={"accept": accept})
        assert (
            answer.json()["schema"] == "/schema"
            and answer.headers["vary"] == page.headers["vary"] == "accept"
        )


def test_the_page_may_only_run_its_own_modules(server):
    policy = server.http.get("/", headers=BROWSER).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy and "http" not in policy


def test_the_page_says_where_the_documentation_is():
    links = [attributes.get("href") for tag, attributes in Page(TEXTS["index.html"]).elements if tag == "a"]
    assert "docs" in links and "make docs" in TEXTS["index.html"]


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_sent_once_and_then_revalidated(server, name):
    answer = server.http.get(f"/playground/{name}")
    assert answer.status_code == 200 and answer.text == TEXTS[name]
    assert answer.headers["content-type"].startswith(TYPES[FILES.joinpath(name).suffix])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    tag = answer.headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = server.http.get(f"/playground/{name}", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert server.http.get(f"/playground/{name}", headers={"if-none-match": '"other"'}).status_code == 200
    head = server.http.head(f"/playground/{name}")
    assert head.content == b"" and head.headers["content-length"] == answer.headers["content-length"]


@pytest.mark.parametrize(
    "path", ["nothing.js", "..%2fapp.py", "%2e%2e/app.py", "", "index.html/x", ".", "a%00"]
)
def test_only_files_of_the_page_are_served(server, path):
    assert error(server.http.get(f"/playground/{path}"), 404)["code"] == "not_found"


def test_the_page_can_be_turned_off(tmp_path):
    with Server(tmp_path, playground=False) as server:
        paths = server.http.get("/", headers=BROWSER).json()
        assert paths.pop("name") == "speechzoo" and paths["schema"] == "/schema"
        assert all(server.http.get(path).status_code == 200 for path in paths.values())
        assert error(server.http.get("/playground/main.js"), 404)["code"] == "not_found"


@pytest.mark.parametrize(("options", "has_page"), [([], True), (["--no-playground"], False)])
def test_zoo_serve_has_an_option_for_the_page(tmp_path, monkeypatch, options, has_page):
    started = []
    monkeypatch.setattr(supervisor, "serve", lambda *arguments: started.append(arguments) or 0)
    assert zoo("serve", str(tmp_path), *options).returncode == 0
    [(settings, *_)] = started
    assert settings.playground is has_page


def test_every_referenced_file_exists():
    for tag, attributes in Page(TEXTS["index.html"]).elements:
        address = attributes.get("src") or attributes.get("href", "")
        if tag in ("link", "script"):
            assert address.removeprefix("playground/") in NAMES
    for name, text in TEXTS.items():
        for module in re.findall(r'from "(.*)"', text):
            assert module.startswith("./") and module[2:] in NAMES, f"{name} imports {module}"


def test_the_page_uses_no_other_server_and_makes_no_tags_from_text():
    for name, text in TEXTS.items():
        found = re.findall(r"https?://[^\s\"'`]*|//\w+\.\w+/", text.replace("http://www.w3.org/2000/svg", ""))
        assert not found, f"{name}: {found}"
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text
        ), name
    for tag, attributes in Page(TEXTS["index.html"]).elements:
        assert tag != "style" and not {"style", *(a for a in attributes if a.startswith("on"))} & set(
            attributes
        )
        assert tag != "script" or "src" in attributes


def test_every_field_has_a_label_and_every_reference_an_element():
    elements = Page(TEXTS["index.html"]).elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    for tag, attributes in elements:
        if tag in ("input", "select", "textarea") and attributes.get("type") != "radio":
            assert attributes["id"] in labelled
        for name in ("for", "aria-labelledby", "aria-describedby"):
            assert set(attributes.get(name, "").split()) <= set(ids)
    for name in (name for name in NAMES if name.endswith(".js")):
        assert set(re.findall(r'\$\("([\w-]+)"\)', TEXTS[name])) <= set(ids), name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_the_contrast_that_wcag_requires(theme):
    """Level AA: 4.5 for text, 3 for the outlines of controls."""
    light, dark = re.findall(r":root \{(.*?)\}", TEXTS["style.css"], re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light if theme == "light" else dark))
    for ground in ("ground", "surface"):
        for text in ("text", "muted", "accent", "error"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert contrast(colours["edge"], colours[ground]) >= 3
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["text"], colours["line"]) >= 4.5


def contrast(one, other):
    """https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""
    dim, bright = sorted(map(luminance, (one, other)))
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.slow
def test_a_wheel_contains_the_page(tmp_path):
    """The wheel is built from a copy, because setuptools writes next to the sources."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "serving", source / "serving", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        packed = {
            name.rpartition("/")[2]
            for name in wheel.namelist()
            if name.startswith("serving/http/playground/")
        }
    assert packed == set(NAMES)
