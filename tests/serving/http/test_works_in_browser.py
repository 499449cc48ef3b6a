"""Audiobooks on the page at GET /, in a headless Chromium."""

import io

import av
import pytest
from http_server import Server, until

from serving.settings import WorksSettings

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")

pytestmark = [pytest.mark.browser, pytest.mark.slow]
KEY = "sk-test"
BOOK = "# frames 300 The sea\n\nIt was long.\n\n# hold 1 The door\n\nShe opened it.\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    where = tmp_path_factory.mktemp("s")
    with Server(where, api_key=KEY, works=WorksSettings(str(where / "works"))) as server:
        until(lambda: server.app.state.works.problem is None)
        yield server


@pytest.fixture
def opened(visit):
    """Return a function that opens the page with the API key."""

    def open_page(server):
        page = visit(server, is_ready=False, viewport={"width": 390, "height": 800})
        page.on("dialog", lambda dialog: dialog.accept())
        page.fill("#key", KEY)
        page.click("#key-form button")
        page.wait_for_selector("#works:visible")
        return page

    return open_page


@pytest.fixture
def page(opened, server):
    return opened(server)


@pytest.fixture(autouse=True)
def forget(server):
    """Delete all works after each test."""
    yield
    for work in listed(server):
        server.http.delete(f"/v1/audio/works/{work['id']}", headers=KEYED)


KEYED = {"authorization": f"Bearer {KEY}"}


def listed(server):
    return server.http.get("/v1/audio/works", headers=KEYED).json()["data"]


def choose(page, tmp_path, text, name="the old man.md"):
    (tmp_path / name).write_text(text)
    page.set_input_files("#document", tmp_path / name)
    page.click("#make-work")


def test_a_document_becomes_an_audiobook_that_can_be_downloaded(page, server, tmp_path):
    assert page.get_attribute("#document", "accept") == ".epub,.md,.markdown,.txt"
    assert page.is_disabled("#make-work")
    page.click("summary")
    page.fill("#seed", "7")
    choose(page, tmp_path, BOOK.replace("hold 1", "frames 200"))
    page.wait_for_selector("#works .save:visible")
    assert page.inner_text("#works .title") == "the old man"
    assert page.inner_text("#works .facts") == "4 s · fake" and page.is_disabled("#make-work")
    assert [one["seed"] for one in server.engine.asked.values()][-2:] == [7, 7]
    with page.expect_download() as loading:
        page.click("#works .save")
    assert loading.value.suggested_filename == "the old man.m4b"
    with av.open(io.BytesIO(loading.value.path().read_bytes())) as file:
        assert len(file.chapters()) == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.click("#works .remove")
    page.wait_for_selector("#works-list li", state="detached")
    assert listed(server) == []


def test_a_page_that_is_opened_again_finds_the_work_and_plays_what_is_finished(opened, server, tmp_path):
    first = opened(server)
    choose(first, tmp_path, BOOK)
    first.wait_for_selector("#works-list li")
    first.close()
    second = opened(server)
    second.click("#works details summary")
    chapters = second.locator("#works ol li")
    sync_api.expect(chapters).to_have_count(2)
    assert chapters.nth(1).locator(".title").inner_text() == "hold 1 The door"
    chapters.nth(0).locator(".listen").click(timeout=10_000)
    until(lambda: second.evaluate("document.querySelector('#works audio').currentTime") > 0)
    assert (
        not chapters.nth(1).locator(".listen").is_visible()
        and chapters.nth(1).locator("progress").is_visible()
    )
    assert second.inner_text("#works .facts").startswith("speaking, ")
    assert not second.is_visible("#works .save")
    second.click("#works .remove")
    second.wait_for_selector("#works-list li", state="detached")
    until(lambda: server.engine.cancelled)


def test_a_work_that_failed_says_why_and_is_tried_again(page, server, tmp_path):
    choose(page, tmp_path, "fail 0", "b.txt")
    page.wait_for_selector("#works .again:visible")
    assert page.inner_text("#works-list .error") == "chapter 1 ('Beginning'), part 1: the codec broke"
    num = len(server.engine.asked)
    page.click("#works .again")
    until(lambda: len(server.engine.asked) == num + 1)


def test_a_document_that_is_refused_says_why(page, server, tmp_path):
    choose(page, tmp_path, " ", "b.txt")
    sync_api.expect(page.locator("#works-problem")).to_have_text("b.txt has no text")
    page.click("summary")
    page.fill("#option-temperature", "warm")
    page.click("#make-work")
    sync_api.expect(page.locator("[data-field=temperature] .error")).to_contain_text("temperature takes")
    assert listed(server) == []


def test_a_server_without_works_does_not_show_them(chromium, tmp_path):
    with Server(tmp_path) as server:
        page = chromium.new_page()
        with page.expect_response(lambda answer: answer.url.endswith("/v1/audio/works")):
            page.goto(server.url)
        page.wait_for_selector("#speak:enabled")
        assert not page.is_visible("#works")
        page.close()
