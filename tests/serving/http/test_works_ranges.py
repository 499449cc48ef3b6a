"""A listener seeks in a book: parts of files over HTTP, with a fake engine."""

import asyncio
import re

import pytest
from http_server import error
from works_server import TWO, WORKS, add, started, wait

from serving.books import process as books
from serving.http import ranges
from serving.http.works import process


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Return a server and the path of a work's book on it."""
    directory = tmp_path_factory.mktemp("spoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_run", lambda *given: asyncio.to_thread(books.outcome_of, *given))
        with started(directory, directory / "works") as server:
            id = add(server, TWO, "b.md")
            wait(server, id, "complete")
            yield server, f"{WORKS}/{id}/book.m4b"


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-99", slice(0, 100)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-100", slice(-100, None)),
        ("bytes=0-0", slice(0, 1)),
        ("bytes=500-999999999", slice(500, None)),
        ("bytes=-999999999", slice(0, None)),
    ],
)
def test_a_listener_seeks_in_a_book(spoken, asked, part, monkeypatch):
    monkeypatch.setattr(ranges, "CHUNK_BYTES", 64)
    server, path = spoken
    whole = server.http.get(path)
    assert whole.status_code == 200 and whole.headers["accept-ranges"] == "bytes"
    answer = server.http.get(path, headers={"range": asked, "if-range": whole.headers["etag"]})
    assert answer.status_code == 206 and answer.content == whole.content[part]
    first, last, num_bytes = map(int, re.findall(r"\d+", answer.headers["content-range"]))
    assert whole.content[first : last + 1] == answer.content and num_bytes == len(whole.content)
    for name in ("etag", "content-type"):
        assert answer.headers[name] == whole.headers[name]


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,5-6", "bytes=9-3", "bytes=-", "lines=0-1", "bytes=a-b", f"bytes={10**30}-"]
)
def test_other_ranges_get_the_whole_file(spoken, asked):
    server, path = spoken
    whole = server.http.get(path).content
    answer = server.http.get(path, headers={"range": asked})
    assert answer.status_code == 200 and answer.content == whole


def test_a_range_of_an_older_file_gets_the_whole_file(spoken):
    server, path = spoken
    for older in ('"another"', "Wed, 21 Oct 2015 07:28:00 GMT"):
        answer = server.http.get(path, headers={"range": "bytes=0-9", "if-range": older})
        assert answer.status_code == 200 and len(answer.content) > 100


def test_a_range_after_the_end_is_refused(spoken):
    server, path = spoken
    num_bytes = len(server.http.get(path).content)
    for asked in (f"bytes={num_bytes}-", "bytes=-0"):
        answer = server.http.get(path, headers={"range": asked})
        assert error(answer, 416)["code"] == "range_not_satisfiable"
        assert answer.headers["content-range"] == f"bytes */{num_bytes}"
