"""OpenAI's names for models and voices, and aliases from `zoo serve --alias`."""

import base64

import msgspec
import pytest
from fake_engine import ANSWERER, CLONER, MODEL, TRANSCRIBER
from http_server import Server, error
from uploads import recording, upload

from serving.http.names import Names

ALIASES = Names({"fast": "fake", "copy": "cloner"}, {"Anna": "ryan", "vivian": "ryan"})
CHANCE = msgspec.structs.replace(CLONER, modes=["voice", "clone"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL, CLONER], names=ALIASES) as server:
        yield server


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), names=Names(is_strict=True)) as server:
        yield server


def reached(server, **fields):
    """Return the model and the voice that reached the engine, and the warning."""
    answer = server.speak("frames 1", **fields)
    assert answer.status_code == 200, answer.text
    message = server.engine.messages[answer.headers["x-request-id"]]
    return message.model, message.request.voice, answer.headers.get("x-warning")


@pytest.mark.parametrize("model", ["tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15"])
def test_openais_models_mean_the_only_model_with_a_warning(server, model):
    instead = f"model '{model}' is not served; 'fake' is used instead"
    assert reached(server, model=model) == ("fake", None, instead)


@pytest.mark.parametrize("voice", ["alloy", "Verse", {"id": "shimmer"}])
def test_openais_voices_mean_the_first_voice_with_a_warning(server, voice):
    name = voice["id"] if isinstance(voice, dict) else voice
    instead = f"voice '{name}' does not exist; 'vivian' is used instead"
    assert reached(server, voice=voice) == ("fake", "vivian", instead)
    both = reached(server, voice=voice, model="tts-1", stream_format="sse")
    assert both[:2] == ("fake", "vivian") and both[2].count(" is used instead") == 2


def test_real_names_give_no_warning(server):
    assert reached(server, model="fake", voice="Ryan") == ("fake", "Ryan", None)
    assert reached(server) == ("fake", None, None)


def test_unknown_names_are_refused(server):
    assert error(server.speak("frames 1", model="tts-2"), 404)["code"] == "model_not_found"
    assert error(server.speak("frames 1", voice="carl"), 400)["param"] == "voice"


def test_a_strict_server_refuses_openais_names(strict):
    assert error(strict.speak("frames 1", model="tts-1"), 404)["code"] == "model_not_found"
    assert "available voices: vivian, ryan" in error(strict.speak("frames 1", voice="alloy"), 400)["message"]


def test_a_server_of_several_models_refuses_openais_names(several):
    refused = error(several.speak("frames 1", model="tts-1"), 404)
    assert refused["code"] == "model_not_found" and refused["message"].startswith(
        "'tts-1' stands for the only model that can speak; this server has several: fake, "
    )
    assert error(several.speak("frames 1", voice="alloy"), 400)["param"] == "voice"


def test_openais_names_mean_the_only_model_that_does_the_work(tmp_path):
    with Server(tmp_path, models=[MODEL, ANSWERER]) as server:
        model, voice, warning = reached(server, model="tts-1", voice="alloy")
        assert (model, voice) == (
            "fake",
            MODEL.voices[0],
        ) and "'tts-1' is not served; 'fake' is used" in warning
        assert reached(server)[0] == "fake"
        turn = {"role": "user", "content": "talk 1"}
        answer = server.http.post(
            "/v1/chat/completions", json={"model": "gpt-audio-mini", "messages": [turn]}
        )
        assert answer.json()["model"] == "answerer" and "'answerer' is used" in answer.headers["x-warning"]
        refused = server.http.post("/v1/chat/completions", json={"model": "tts-1", "messages": [turn]})
        assert error(refused, 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("tts-1-hd", "speak"),
        ("gpt-4o-mini-tts-2025-12-15", "speak"),
        ("gpt-realtime-2.1-mini", "answer"),
        ("gpt-4o-audio-preview-2024-12-17", "answer"),
        ("gpt-audio-1.5", "answer"),
        ("gpt-realtime-whisper", "transcribe"),
        ("gpt-4o-mini-transcribe", "transcribe"),
        ("gpt-4o", None),
        ("gpt-realtimes", None),
        ("my-tts-1", None),
    ],
)
def test_each_of_openais_names_does_one_kind_of_work(name, work):
    served = [MODEL, ANSWERER, TRANSCRIBER]
    means = [each for each in ("speak", "answer", "transcribe") if Names().means(name, each, served)]
    assert means == ([] if work is None else [work])
    assert not any(Names(is_strict=True).means(name, each, served) for each in means)


def test_an_alias_is_a_name_like_any_other(several):
    assert reached(several, model="fast", voice="Anna") == ("fake", "ryan", None)
    assert several.http.get("/v1/models/fast").json()["id"] == "fake"


def test_real_names_take_precedence_over_aliases(several):
    assert reached(several, voice="vivian") == ("fake", "vivian", None)


def test_the_lists_contain_the_aliases(several):
    models = several.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["aliases"]) for model in models] == [("fake", ["fast"]), ("cloner", ["copy"])]
    choices = several.http.get("/v1/audio/models").json()
    assert choices["models"] == [{"id": name, "name": name} for name in ("fake", "fast", "cloner", "copy")]
    assert choices["data"] == models
    voices = several.http.get("/v1/audio/voices").json()
    assert [entry["id"] for entry in voices["voices"]] == ["vivian", "ryan", "Anna", "vivian"][:3]
    assert {voice["id"]: voice["aliases"] for voice in voices["data"]} == {
        "vivian": [],
        "ryan": ["Anna", "vivian"],
    }


def test_a_model_without_voices_ignores_openais_voices(tmp_path):
    """OpenAI's client must send a voice. With a recording, the voice of the recording is used."""
    with Server(tmp_path, models=[CHANCE]) as server:
        ignored = "voice 'alloy' does not exist; the field is ignored"
        assert reached(server, voice="alloy") == ("cloner", None, ignored)
        recorded = {"ref_audio": base64.b64encode(recording()).decode(), "ref_text": "Hm."}
        instead = "voice 'alloy' does not exist; the recording is used instead"
        assert reached(server, voice="alloy", **recorded) == ("cloner", None, instead)
        upload(server, "alloy").raise_for_status()
        assert reached(server, voice="alloy")[2] is None  # the uploaded voice is a real name


def test_a_warning_is_a_valid_header_for_any_model_name(tmp_path):
    odd = msgspec.structs.replace(MODEL, id="größe\n", voices=["Zoë"])
    with Server(tmp_path, models=[odd]) as server:
        warning = reached(server, model="tts-1", voice="alloy")[2]
    assert "'gr\\xf6\\xdfe\\n' is used" in warning and "'Zo\\xeb' is used" in warning


def test_a_model_with_an_openai_name_is_used_without_a_warning(tmp_path):
    named = msgspec.structs.replace(MODEL, id="tts-1", voices=["alloy", "ryan"])
    with Server(tmp_path, models=[named]) as server:
        assert reached(server, model="tts-1", voice="alloy") == ("tts-1", "alloy", None)


@pytest.mark.parametrize("model", ["gpt-4o-mini-tts", "tts-1"])
def test_openais_instructions_are_dropped_if_the_model_takes_none(server, model):
    answer = server.speak("frames 1", model=model, instructions="Cheerfully.")
    assert answer.status_code == 200
    assert "model 'fake' takes no instructions; the field is ignored" in answer.headers["x-warning"]
    assert "instructions" not in server.engine.asked[answer.headers["x-request-id"]]


def test_instructions_reach_the_model_that_was_named(server, tmp_path):
    """The model refuses them if it takes none."""
    for fields in ({"model": "fake"}, {}):
        answer = server.speak("frames 1", instructions="Cheerfully.", **fields)
        assert server.engine.asked[answer.headers["x-request-id"]]["instructions"] == "Cheerfully."
    follower = msgspec.structs.replace(MODEL, modes=["voice", "instruct"])
    with Server(tmp_path, models=[follower]) as server:
        answer = server.speak("frames 1", model="tts-1", instructions="Cheerfully.")
        assert server.engine.asked[answer.headers["x-request-id"]]["instructions"] == "Cheerfully."
        assert "instructions" not in answer.headers["x-warning"]


def test_a_strict_server_keeps_instructions_for_the_model_to_refuse(tmp_path):
    with Server(tmp_path, names=Names({"tts-1": "fake"}, {}, is_strict=True)) as server:
        answer = server.speak("frames 1", model="tts-1", instructions="Cheerfully.")
        assert server.engine.asked[answer.headers["x-request-id"]]["instructions"] == "Cheerfully."


FOREIGN = {"non_streaming_mode": True, "stage_params": {"0": {}}, "initial_codec_chunk_frames": 4}


def test_fields_of_other_servers_are_ignored_with_a_warning(server):
    answer = server.speak("frames 1", **FOREIGN)
    assert answer.status_code == 200, answer.text
    warning = answer.headers["x-warning"]
    assert all(f"field '{name}' has no meaning here; it is ignored" in warning for name in FOREIGN)
    assert "options" not in server.engine.asked[answer.headers["x-request-id"]]
    answer = server.http.post("/v1/audio/speech/batch", json={"items": [{"input": "frames 1"}], **FOREIGN})
    [item] = answer.json()["data"]
    assert item["error"] is None and item["warning"] == warning


def test_a_strict_server_refuses_fields_of_other_servers(strict):
    fault = error(strict.speak("frames 1", token_count=5), 400)
    assert (fault["code"], fault["param"]) == ("unknown_field", "token_count")


def test_a_voice_of_vllms_client_is_uploaded_with_its_description(tmp_path):
    with Server(tmp_path, models=[CLONER]) as server:
        answer = upload(server, speaker_description="a calm voice")
        assert answer.status_code == 200, answer.text


def test_a_reference_may_be_an_audio_path_as_sglangs_clients_send_it(tmp_path):
    url = "data:audio/wav;base64," + base64.b64encode(recording()).decode()
    with Server(tmp_path, models=[CLONER]) as server:
        answer = server.speak("frames 1", references=[{"audio_path": url, "text": "Hm."}])
        assert answer.status_code == 200, answer.text
        [reference] = server.engine.messages[answer.headers["x-request-id"]].references
        assert reference.transcript == "Hm."


@pytest.mark.parametrize("voice", [None, "", "default"])
def test_a_request_without_a_voice_has_the_default_voice(server, several, tmp_path, voice):
    assert reached(server, voice=voice) == ("fake", None, None)  # the model's first voice
    assert reached(several, voice=voice)[1] is None
    with Server(tmp_path, names=Names({}, {"default": "ryan"})) as server:
        assert reached(server, voice=voice) == ("fake", "ryan", None)
        assert reached(server, voice="vivian") == ("fake", "vivian", None)


def test_a_recording_takes_precedence_over_the_default_voice(tmp_path):
    names = Names({}, {"default": "anna"})
    with Server(tmp_path, models=[CLONER], names=names) as server:
        upload(server, "anna")
        recorded = {"ref_audio": base64.b64encode(recording()).decode()}
        assert reached(server, **recorded)[1] is None and reached(server, **recorded, voice="")[1] is None
        answer = server.speak("frames 1")  # the uploaded voice
        [reference] = server.engine.messages[answer.headers["x-request-id"]].references
        assert reference.clip.directory.endswith("anna")


def test_a_strict_server_has_no_voice_of_the_name_default(strict):
    assert "no voice 'default'" in error(strict.speak("frames 1", voice="default"), 400)["message"]
