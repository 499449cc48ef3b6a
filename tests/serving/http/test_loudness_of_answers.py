"""`loudness` over HTTP and the WebSocket, with a fake engine."""

import base64

import numpy as np
import pytest
from fake_engine import RATE_HZ
from http_server import Server, error
from sessions import spoken

from serving.audio.loudness import loudness_of

TONE = "tone 25"  # 2 s at -6 dBFS


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as server:
        yield server


def is_at(lufs, pcm, within_db=0.3):
    assert len(pcm) == 2 * 2 * RATE_HZ
    assert loudness_of(pcm, RATE_HZ) == pytest.approx(lufs, abs=within_db)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lufs", [-23, -16.5])
def test_speech_has_the_loudness_that_was_asked_for(server, stream, lufs):
    is_at(lufs, server.speak(TONE, response_format="pcm", loudness=lufs, stream=stream).content)


def test_it_is_off_by_default(server):
    plain = server.speak(TONE, response_format="pcm").content
    assert plain == server.speak(TONE, response_format="pcm", loudness=None).content
    assert np.abs(np.frombuffer(plain, "<i2")).max() == round(0.5 * 32767)


def test_items_of_a_batch_have_it(server):
    body = {
        "items": [{"input": TONE}, {"input": TONE, "loudness": -30}],
        "loudness": -20,
        "response_format": "pcm",
    }
    data = server.http.post("/v1/audio/speech/batch", json=body).json()["data"]
    for one, lufs in zip(data, (-20, -30), strict=True):
        is_at(lufs, base64.b64decode(one["audio"]))


def test_a_session_has_it_and_holds_no_sentence_back(server):
    events, pcm = spoken(server, TONE, loudness=-20)
    assert events[-1]["type"] == "audio.done"
    is_at(-20, pcm)


@pytest.mark.parametrize("wrong", [-60, 0, "loud"])
def test_other_values_are_refused(server, wrong):
    fault = error(server.speak("frames 1", loudness=wrong), 400)
    assert fault["param"] == "loudness" and "a number from -36 to -8" in fault["message"]
