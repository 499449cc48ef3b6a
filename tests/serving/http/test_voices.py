"""Uploaded voices: the store on disk, the routes, and the command `zoo voices`."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from fake_engine import CLONER
from http_server import Server, error
from shell import ROOT, zoo
from uploads import NOISE, RATE_HZ, recording, stored, upload

from serving import voice_file
from serving.http.voices import Taken, TooMany, Voices, default_directory, is_at
from serving.protocol import AudioClip
from serving.voice_file import Damaged, StoredVoice
from zoo import request
from zoo.request import recording_name
from zoo.voices.encoded_files import EncodedFiles

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


def test_the_name_of_the_default_voice_is_refused(store):
    store.add("anna", CLIP)
    with pytest.raises(ValueError, match="--alias-voice default=NAME"):
        store.add("Default", CLIP)
    with pytest.raises(ValueError, match="--alias-voice default=NAME"):
        store.rename("anna", "default")
    assert store.names() == ["anna"]


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


def test_a_copied_directory_is_a_voice_of_its_name(store):
    kept = store.add("anna", CLIP)
    shutil.copytree(store.directory / "anna", store.directory / "bert")
    copy = msgspec.structs.replace(kept, name="bert")
    assert store.list() == [kept, copy] and store.load("bert") == (copy, CLIP)
    voice, clip = store.find("bert")
    assert voice == copy and clip.directory == str(store.directory / "bert")


@pytest.mark.parametrize("name", ["lost+found", "Upper", "two words", os.fsdecode(b"not utf-8 \xff")])
def test_a_directory_with_an_invalid_name_is_not_a_voice(store, name):
    store.add("anna", CLIP)
    shutil.copytree(store.directory / "anna", store.directory / name)
    assert store.names() == ["anna"] and store.survey()[1] == []


def test_a_directory_with_other_files_is_never_touched(store, tmp_path):
    """The operator may have chosen a home directory by mistake."""
    own = store.directory / "letters" / "draft.txt"
    own.parent.mkdir(parents=True)
    own.write_text("Dear Bert")
    assert store.survey() == ([], []) and not store.has("letters") and store.load("letters") is None
    assert not store.remove("letters") and store.rename("letters", "mail") is None
    with pytest.raises(
        Taken, match="'letters' cannot be the name of a voice: other files are stored under that name"
    ):
        store.add("letters", CLIP)
    store.add("anna", CLIP)
    with pytest.raises(Taken, match="other files are stored under that name"):
        store.rename("anna", "letters")
    (store.directory / ".old-letters").mkdir()
    (store.directory / ".old-letters" / "draft.txt").write_text("Dear Anna")
    store.tidy()
    assert (store.directory / ".old-letters" / "draft.txt").exists()
    assert own.read_text() == "Dear Bert" and store.names() == ["anna"]


def test_a_damaged_voice_with_encodings_can_be_replaced(store):
    store.add("bert", CLIP)
    clip = request.AudioClip(NOISE, RATE_HZ, kept_in=store.directory / "bert")
    encoded = EncodedFiles("qwen3_tts", "3f7a91c04be2d856").of(clip, bytes(16), lambda found: found)
    encoded.path.write_bytes(b"codes")
    damage(store, "none")
    assert store.survey()[1] == ["bert"] and store.add("bert", CLIP).name == "bert"
    assert os.listdir(store.directory / "bert") == ["voice.safetensors"]


@pytest.mark.parametrize("what", ["directory", "file"])
def test_a_voice_of_another_user_does_not_hide_the_others(store, monkeypatch, what):
    def refuse(path, *arguments, **more):
        name = "voice.safetensors" if what == "file" else store.directory / "bert"
        if path == name and (what == "directory" or is_at(more["dir_fd"], store.directory / "bert")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really(path, *arguments, **more)

    for name in ("anna", "bert"):
        store.add(name, CLIP)
    really = os.open
    monkeypatch.setattr(os, "open", refuse)
    whole, damaged = store.survey()
    assert [voice.name for voice in whole] == ["anna"] and damaged == ["bert"]
    with pytest.raises(Damaged, match="'bert' is damaged"):
        store.find("bert")


def test_a_new_voice_reads_no_other_one(store, capsys):
    store.add("anna", CLIP)
    (store.directory / "anna" / "voice.safetensors").write_bytes(b"x")
    store.add("bert", CLIP)
    assert "anna is damaged" not in capsys.readouterr().out


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


def test_a_voice_can_be_renamed_on_a_full_disk(store, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = store.add("anna", CLIP)
    monkeypatch.setattr(os, "mkdir", fail)
    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    assert store.rename("anna", "bert") == msgspec.structs.replace(kept, name="bert")
    assert store.load("bert")[1] == CLIP and store.names() == ["bert"]


def test_a_voice_that_is_renamed_elsewhere_at_the_same_moment_is_not_found(store, monkeypatch):
    store.add("anna", CLIP)
    load = store.load
    monkeypatch.setattr(
        store, "load", lambda name: (load(name), store._move(store.directory / name, "clara"))[0]
    )
    assert store.rename("anna", "bert") is None and store.names() == ["clara"]


def test_a_full_store_can_rename(store):
    for name in "abcde":
        store.add(name, CLIP)
    assert store.rename("a", "f") is not None and store.names() == ["b", "c", "d", "e", "f"]


def test_a_damaged_voice_leaves_the_json_of_the_command_readable(store):
    for name in ("anna", "bert"):
        store.add(name, CLIP)
    damage(store, "half")
    done = zoo("voices", "list", "--json", "--voices-dir", store.directory)
    found = json.loads(done.stdout)
    assert [voice["name"] for voice in found["voices"]] == ["anna"] and found["damaged"] == ["bert"]
    assert "bert is damaged: voice.safetensors has" in done.stderr


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
