"""A page plays a signed URL as <audio src>, and a page of another site does not."""

import http.server
import threading

import pytest
from http_server import Server

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PLAYED = """url => new Promise((resolve) => {
    const audio = new Audio(url);
    audio.addEventListener("ended", () => resolve(audio.currentTime));
    audio.addEventListener("error", () => resolve(null));
    audio.play().catch(() => resolve(null));
})"""


@pytest.fixture
def page(chromium):
    page = chromium.new_page()
    yield page
    page.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), speech_urls=True) as server:
        yield server


@pytest.fixture(scope="module")
def other_site():
    """Return the address of another site, with an empty page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield f"http://localhost:{site.server_port}"
    site.shutdown()
    site.server_close()


def signed(server, **fields):
    body = {"input": "tone 10", **fields}
    return server.url + server.http.post("/v1/audio/speech/url", json=body).json()["url"]


@pytest.mark.parametrize("form", ["mp3", "wav", "webm"])
def test_a_page_of_the_server_plays_it(page, server, form):
    page.goto(f"{server.url}/health")
    assert page.evaluate(PLAYED, signed(server, response_format=form)) == pytest.approx(0.8, abs=0.15)


def test_a_page_of_another_site_does_not(page, server, other_site):
    page.goto(other_site)
    before = len(server.engine.asked)
    assert page.evaluate(PLAYED, signed(server)) is None
    assert len(server.engine.asked) == before
