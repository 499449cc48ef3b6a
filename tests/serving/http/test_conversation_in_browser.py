"""A conversation on the page at GET / in a headless Chromium, with a fake engine (fake_engine.py)."""

import numpy as np
import pytest
from fake_engine import ANSWERER, MODEL, TONE_SAMPLES
from http_server import Server, until

pytestmark = [pytest.mark.browser, pytest.mark.slow]
KEY = "sk-test"


def wait(page, fact):
    """Wait for a condition. Playwright's own function evaluates strings in the page, which its policy
    forbids."""
    until(lambda: page.evaluate(fact), 10)


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
    where = tmp_path_factory.mktemp("a")
    with Server(where, models=[ANSWERER, MODEL], api_key=KEY) as server:
        yield server


@pytest.fixture
def talk(visit, answering):
    page = visit(answering, is_ready=False)
    page.fill("#key", KEY)
    page.click("#key-form button")
    page.wait_for_selector("#hold:enabled")
    return page


def turns(page):
    return page.eval_on_selector_all(
        "#turns li", "lines => lines.map((line) => [line.className, line.textContent])"
    )


HAS_ENDED = "playground.talk.answer !== null && !playground.talk.isAnswering"


def test_a_model_that_answers_has_a_conversation_in_place_of_speech(talk):
    assert talk.is_visible("#talk") and not talk.is_visible("#speech") and not talk.is_visible("#code")
    assert talk.text_content("#instructions-label") == "System prompt"
    talk.select_option("#model", "fake")
    assert talk.is_visible("#speech") and talk.is_visible("#code") and not talk.is_visible("#talk")


def test_holding_the_button_speaks_and_the_answer_is_heard_and_shown(talk, answering):
    talk.fill("#instructions", "Be brief.")
    for num in (1, 2):
        talk.hover("#hold")
        talk.mouse.down()
        wait(talk, "playground.talk.microphone?.length > 30000")  # Chromium's microphone beeps once a second
        talk.mouse.up()
        wait(talk, HAS_ENDED)
        assert len(turns(talk)) == 2 * num
    (_, said), (role, answer) = turns(talk)[:2]
    assert said.endswith(" s of speech") and (role, answer) == ("assistant", "w0 w1 w2 ")
    assert talk.evaluate("playground.talk.answer.length") == 3 * TONE_SAMPLES
    asked = list(answering.engine.messages.values())[-1]
    system, first, told, second = asked.turns
    assert system.text == "Be brief." and told.tokens == tuple(range(6))
    heard = np.frombuffer(second.clip.samples, "<f4")
    assert 0.4 < second.clip.duration_s < 5 and heard.any() and first.clip.duration_s > 0.4


def test_an_answer_is_interrupted_where_it_was_heard(talk, answering):
    talk.fill("#said", "talk 200")
    talk.press("#said", "Enter")
    wait(talk, "playground.talk.answer?.player.positionS > 0.3")
    talk.click("#interrupt")
    wait(talk, HAS_ENDED)
    assert talk.locator("#turns .is-cut").count() == 1
    talk.fill("#said", "talk 1")
    talk.click("#send")
    wait(talk, HAS_ENDED)
    _, told, _ = list(answering.engine.messages.values())[-1].turns
    assert 6 <= len(told.tokens) < 400 and answering.engine.interrupted
    assert not talk.text_content("#talk-problem")


def test_a_refused_answer_and_a_new_conversation(talk, answering):
    talk.fill("#said", "reject 1")
    talk.click("#send")
    wait(talk, "document.getElementById('talk-problem').textContent.includes('not possible')")
    talk.click("#anew")
    assert turns(talk) == [] and not talk.text_content("#talk-problem")
    until(lambda: answering.app.state.server.sessions.num_held == 0)
