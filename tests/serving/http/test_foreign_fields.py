"""Requests as clients of vLLM-Omni, SGLang-Omni, Kokoro-FastAPI and speaches send them."""

import base64
import json

import msgspec
import pytest
from fake_engine import CLONER, MODEL, frame
from http_server import Server, error
from uploads import recording
from websockets.sync.client import connect

from serving.http import reference_files
from serving.http.names import Names
from serving.http.ssml import text_of
from serving.settings import Limits

TONE = base64.b64encode(recording()).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture(scope="module")
def cloner(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recordings")
    (directory / "voice.wav").write_bytes(recording())
    (directory.parent / "secret.wav").write_bytes(recording())
    (directory / "link.wav").symlink_to(directory.parent / "secret.wav")
    limits = Limits(reference_dir=str(directory))
    with Server(tmp_path_factory.mktemp("s"), models=[CLONER], limits=limits) as server:
        server.directory = directory
        yield server


def asked_last(server):
    return list(server.engine.messages.values())[-1]


def test_a_speaker_is_the_voice(server):
    assert server.speak("frames 1", speaker="Ryan").status_code == 200
    assert asked_last(server).request.voice == "Ryan"
    items = server.http.post(
        "/v1/audio/speech/batch", json={"speaker": "ryan", "items": [{"input": "frames 1"}]}
    )
    assert items.json()["data"][0]["error"] is None and asked_last(server).request.voice == "ryan"


def test_a_voice_alias_of_the_request_has_a_rate(server):
    aliases = {"slow": {"voice": "ryan", "rate": 0.8}, "plain": "vivian"}
    assert server.speak("frames 1", voice="slow", speed=0.5, voice_aliases=aliases).status_code == 200
    message = asked_last(server)
    assert (message.request.voice, message.listener.speed) == ("ryan", 0.4)
    assert server.speak("frames 1", voice="plain", voice_aliases=aliases).status_code == 200
    assert (asked_last(server).request.voice, asked_last(server).listener.speed) == ("vivian", 1.0)


@pytest.mark.parametrize(
    "aliases", [[], {"a": 5}, {"a": {"rate": 1}}, {"a": {"voice": "ryan", "rate": "fast"}}]
)
def test_a_wrong_voice_alias_is_refused(server, aliases):
    assert error(server.speak("frames 1", voice="a", voice_aliases=aliases), 400)["param"] == "voice_aliases"


def test_a_rate_or_speed_that_no_float_holds_is_refused(server):
    aliases = {"a": {"voice": "ryan", "rate": 10**400}}
    asked = {"input": "frames 1", "voice": "a", "voice_aliases": aliases}
    fault = error(server.speak("frames 1", voice="a", voice_aliases=aliases), 400)
    assert fault["param"] == "voice_aliases" and "too large" in fault["message"]
    tagged = error(server.speak("[rate:0.5] frames 1", speed=10**400, allow_voice_tags=True), 400)
    assert tagged["param"] == "input"
    items = server.http.post("/v1/audio/speech/batch", json={"items": [asked, {"input": "frames 1"}]})
    assert [each["error"] is None for each in items.json()["data"]] == [False, True]


def test_a_rate_in_front_of_the_text_is_a_speed(server):
    assert server.speak("[rate:0.5] frames 1", allow_voice_tags=True).status_code == 200
    message = asked_last(server)
    assert (message.request.text, message.listener.speed) == ("frames 1", 0.5)
    assert server.speak("frames 1 [rate:0.5]").status_code == 200
    assert asked_last(server).request.text == "frames 1 [rate:0.5]"
    assert error(server.speak("frames 1 [rate:2] b", allow_voice_tags=True), 400)["param"] == "input"
    assert error(server.speak("[rate:9] frames 1", allow_voice_tags=True), 400)["param"] == "speed"


def test_a_strict_server_refuses_fields_of_other_servers(tmp_path):
    with Server(tmp_path, names=Names(is_strict=True)) as server:
        assert error(server.speak("frames 1", speaker="ryan"), 400)["code"] == "unknown_field"


def test_an_unknown_voice_next_to_a_recording_is_ignored_with_a_warning(cloner):
    answer = cloner.speak("frames 1", voice="Vivian", ref_audio=TONE)
    assert answer.status_code == 200
    assert answer.headers["x-warning"] == "voice 'Vivian' does not exist; the recording is used instead"


def test_a_recording_below_the_directory_may_be_named_by_its_path(cloner):
    path = cloner.directory / "voice.wav"
    for name in ("voice.wav", str(path), path.as_uri()):
        assert cloner.speak("frames 1", ref_audio=name).status_code == 200
        assert cloner.speak("frames 1", references=[{"audio_path": name, "text": "x"}]).status_code == 200


@pytest.mark.parametrize("name", ["../secret.wav", "link.wav", "none.wav", "/etc/passwd.", "a\0.wav", "."])
def test_files_outside_the_directory_are_not_read(cloner, name):
    fault = error(cloner.speak("frames 1", ref_audio=name), 400)
    assert "there is no such file in the directory of recordings" in fault["message"]


def test_a_file_above_the_limit_is_not_read_whole(cloner):
    with pytest.raises(ValueError, match="more than 100 bytes"):
        reference_files.read("voice.wav", str(cloner.directory), 100)


def test_a_wrong_sample_rate_is_422_as_from_speaches(server):
    assert error(server.speak("frames 1", sample_rate=7999), 422)["param"] == "sample_rate"


def test_the_last_event_has_the_usage_under_both_names(server):
    answer = server.speak("frames 1", stream_format="sse")
    done = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert done["token_usage"] == done["usage"]


def test_the_voices_can_be_listed_by_name_alone(server):
    assert server.http.get("/v1/audio/voices?legacy=true").json() == {"voices": MODEL.voices}


def vllm_session(server, text, **config):
    """Return all events of a session as vLLM-Omni's client opens it, up to session.done."""
    events, audio = [], b""
    with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream", compression=None) as socket:
        socket.send(json.dumps({"type": "session.config", "task_type": "CustomVoice", **config}))
        socket.send(json.dumps({"type": "input.text", "text": text}))
        socket.send(json.dumps({"type": "input.done"}))
        while not events or events[-1]["type"] != "session.done":
            message = socket.recv(timeout=5)
            if isinstance(message, bytes):
                audio += message
            else:
                events.append(json.loads(message))
    return events, audio


def test_a_session_with_a_task_type_has_vllm_omnis_events(server):
    events, audio = vllm_session(server, "frames 2", speaker="Ryan", stream_audio=True)
    _, start, done, last = events
    assert (start["type"], start["sentence_index"], start["sentence_text"]) == ("audio.start", 0, "frames 2")
    assert (done["type"], done["sentence_index"], done["error"]) == ("audio.done", 0, False)
    assert last == {"type": "session.done", "total_sentences": 1} and audio == frame(0) + frame(1)
    assert asked_last(server).request.voice == "Ryan"


def test_a_failed_utterance_ends_vllm_omnis_session_too(server):
    events, _ = vllm_session(server, "fail 0")
    assert events[-2]["type"] == "error" and events[-2]["message"] == events[-2]["error"]["message"]


@pytest.mark.parametrize(
    ("ssml", "text"),
    [
        ("<speak>Hello <break time='500ms'/> you</speak>", "Hello [pause:0.5s] you"),
        ('<?xml version="1.0"?><speak><p>One.</p><p>Two.</p></speak>', "One. Two."),
        ("<speak><prosody rate='slow'>A &amp; b</prosody></speak>", "[rate:0.75] A & b"),
        ("<speak><prosody rate='120%'><s>A</s></prosody></speak>", "[rate:1.2] A"),
        (
            "<speak>the <sub alias='World Wide Web'>WWW</sub><desc>x</desc> <emphasis>now</emphasis></speak>",
            "the World Wide Web now",
        ),
        (
            "<speak xmlns='http://www.w3.org/2001/10/synthesis'>a<break strength='weak'/>b</speak>",
            "a [pause:0.25s] b",
        ),
    ],
)
def test_ssml_becomes_text_with_pauses_and_a_rate(server, ssml, text):
    assert text_of(ssml) == text
    assert server.http.post("/dev/ssml", json={"text": ssml, "voice": "ryan"}).json() == {"text": text}


@pytest.mark.parametrize(
    "ssml",
    [
        "<speak>",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><speak>&b;</speak>",
        "<speak>a <prosody rate='slow'>b</prosody></speak>",
        "<speak><voice name='x'>b</voice></speak>",
        "<speak><break time='5'/></speak>",
        "<speak>" + "<s>" * 60 + "</s>" * 60 + "</speak>",
    ],
)
def test_ssml_that_cannot_be_used_is_refused(ssml):
    with pytest.raises(ValueError):
        text_of(ssml)


def test_wrong_bodies_for_ssml_get_one_clear_error(server):
    assert server.http.post("/dev/ssml", json={"text": "plain"}).json() == {"text": "plain"}
    assert error(server.http.post("/dev/ssml", json={"text": "<speak>"}), 400)["param"] == "text"
    assert error(server.http.post("/dev/ssml", json={}), 400)["param"] == "text"


def test_the_default_voice_next_to_a_recording_means_the_recording(tmp_path):
    named = msgspec.structs.replace(CLONER, voices=["default"])
    with Server(tmp_path, models=[named]) as server:
        assert server.speak("frames 1", voice="default", ref_audio=TONE).status_code == 200
        assert asked_last(server).request.voice is None and len(asked_last(server).references) == 1


def test_an_unknown_voice_next_to_a_description_is_ignored_with_a_warning(tmp_path):
    designer = msgspec.structs.replace(MODEL, voices=[], modes=["design"])
    with Server(tmp_path, models=[designer]) as server:
        answer = server.speak("frames 1", voice="Vivian", instructions="A warm voice")
        assert answer.headers["x-warning"] == "voice 'Vivian' does not exist; the field is ignored"
        assert error(server.speak("frames 1", voice="Vivian"), 400)["param"] == "voice"


def test_the_words_of_no_recording_are_ignored_next_to_a_voice(server):
    answer = server.speak("frames 1", voice="ryan", ref_text="a")
    assert answer.headers["x-warning"] == "ref_text has no meaning without ref_audio; it is ignored"
    assert error(server.speak("frames 1", ref_text="a"), 400)["param"] == "ref_text"
