"""Uploaded voices: the store on disk, the routes, and the command `zoo voices`."""

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import soundfile
from fake_engine import CLONER, MODEL, frame
from http_server import Server, error
from shell import ROOT, zoo
from uploads import NOISE, RATE_HZ, recording, stored, upload

from serving import voice_file
from serving.http.schemas import Limits
from serving.http.voices import Taken, TooMany, Voices, default_directory
from serving.protocol import AudioClip, Reference
from serving.voice_file import Damaged, StoredVoice
from zoo.request import recording_name

CLIP = AudioClip(NOISE.tobytes(), RATE_HZ)


@pytest.fixture
def store(tmp_path):
    return Voices(tmp_path / "voices", max_voices=5)


def test_a_stored_voice_is_loaded_unchanged(store):
    kept = store.add("Anna", CLIP, " What I say. ", "she signed")
    assert (kept.name, kept.ref_text, kept.consent, kept.duration_s) == (
        "anna",
        "What I say.",
        "she signed",
        2.0,
    )
    again = Voices(store.directory)  # as another process sees it
    assert again.list() == [kept] and again.names() == ["anna"]
    assert again.has("ANNA") and again.load("aNNa") == (kept, CLIP)
    assert again.remove("Anna") and not again.remove("anna")
    assert again.list() == [] and again.load("anna") is None and not again.has("anna")
    assert os.listdir(store.directory) == []


def test_an_unused_store_is_empty_and_makes_no_directory(store):
    assert store.list() == store.names() == [] and not store.has("anna") and not store.remove("anna")
    assert not store.directory.exists()


BAD_NAMES = [
    "",
    ".",
    "..",
    "../anna",
    "a/b",
    "/etc/passwd",
    "a\\b",
    ".hidden",
    "-rf",
    "a b",
    "a\0b",
    "a\nb",
    "anna\n",
    "x" * 51,
    "a:b",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_invalid_names_are_refused(store, name):
    with pytest.raises(ValueError, match="not a valid name for a voice"):
        store.add(name, CLIP)
    assert not store.has(name)
    with pytest.raises(ValueError, match="not a valid name for a voice"):
        store.load(name)
    with pytest.raises(ValueError, match="not a valid name for a voice"):
        store.remove(name)
    assert not store.directory.exists()


# Names with vowel signs and other combining marks: Hindi, Tamil, Thai, Arabic and Turkish.
MARKED = ["प्रिया", "தமிழ்", "ปิยะ", "مُحَمَّد", "İpek"]


@pytest.mark.parametrize("name", ["anna", "Anna-2", "anna_2.1", "小明", "Zoë", "x" * 50, "名" * 50, *MARKED])
def test_valid_names_are_accepted(store, name):
    store.add(name, CLIP)
    assert store.has(name) and store.load(name)[1] == CLIP


def test_names_that_look_the_same_are_the_same(store):
    store.add("Zoë", CLIP)
    assert store.has("zoe\u0308")
    with pytest.raises(Taken, match="already exists"):
        store.add("ZOE\u0308", CLIP)


@pytest.mark.parametrize(
    "samples",
    [np.zeros(1000, np.float32), np.full(1000, 1e-4, np.float32), np.full(1000, np.nan, np.float32)],
)
def test_a_silent_sample_is_refused(store, samples):
    with pytest.raises(ValueError, match="silent"):
        store.add("anna", AudioClip(samples.tobytes(), RATE_HZ))
    assert store.names() == []


def test_a_full_store_refuses_new_voices(store):
    for index in range(5):
        store.add(f"voice-{index}", CLIP)
    with pytest.raises(TooMany, match=r"limit of stored voices \(5\) is reached"):
        store.add("one-more", CLIP)
    store.remove("voice-0")
    store.add("one-more", CLIP)


def test_only_one_of_many_writers_gets_the_name(store):
    """A concurrent reader finds all of a voice or nothing."""
    outcomes, seen = [], []
    going = threading.Event()

    def add(index):
        try:
            outcomes.append(
                store.add(
                    "anna",
                    AudioClip(np.full(1000, 0.1 * (index + 1), np.float32).tobytes(), RATE_HZ),
                    str(index),
                )
            )
        except Taken as taken:
            outcomes.append(taken)

    def look():
        while not going.is_set():
            if (found := store.load("anna")) is not None:
                seen.append(
                    (found[0].ref_text, round(float(np.frombuffer(found[1].samples, "<f4")[0]) * 10) - 1)
                )

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(20):
        adding = [threading.Thread(target=add, args=[index]) for index in range(4)]
        [thread.start() for thread in adding]
        [thread.join() for thread in adding]
        assert store.remove("anna")
    going.set()
    looking.join()
    assert sum(isinstance(outcome, StoredVoice) for outcome in outcomes) == 20 and len(outcomes) == 80
    assert all(int(text) == index for text, index in seen)
    assert os.listdir(store.directory) == []


@pytest.mark.parametrize("doing", ["add", "remove"])
def test_directories_of_killed_processes_are_removed(store, doing):
    """The process is killed at the worst moment: while its hidden directory exists."""
    store.add("anna", CLIP)
    last = {"add": "Path.rename", "remove": "shutil.rmtree"}[doing]
    kill = (
        "from pathlib import Path; import os, shutil, signal; "
        f"{last} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"
    )
    work = (
        "add('bert', AudioClip(bytes(2000) + b'\\0\\0\\x80\\x3f', 16000))"
        if doing == "add"
        else "remove('anna')"
    )
    imports = "from serving.http.voices import Voices; from serving.protocol import AudioClip"
    script = f"{kill}; {imports}; Voices({str(store.directory)!r}).{work}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    hidden = [name for name in os.listdir(store.directory) if name != "anna"]
    assert len(hidden) == 1 and hidden[0].startswith(".")
    store.tidy()
    assert os.listdir(store.directory) == (["anna"] if doing == "add" else [])


def test_tidying_does_not_touch_a_voice_that_is_being_added(store):
    store.directory.mkdir()
    with store._new_place() as place:
        Voices(store.directory).tidy()
        assert place.is_dir()
    assert os.listdir(store.directory) == []
    Voices(store.directory / "nowhere").tidy()  # not an error
    assert not (store.directory / "nowhere").exists()


def test_a_server_tidies_the_store_when_it_starts(tmp_path):
    (tmp_path / "voices" / ".new-x").mkdir(parents=True)
    with Server(tmp_path):
        assert os.listdir(tmp_path / "voices") == []


def change(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def damage(store, how):
    path = store.directory / "bert" / "voice.safetensors"
    match how:
        case "none":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(path.read_bytes()[: len(CLIP.samples) // 2])
        case "longer":
            path.write_bytes(path.read_bytes() + bytes(4))
        case "header":
            path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
        case "another version":
            change(path, b'"version":"1"', b'"version":"2"')
        case "no rate":
            change(path, b'"16000"', b'"    0"')
        case "another tensor":
            change(path, b'"samples"', b'"speaker"')
        case "other values":
            change(path, b'"F32"', b'"I32"')


HOW = [
    "none",
    "empty",
    "half",
    "longer",
    "header",
    "another version",
    "no rate",
    "another tensor",
    "other values",
]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_voice_is_reported_and_can_be_replaced(store, capsys, how):
    store.add("anna", CLIP)
    store.add("bert", CLIP)
    damage(store, how)
    assert [voice.name for voice in store.list()] == ["anna"] and store.survey()[1] == ["bert"]
    with pytest.raises(Damaged, match="'bert' is damaged; upload it again"):
        store.load("bert")
    assert "bert is damaged" in capsys.readouterr().out
    store.add("bert", CLIP)
    assert store.load("bert")[1] == CLIP and store.survey()[1] == []
    damage(store, how)
    assert store.remove("bert")


@pytest.mark.parametrize("what", ["a text", "a sample"])
def test_a_modified_voice_is_detected_when_it_is_loaded(store, what):
    """The header looks right, so only loading detects the change."""
    store.add("bert", CLIP, "What I say.")
    path = store.directory / "bert" / "voice.safetensors"
    if what == "a text":
        change(path, b"What I say.", b"What I sai.")
    else:
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    with pytest.raises(Damaged, match="damaged"):
        store.load("bert")


def test_the_stored_file_has_the_documented_format(store):
    voice = store.add("anna", CLIP, "What I say.\nIn two lines.", "she signed")
    assert os.listdir(store.directory / "anna") == ["voice.safetensors"]
    with safetensors.safe_open(store.directory / "anna" / "voice.safetensors", "np") as file:
        assert list(file.keys()) == ["samples"]
        samples, metadata = file.get_tensor("samples"), file.metadata()
    assert samples.dtype == np.float32 and samples.tobytes() == CLIP.samples
    checksum = metadata.pop("blake2b")
    assert metadata == {
        "format": "speechzoo.voice",
        "version": "1",
        "name": "anna",
        "created_at": str(voice.created_at),
        "sample_rate_hz": str(RATE_HZ),
        "ref_text": "What I say.\nIn two lines.",
        "consent": "she signed",
        "recording": recording_name(NOISE, RATE_HZ).hex(),
    }
    lines = "".join(f"{name}={metadata[name]}\n" for name in sorted(metadata))
    assert checksum == hashlib.blake2b(lines.encode() + samples.tobytes(), digest_size=16).hexdigest()


def test_a_voice_is_found_without_its_samples(store, monkeypatch):
    store.add("anna", CLIP)
    path = store.directory / "anna"
    monkeypatch.setattr(store, "_read", None)
    assert store.find("Anna")[1] == stored(path.absolute())


def test_a_voice_of_an_older_version_is_found(store):
    """Its file does not tell the name of its samples."""
    store.add("anna", CLIP)
    path = store.directory / "anna" / "voice.safetensors"
    with safetensors.safe_open(path, "np") as file:
        samples, metadata = file.get_tensor("samples"), file.metadata()
    del metadata["recording"]
    metadata["blake2b"] = voice_file.digest(metadata, samples.tobytes())
    safetensors.numpy.save_file({"samples": samples}, path, metadata)
    assert store.find("anna")[1] == stored(path.parent.absolute())


def test_a_file_written_by_another_program_is_a_voice(store):
    """Other versions of safetensors order and pad the header differently."""
    kept = store.add("anna", CLIP, "What I say.")
    path = store.directory / "anna" / "voice.safetensors"
    with safetensors.safe_open(path, "np") as file:
        samples, metadata = file.get_tensor("samples"), file.metadata()
    entry = {"shape": [len(samples)], "data_offsets": [0, samples.nbytes], "dtype": "F32"}
    header = json.dumps({"samples": entry, "__metadata__": metadata}, indent=2).encode() + b"   "
    path.write_bytes(len(header).to_bytes(8, "little") + header + samples.tobytes())
    assert store.load("anna") == (kept, CLIP) and store.list() == [kept]


def test_encoded_files_move_with_their_voice(store):
    store.add("anna", CLIP)
    encoded = store.directory / "anna" / "family-0011-22.safetensors"
    encoded.write_bytes(b"codes")
    store.rename("anna", "bert")
    assert (store.directory / "bert" / encoded.name).read_bytes() == b"codes" and not encoded.exists()
    assert store.load("bert")[1] == CLIP
    store.remove("bert")
    assert os.listdir(store.directory) == []


def test_a_damaged_voice_is_listed_and_can_be_replaced_over_http(tmp_path):
    with Server(tmp_path, models=[CLONER]) as server:
        upload(server, "bert")
        damage(Voices(server.voices_dir), "empty")
        [voice] = server.http.get("/v1/audio/voices").json()["data"]
        assert voice["id"] == "bert" and voice["damaged"] and voice["models"] == []
        assert error(server.speak("frames 1", voice="bert"), 400)["code"] == "voice_damaged"
        assert upload(server, "bert").status_code == server.speak("frames 1", voice="bert").status_code == 200


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EROFS, 503)])
def test_a_disk_error_is_a_503_or_507(tmp_path, monkeypatch, capfd, number, status):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("serving.http.voices.tempfile.TemporaryFile", fail)
    with Server(tmp_path, models=[CLONER]) as server:
        assert (
            f"voices cannot be stored in {server.voices_dir}: {os.strerror(number)}" in capfd.readouterr().out
        )
        monkeypatch.setattr("serving.http.voices.tempfile.mkdtemp", fail)
        fault = error(upload(server), status)
        assert str(tmp_path) not in fault["message"]
        assert server.http.get("/v1/audio/voices").json()["data"] == []


@pytest.mark.parametrize("what", ["mkdir", "rename"])
def test_a_voice_can_be_removed_from_a_full_disk(store, monkeypatch, what):
    """A full disk has no room for another directory, and may have none for a longer name."""

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.add("anna", CLIP)
    monkeypatch.setattr(os, what, fail)
    assert store.remove("anna") and not os.listdir(store.directory)


def test_a_directory_that_is_not_writable_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Voices(tmp_path / "file" / "voices").add("anna", CLIP)
    sample = tmp_path / "anna.wav"
    sample.write_bytes(recording())
    done = zoo("voices", "add", "anna", sample, "--voices-dir", tmp_path / "file" / "voices")
    assert done.returncode == 2 and "cannot be kept in" in done.stderr


def test_environment_variables_set_the_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("ZOO_VOICES_DIR", raising=False)
    assert default_directory() == tmp_path / "speechzoo" / "voices"
    monkeypatch.setenv("ZOO_VOICES_DIR", str(tmp_path / "elsewhere"))
    assert default_directory() == tmp_path / "elsewhere"


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
    ({"data": {"name": ["x", "y"]}, "files": {"audio_sample": b"x"}}, "name", "name takes"),
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
    Voices(tmp_path / "voices").add("anna", CLIP)
    with Server(tmp_path) as server:
        assert "no served model takes reference audio" in error(upload(server, "bert"), 400)["message"]
        [*_, anna] = server.http.get("/v1/audio/voices").json()["data"]
        assert (anna["id"], anna["models"]) == ("anna", [])
        assert (
            "takes none; available voices: vivian, ryan"
            in error(server.speak("frames 1", voice="anna"), 400)["message"]
        )


# Renaming and previews


def test_a_voice_can_be_renamed(store):
    kept = store.add("anna", CLIP, "What I say.")
    store.add("bert", CLIP)
    renamed = msgspec.structs.replace(kept, name="clara")
    assert store.rename("Anna", "Clara") == renamed and store.load("clara") == (renamed, CLIP)
    assert store.names() == ["bert", "clara"] and store.rename("anna", "dora") is None
    assert store.rename("clara", "CLARA") == renamed
    with pytest.raises(Taken, match="'bert' already exists"):
        store.rename("clara", "bert")
    with pytest.raises(ValueError, match="not a valid name for a voice"):
        store.rename("clara", "../x")
    assert store.names() == ["bert", "clara"] == sorted(os.listdir(store.directory))


def test_a_full_store_can_rename(store):
    for name in "abcde":
        store.add(name, CLIP)
    assert store.rename("a", "f") is not None and store.names() == ["b", "c", "d", "e", "f"]


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


BAD_COMMANDS = [
    (["remove", "anna"], "no voice 'anna'"),
    (["remove", "../x"], "not a valid name for a voice"),
    (["rename", "anna", "bert"], "no voice 'anna'"),
    (["add", "anna", "/no/such.wav"], "cannot be read: No such file"),
    (["add", "anna", __file__], "format is not supported"),
    (["add", "anna"], "Missing argument 'sample'"),
    ([], "Missing command"),
    (["sing"], "No such command 'sing'"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_COMMANDS)
def test_a_wrong_voices_command_prints_one_line(tmp_path, arguments, says):
    done = zoo("voices", *arguments, *(["--voices-dir", tmp_path] if len(arguments) > 1 else []))
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("field", ["name", "ref_text", "consent"])
def test_an_overlong_text_is_refused_with_its_field(tmp_path, field):
    with Server(tmp_path, models=[CLONER]) as server:
        fault = error(upload(server, **{"name": "anna", field: "x" * 5000}), 400)
        assert fault["param"] == field and len(fault["message"]) < 500
        assert server.http.get("/v1/audio/voices").json()["data"] == []


def test_options_of_a_voice_name_every_method(server):
    assert server.http.options("/v1/audio/voices/anna").headers["allow"] == "DELETE, OPTIONS, PATCH"
