"""Requests over HTTP that mix voices: the engine gets each uploaded voice with its name."""

import msgspec
import pytest
from fake_engine import CLONER, MODEL
from http_server import Server, error
from uploads import stored, upload

from serving.http.names import Names

MIXER = msgspec.structs.replace(CLONER, id="mixer", mixes=True)


@pytest.fixture(scope="module")
def mixing(tmp_path_factory):
    names = Names(voices={"nova": "bert"})
    with Server(tmp_path_factory.mktemp("m"), models=[MIXER, CLONER, MODEL], names=names) as server:
        upload(server, "anna")
        upload(server, "bert", ref_text="What I say.")
        yield server


def test_a_mix_sends_its_voices_by_name(mixing):
    answer = mixing.speak("frames 1", model="mixer", voice="Anna(2)+nova(1)")
    assert answer.status_code == 200, answer.text
    message = mixing.engine.messages[answer.headers["x-request-id"]]
    assert message.request.voice == "Anna(2)+bert(1)" and not message.request.options
    found = [(reference.name, reference.transcript, reference.clip) for reference in message.references]
    anna, bert = (stored(mixing.voices_dir / name) for name in ("anna", "bert"))
    assert found == [("anna", None, anna), ("bert", "What I say.", bert)]


def test_a_voice_mixed_with_itself_is_sent_once(mixing):
    answer = mixing.speak("frames 1", model="mixer", voice="anna+ANNA(2)")
    message = mixing.engine.messages[answer.headers["x-request-id"]]
    assert [reference.name for reference in message.references] == ["anna"]


def test_the_engine_refuses_a_malformed_mix(mixing):
    answer = mixing.speak("frames 1", model="mixer", voice="anna(x)+nova")
    message = mixing.engine.messages[answer.headers["x-request-id"]]
    assert message.request.voice == "anna(x)+bert"
    assert [reference.name for reference in message.references] == ["bert"]


MIXES = [
    ("mixer", "anna+clara", "there is no voice 'clara'; available voices: anna, bert"),
    ("cloner", "anna+bert", "model 'cloner' cannot mix voices, and 'anna+bert' is a mix"),
    (
        "fake",
        "vivian+ryan",
        "model 'fake' cannot mix voices, and 'vivian+ryan' is a mix; available voices: vivian, ryan",
    ),
]


@pytest.mark.parametrize(("model", "voice", "says"), MIXES)
def test_impossible_mixes_are_refused(mixing, model, voice, says):
    fault = error(mixing.speak("frames 1", model=model, voice=voice), 400)
    assert fault["param"] == "voice" and says in fault["message"]


def test_models_say_whether_they_can_mix(mixing):
    models = mixing.http.get("/v1/models").json()["data"]
    assert {model["id"]: model["mixes"] for model in models} == {
        "mixer": True,
        "cloner": False,
        "fake": False,
    }
