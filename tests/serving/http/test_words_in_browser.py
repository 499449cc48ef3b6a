"""Word times, pauses and the gap between sentences on the page at GET /, in a headless Chromium."""

import msgspec
import pytest
from fake_aligner import FakeAligner
from fake_engine import MODEL
from http_server import Server, until

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WHOLE = msgspec.structs.replace(MODEL, id="whole", piece_s=None)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, WHOLE]) as server:
        yield server


@pytest.fixture
def opened(visit, server):
    def open_page(aligner=None):
        server.app.state.server.aligner = aligner
        return visit(server)

    return open_page


def asked(server):
    return list(server.engine.asked.values())[-1]


def test_words_appear_and_are_marked_while_they_are_spoken(opened, server):
    page = opened(FakeAligner())
    page.fill("#input", "tone 25")
    page.click("#speak")
    page.wait_for_selector("#words span >> text=25")
    assert page.locator("#words").inner_text() == "tone 25"
    assert page.locator("#words .estimated").inner_text() == "25"
    page.wait_for_selector("#words .spoken >> text=tone")
    page.wait_for_selector("#words .spoken >> text=25")
    page.click("summary")
    page.uncheck("#words-wanted")
    page.wait_for_selector("#speak:not(.is-speaking)")
    page.click("#speak")
    until(lambda: not page.is_visible("#words"))
    messages = list(server.engine.messages.values())
    assert [message.listener.wants_timestamps for message in messages[-2:]] == [True, False]


def test_without_an_aligner_the_page_offers_no_word_times(opened, server):
    page = opened()
    page.click("summary")
    assert not page.is_visible("#words-wanted")
    page.fill("#input", "frames 1")
    page.click("#speak")
    page.wait_for_selector("#after:visible")
    assert not page.is_visible("#words")


def test_a_pause_is_put_where_the_cursor_is(opened):
    page = opened()
    page.fill("#input", "One.")
    page.click("#pause")
    page.keyboard.type("Two.")
    assert page.input_value("#input") == "One. [pause:1s] Two."
    assert "20 of" in page.inner_text("#count")


def test_the_gap_between_sentences_is_sent(opened, server):
    page = opened()
    page.click("summary")
    page.fill("#sentence-gap", "0.5")
    page.fill("#input", "frames 1")
    assert '"sentence_gap_s": 0.5' in page.inner_text("#code")
    page.click("#speak")
    until(lambda: asked(server).get("sentence_gap_s") == 0.5)
    page.wait_for_selector("#speak:not(.is-speaking)")
    page.fill("#sentence-gap", "11")
    page.click("#speak")
    page.wait_for_selector("#gap-error:has-text('sentence_gap_s')")
    page.select_option("#model", "whole")
    assert not page.is_visible("#sentence-gap")
