"""Uploaded voices over HTTP, and by `zoo voices` beside a server."""

import io
import json

import msgspec
import numpy as np
import pytest
import soundfile
from fake_engine import CLONER, MODEL, frame
from http_server import Server, error
from shell import zoo
from uploads import NOISE, RATE_HZ, recording, stored, upload

from serving.http.voices import Voices
from serving.protocol import AudioClip, Reference
from serving.settings import Limits
from serving.voice_file import StoredVoice

# Voices over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(reference_bytes=400_000, reference_s=20, voices=3)
    with Server(tmp_path_factory.mktemp("s"), models=[CLONER, MODEL], limits=limits) as server:
        yield server


@pytest.fixture(autouse=True)
def forget(request):
    """Delete all uploaded voices before each test."""
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for voice in uploaded(server):
            assert server.http.delete(f"/v1/audio/voices/{voice['id']}").status_code == 200


def uploaded(server):
    return [
        voice
        for voice in server.http.get("/v1/audio/voices").json()["data"]
        if voice["type"] == "audio_sample"
    ]


def test_a_voice_is_uploaded_listed_used_and_deleted(server):
    answer = upload(server, "Anna", ref_text="What I say.", consent="yes")
    assert answer.status_code == 200, answer.text
    voice = answer.json()
    assert voice.pop("created_at") > 1.7e9
    assert voice == {
        "id": "anna",
        "name": "anna",
        "type": "audio_sample",
        "models": ["cloner"],
        "duration_s": 2.0,
        "ref_text": "What I say.",
        "damaged": False,
        "aliases": [],
        "object": "audio.voice",
    }
    voices = server.http.get("/v1/audio/voices").json()["data"]
    assert [(voice["id"], voice["type"], voice["models"]) for voice in voices] == [
        ("vivian", "preset", ["fake"]),
        ("ryan", "preset", ["fake"]),
        ("anna", "audio_sample", ["cloner"]),
    ]
    for named in ("anna", "ANNA", {"id": "anna"}):
        answer = server.speak("frames 1", voice=named)
        id = answer.headers["x-request-id"]
        assert answer.content[44:] == frame(0)
        assert server.engine.messages[id].references == [
            Reference(stored(server.voices_dir / "anna"), "What I say.")
        ]
        assert server.engine.asked[id] | {"seed": 0} == {"text": "frames 1", "seed": 0}
    gone = server.http.delete("/v1/audio/voices/Anna")
    assert gone.json() == {"id": "anna", "deleted": True, "object": "audio.voice.deleted"}
    assert error(server.http.delete("/v1/audio/voices/anna"), 404)["code"] == "voice_not_found"
    assert "no voice 'anna'" in error(server.speak("frames 1", voice="anna"), 400)["message"]


def test_a_voice_without_a_text_gives_only_its_sound(server):
    upload(server, "anna")
    upload(server, "bert", ref_text="What I say.")

    def spoken_with(**fields):
        message = server.engine.messages[server.speak("frames 1", **fields).headers["x-request-id"]]
        return message.references[0].transcript, message.request.options or None

    assert spoken_with(voice="anna") == (None, {"x_vector_only_mode": True})
    # The real engine refuses this one.
    assert spoken_with(voice="anna", x_vector_only_mode=False) == (None, {"x_vector_only_mode": False})
    assert spoken_with(voice="bert") == ("What I say.", None)
    assert spoken_with(voice="bert", x_vector_only_mode=True) == ("What I say.", {"x_vector_only_mode": True})


def test_a_model_without_the_sound_only_option_gets_the_voice_unchanged(tmp_path):
    plain = msgspec.structs.replace(CLONER, options=[])
    with Server(tmp_path, models=[plain]) as server:
        upload(server)
        answer = server.speak("frames 1", voice="anna")
        message = server.engine.messages[answer.headers["x-request-id"]]
    assert (
        message.references == [Reference(stored(server.voices_dir / "anna"))] and not message.request.options
    ) or None


def test_a_voice_of_the_wrong_length_is_refused_for_that_model(tmp_path):
    short = msgspec.structs.replace(CLONER, id="short", reference_s=(0.1, 1.5))
    with Server(tmp_path, models=[CLONER, short]) as server:
        assert upload(server).status_code == 200
        assert server.speak("frames 1", model="cloner", voice="anna").status_code == 200
        fault = error(server.speak("frames 1", model="short", voice="anna"), 400)
    assert fault["param"] == "voice" and "it lasts 2 s; it must last 0.1 to 1.5 s" in fault["message"]


def test_models_of_a_voice_are_those_that_can_use_it(tmp_path):
    short = msgspec.structs.replace(CLONER, id="short", reference_s=(0.1, 1.5))
    reader = msgspec.structs.replace(CLONER, id="reader", needs_transcript=True)
    with Server(tmp_path, models=[CLONER, short, reader, MODEL]) as server:
        assert upload(server, "anna").json()["models"] == ["cloner"]
        assert upload(server, "bert", ref_text="What I say.").json()["models"] == ["cloner", "reader"]
        assert [voice["models"] for voice in uploaded(server)] == [["cloner"], ["cloner", "reader"]]
        fault = error(server.speak("frames 1", model="reader", voice="anna"), 400)
    assert fault["param"] == "voice" and "upload it again with ref_text" in fault["message"]


def test_models_that_need_the_words_get_no_voice_without_them(tmp_path):
    reader = msgspec.structs.replace(CLONER, id="reader", needs_transcript=True)
    with Server(tmp_path, models=[reader, MODEL]) as server:
        fault = error(upload(server, ref_text=" "), 400)
        assert fault["param"] == "ref_text" and "'reader' cannot clone a recording" in fault["message"]
        assert uploaded(server) == [] and upload(server, ref_text="What I say.").status_code == 200


def test_rejections_of_a_stored_voice_name_the_field_voice(server):
    upload(server)
    for param in ("references", "transcript", "voice"):
        assert error(server.speak(f"reject {param}", voice="anna"), 400)["param"] == "voice"


def test_voices_survive_a_restart(tmp_path):
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
    with Server(tmp_path / "first", models=[CLONER], voices_dir=tmp_path / "voices") as first:
        upload(first)
    with Server(tmp_path / "second", models=[CLONER], voices_dir=tmp_path / "voices") as second:
        assert [voice["id"] for voice in uploaded(second)] == ["anna"]
        answer = second.speak("frames 1", voice="anna")
        assert second.engine.messages[answer.headers["x-request-id"]].references == [
            Reference(stored(tmp_path / "voices" / "anna"))
        ]


def test_a_request_continues_when_its_voice_is_deleted(server):
    upload(server)
    server.call(server.engine.go.clear)
    with server.stream("frames 2", voice="anna") as answer:
        chunks = answer.iter_raw()
        heard = next(chunks)
        assert server.http.delete("/v1/audio/voices/anna").status_code == 200
        server.call(server.engine.go.set)
        assert (heard + b"".join(chunks))[44:] == frame(0) + frame(1)


@pytest.mark.parametrize("name", ["../anna", "a/b", "..", " ", "-x"])
def test_a_name_with_path_characters_is_refused(server, name):
    assert error(upload(server, name), 400)["param"] == "name"
    assert error(server.speak("frames 1", voice=name), 400)["param"] == "voice"


@pytest.mark.parametrize("path", ["..%2Fanna", "%2e%2e", "..%2f..%2fetc", "%2Fetc%2Fpasswd"])
def test_a_path_cannot_be_deleted(server, path):
    upload(server)
    answer = server.http.delete("/v1/audio/voices/" + path)
    assert answer.status_code in (404, 405), answer.text
    assert [voice["id"] for voice in uploaded(server)] == ["anna"]


SAMPLES = {
    "no audio": (b"Good morning.", "format is not supported"),
    "silence": (recording(np.zeros(RATE_HZ)), "silent"),
    "nine channels": (recording(np.tile(NOISE[:1000, None], 9)), "9 channels"),
    "1 Hz": (recording(NOISE, rate_hz=1), "sample rate is 1 Hz"),
    "too long": (recording(np.tile(NOISE, 11), subtype="ULAW"), "longer than the maximum of 20 s"),
    "too short": (recording(NOISE[: RATE_HZ // 2]), "lasts 0.5 s; it must last 1 to 20 s"),
}


@pytest.mark.parametrize(("sample", "says"), SAMPLES.values(), ids=SAMPLES)
def test_unusable_samples_are_refused(server, sample, says):
    fault = error(upload(server, sample=sample), 400)
    assert fault["param"] == "audio_sample"
    with pytest.raises(ValueError, match=says):
        raise ValueError(fault["message"])
    assert uploaded(server) == []


def test_an_upload_over_the_size_limit_is_a_413(server):
    fault = error(upload(server, sample=bytes(400_001)), 413)
    assert fault["code"] == "body_too_large" and "up to 400000" in fault["message"]
    assert error(upload(server, sample=bytes(2_000_000)), 413)["code"] == "body_too_large"


def test_uploads_over_the_limit_of_voices_are_refused(server):
    *kept, refused = [upload(server, f"voice-{index}") for index in range(4)]
    assert {answer.status_code for answer in kept} == {200}
    fault = error(refused, 400)
    assert (fault["param"], fault["code"]) == (
        None,
        "too_many_voices",
    ) and "limit of stored voices (3)" in fault["message"]


def test_a_taken_name_is_a_409(server):
    upload(server)
    assert error(upload(server, "ANNA"), 409)["code"] == "voice_exists"
    assert error(upload(server, "Vivian"), 409)["code"] == "voice_exists"  # a voice of the model
    assert "not an uploaded one" in error(server.http.delete("/v1/audio/voices/vivian"), 400)["message"]


FORMS = [
    ({"files": {"name": (None, "x")}}, "audio_sample", "audio_sample is missing: a file"),
    # URL-encoded instead of multipart
    (
        {"data": {"name": "x"}},
        None,
        "must be a form (multipart/form-data) with the fields name, audio_sample",
    ),
    ({"json": {"name": "x"}}, None, "must be a form"),
    (
        {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}},
        None,
        "must be a form",
    ),
    ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, "name", "name is missing"),
    ({"files": {"audio_sample": b"x"}}, "name", "name is missing"),
    (
        {"data": {"name": "x", "audio_sample": "text"}, "files": {"y": b""}},
        "audio_sample",
        "audio_sample takes a file",
    ),
    (
        {"data": {"name": "x", "colour": "red"}, "files": {"audio_sample": b"x"}},
        "colour",
        "the fields are: name, audio_sample",
    ),
    (
        {"data": {"name": "x", "type": "prompt"}, "files": {"audio_sample": b"x"}},
        "type",
        "type takes audio_sample",
    ),
    ({"data": {"name": ["x", "y"]}, "files": {"audio_sample": b"x"}}, "name", "name is given more than once"),
    ({"files": {"name": b"x", "audio_sample": b"x"}}, "name", "name is a file, not a text; name takes"),
    (
        {"data": {"name": "x", "audio_sample": "x"}, "files": {"ref_text": (None, "x")}},
        "audio_sample",
        "audio_sample is a text, not a file",
    ),
    (
        {"data": {"name": "x"}, "files": [("audio_sample", b"x"), ("audio_sample", b"y")]},
        "audio_sample",
        "audio_sample is given more than once",
    ),
    ({"files": [("name", (None, "x"))] * 2000}, None, "has too many parts"),
    ({"files": {"name": (None, b"\xff\xfe"), "audio_sample": b"x"}}, None, "UTF-8"),
    ({"files": {"name": (None, b"x", "text/plain; charset=none"), "audio_sample": b"x"}}, None, "UTF-8"),
]


@pytest.mark.parametrize(("form", "param", "says"), FORMS)
def test_invalid_forms_are_refused(server, form, param, says):
    fault = error(server.http.post("/v1/audio/voices", **form), 400)
    assert says in fault["message"] and (param is None or fault["param"] == param)


def test_without_a_model_for_references_uploads_are_refused(tmp_path):
    Voices(tmp_path / "voices").add("anna", AudioClip(NOISE.tobytes(), RATE_HZ))
    with Server(tmp_path) as server:
        assert "no served model takes reference audio" in error(upload(server, "bert"), 400)["message"]
        [*_, anna] = server.http.get("/v1/audio/voices").json()["data"]
        assert (anna["id"], anna["models"]) == ("anna", [])
        assert (
            "takes none; available voices: vivian, ryan"
            in error(server.speak("frames 1", voice="anna"), 400)["message"]
        )


def renamed(server, voice, name):
    return server.http.patch(f"/v1/audio/voices/{voice}", json={"name": name})


def test_a_voice_can_be_renamed_over_http(server):
    before = upload(server, "anna", ref_text="What I say.").json()
    assert renamed(server, "Anna", "Clara").json() == before | {"id": "clara", "name": "clara"}
    assert [voice["id"] for voice in uploaded(server)] == ["clara"]
    assert server.speak("frames 1", voice="clara").status_code == 200
    assert error(renamed(server, "anna", "dora"), 404)["code"] == "voice_not_found"
    assert error(renamed(server, "clara", "vivian"), 409)["code"] == "voice_exists"
    assert error(renamed(server, "clara", "a/b"), 400)["param"] == "name"
    assert error(renamed(server, "clara", "default"), 400)["param"] == "name"
    assert "not an uploaded one" in error(renamed(server, "vivian", "x"), 400)["message"]
    upload(server, "bert")
    assert error(renamed(server, "clara", "bert"), 409)["param"] == "name"
    assert error(server.http.patch("/v1/audio/voices/clara", json={}), 400)["param"] == "name"


def test_the_preview_returns_the_recording(server):
    upload(server, "anna")
    answer = server.http.get("/v1/audio/voices/Anna/preview")
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/wav"
    samples, rate_hz = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate_hz == RATE_HZ and np.abs(samples - NOISE).max() <= 1 / 2**15
    path = "/v1/audio/voices/{}/preview"
    assert error(server.http.get(path.format("bert")), 404)["code"] == "voice_not_found"
    assert "of the model" in error(server.http.get(path.format("vivian")), 400)["message"]


@pytest.mark.parametrize("how", ["renamed", "heard"])
def test_a_damaged_voice_has_no_preview_and_cannot_be_renamed(server, how):
    upload(server, "anna")
    (server.voices_dir / "anna" / "voice.safetensors").write_bytes(b"x")
    path = "/v1/audio/voices/anna"
    answer = renamed(server, "anna", "b") if how == "renamed" else server.http.get(f"{path}/preview")
    assert error(answer, 400)["code"] == "voice_damaged"
    assert server.http.delete(path).status_code == 200


# The command `zoo voices`


def test_the_command_and_the_server_share_a_store(server, tmp_path):
    sample = tmp_path / "anna.wav"
    sample.write_bytes(recording())
    there = ("--voices-dir", server.voices_dir)
    assert zoo("voices", "add", "Anna", sample, "--text", "What I say.", *there).stdout == "anna: 2.00 s\n"
    assert [voice["id"] for voice in uploaded(server)] == ["anna"]
    assert zoo("voices", "list", *there).stdout == "anna: 2.00 s, What I say.\n"
    [voice] = json.loads(zoo("voices", "list", "--json", *there).stdout)["voices"]
    assert msgspec.convert(voice, StoredVoice).name == "anna"
    assert zoo("voices", "rename", "anna", "Bert", *there).stdout == "bert: 2.00 s\n"
    assert zoo("voices", "remove", "bert", *there).returncode == 0 and uploaded(server) == []


@pytest.mark.parametrize("field", ["name", "ref_text", "consent"])
def test_an_overlong_text_is_refused_with_its_field(tmp_path, field):
    with Server(tmp_path, models=[CLONER]) as server:
        fault = error(upload(server, **{"name": "anna", field: "x" * 5000}), 400)
        assert fault["param"] == field and len(fault["message"]) < 500
        assert server.http.get("/v1/audio/voices").json()["data"] == []
