"""The page at GET /docs: Swagger UI from this server alone."""

import gzip
import hashlib
import re

import pytest
from http_server import Server, error

from serving.http.routes.api_page import FILES

OWN = ("index.html", "start.js")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), api_key="sk-test") as server:
        yield server


def test_the_page_loads_its_parts_and_the_schema_from_this_server(server):
    page = server.http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert server.http.get(f"/{address}").status_code == 200, address
    start = server.http.get("/docs/start.js").text
    [schema] = re.findall(r"url: '([^']+)'", start)
    assert server.http.get(f"/{schema}").json()["openapi"].startswith("3.1")


@pytest.mark.parametrize("name", OWN)
def test_the_page_names_no_foreign_host(name):
    text = (FILES / name).read_text()
    assert not re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
    assert (
        "validatorUrl: null" in (FILES / "start.js").read_text()
    )  # Swagger UI would ask a server of its own


@pytest.mark.parametrize("name", ["", "/swagger-ui-bundle.js"])
def test_a_browser_asks_no_other_host_for_the_page(server, name):
    policy = server.http.get(f"/docs{name}").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["script-src"] == rules["connect-src"] == "'self'"
    assert "http" not in policy and "*" not in policy


@pytest.mark.parametrize("name", ["swagger-ui-bundle.js", "swagger-ui.css"])
def test_large_files_are_sent_as_they_are_stored(server, name):
    packed = (FILES / f"{name}.gz").read_bytes()
    answer = server.http.get(f"/docs/{name}")
    assert answer.headers["content-encoding"] == "gzip" and answer.headers["vary"] == "accept-encoding"
    assert answer.content == gzip.decompress(packed)  # httpx has unpacked it
    plain = server.http.get(f"/docs/{name}", headers={"accept-encoding": "identity"})
    assert plain.content == answer.content and "content-encoding" not in plain.headers
    tag = answer.headers["etag"]
    assert server.http.get(f"/docs/{name}", headers={"if-none-match": tag}).status_code == 304


def test_the_files_of_others_are_small_unchanged_and_licensed():
    facts = (FILES / "README.md").read_text()
    for path in FILES.glob("*.gz"):
        assert path.stat().st_size < 1_000_000
        assert hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest() in facts
    assert "Apache License" in (FILES / "LICENSE").read_text() and (FILES / "NOTICE").exists()


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "swagger-ui.css.gz", "nothing.js"])
def test_only_files_of_the_page_are_served(server, name):
    assert error(server.http.get(f"/docs/{name}"), 404)["code"] == "not_found"


def test_the_page_goes_with_the_one_for_trying_models(tmp_path):
    with Server(tmp_path, playground=False) as server:
        assert error(server.http.get("/docs"), 404)["code"] == "not_found"
