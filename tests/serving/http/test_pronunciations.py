"""Pronunciations over HTTP and the WebSocket, with a fake engine."""

import errno
import json
import os

import pytest
from fake_engine import FEEDER, MODEL
from http_server import Server, error
from sessions import spoken

from serving.http.pronunciations import Dictionary
from serving.settings import Limits

SHARED = [{"term": "once", "say": "one"}, {"term": "twice", "say": "two", "voice": "ryan"}]
OWN = [{"term": "twice", "say": "too"}]
TOO_MANY = [{"term": "a", "say": "b"}] * 1001


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "words.json"
    path.write_text(json.dumps(SHARED))
    options = {"limits": Limits(text_chars=100), "pronunciations": str(path)}
    with Server(path.parent, models=[MODEL, FEEDER], **options) as server:
        yield server


def asked(server):
    return list(server.engine.asked.values())[-1]["text"]


@pytest.mark.parametrize(
    "fields", [{}, {"stream": False}, {"stream_format": "sse"}, {"text_format": "markdown"}], ids=str
)
def test_the_entries_of_the_server_and_of_the_request_are_read(server, fields):
    server.speak("frames 1 Once, twice", **fields)
    assert asked(server) == "frames 1 one, twice"
    server.speak("frames 1 twice", pronunciations=OWN, **fields)
    assert asked(server) == "frames 1 too"
    server.speak("frames 1 twice", voice="ryan", **fields)
    assert asked(server) == "frames 1 two"


def test_each_item_of_a_batch_has_its_own(server):
    items = [{"input": "frames 1 twice", "pronunciations": OWN}]
    server.http.post("/v1/audio/speech/batch", json={"model": "fake", "items": items})
    assert asked(server) == "frames 1 too"


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text_format", ["plain", "markdown"])
def test_a_session_replaces_terms_however_the_text_arrives(server, size, text_format):
    text = "frames 1 *twice*. [pause:1ms] frames 2 Once"
    spoken(server, text, size, pronunciations=OWN, text_format=text_format)
    said = [one["text"].replace("*", "") for one in list(server.engine.asked.values())[-2:]]
    assert said == ["frames 1 too.", "frames 2 one"]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_fed_text_is_replaced_too(server, size):
    words = [{"term": "it is", "say": "one two three"}]
    spoken(server, "so it is. Once it isn't it", size, model="feeder", pronunciations=words)
    fed = "".join(list(server.engine.fed.values())[-1])
    assert fed == "so one two three. one it isn't it"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("a: b", "expected `array | null`"),
        ([{"term": "a"}], "missing required field `say`"),
        ([{"term": "", "say": "b"}], "length >= 1"),
        ([{"term": "a", "say": "b", "ipa": "c"}], "unknown field `ipa`"),
        (TOO_MANY, "length <= 1000"),
        ([{"term": "a", "say": "b" * 101}], "the text has 101 characters with its pronunciations"),
    ],
)
def test_wrong_pronunciations_are_refused(server, words, says):
    fault = error(server.speak("a", pronunciations=words), 400)
    assert fault["param"] == "pronunciations" and says in fault["message"]


PATH = "/v1/audio/pronunciations"


@pytest.fixture
def uploaded(server):
    """uploaded(entries) replaces the uploaded list, which is empty afterwards."""

    def uploaded(entries):
        answer = server.http.put(PATH, json={"pronunciations": entries})
        assert answer.status_code == 200 and answer.json() == {"pronunciations": entries}
        assert server.http.get(PATH).json() == {"pronunciations": entries}

    yield uploaded
    uploaded([])


def test_an_uploaded_list_wins_over_the_file_and_a_request_over_both(server, uploaded):
    uploaded([{"term": "once", "say": "wunce"}, {"term": "Zoo", "say": "zoe", "voice": "vivian"}])
    server.speak("frames 1 once Zoo")
    assert asked(server) == "frames 1 wunce zoe"
    server.speak("frames 1 twice Zoo", voice="ryan")
    assert asked(server) == "frames 1 two Zoo"
    server.speak("frames 1 once", pronunciations=[{"term": "once", "say": "1"}])
    assert asked(server) == "frames 1 1"
    uploaded([])
    server.speak("frames 1 once")
    assert asked(server) == "frames 1 one"


def test_an_uploaded_list_holds_for_sessions_and_stays_after_a_restart(server, uploaded):
    uploaded([{"term": "once", "say": "wunce"}])
    spoken(server, "frames 1 once more.")
    assert asked(server) == "frames 1 wunce more."
    again = Dictionary(server.voices_dir)
    assert [entry.say for entry in again.entries] == ["wunce"]
    assert not server.http.get("/v1/audio/voices").json()["data"][2:]  # it is no voice


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"pronunciations": [{"term": ""}]}, "pronunciations"),
        ({"pronunciations": [{"say": "b"}]}, "pronunciations"),
        ({"pronunciations": [{"term": "a", "say": "b", "how": "c"}]}, "pronunciations"),
        ({}, "pronunciations"),
    ],
)
def test_a_list_that_is_wrong_is_refused_and_changes_nothing(server, uploaded, body, says):
    uploaded(OWN)
    assert says in error(server.http.put(PATH, json=body), 400)["message"]
    assert server.http.get(PATH).json() == {"pronunciations": OWN}


def test_a_full_disk_changes_nothing(server, uploaded, monkeypatch):
    uploaded(OWN)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    error(server.http.put(PATH, json={"pronunciations": SHARED}), 507)
    monkeypatch.undo()
    assert server.http.get(PATH).json() == {"pronunciations": OWN}
    assert [path.name for path in server.voices_dir.iterdir()] == [".pronunciations.json"]


def test_a_damaged_file_is_not_read(tmp_path):
    (tmp_path / ".pronunciations.json").write_text("[")
    assert Dictionary(tmp_path).entries == []
