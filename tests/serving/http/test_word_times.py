"""Word times over HTTP and in sessions, with a fake engine and an aligner that reads the frames."""

import json
from contextlib import contextmanager

import pytest
from fake_aligner import FRAME, FakeAligner
from fake_engine import FEEDER, MODEL, RATE_HZ
from http_server import Server, error, until
from sessions import PATH, spoken
from websockets.sync.client import connect

from serving.http import session
from serving.settings import Limits


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    models = [MODEL, FEEDER]
    with Server(tmp_path_factory.mktemp("w"), models=models, limits=Limits(memory_bytes=1 << 20)) as server:
        yield server


@pytest.fixture
def server(running):
    running.app.state.server.aligner = FakeAligner()
    yield running
    memory = running.app.state.server.memory
    until(lambda: memory.num_held == 0)


def events_of(answer):
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def aligner_of(server):
    return server.app.state.server.aligner


def events(answer):
    return [event for event in events_of(answer) if event["type"] != "speech.audio.delta"]


def words(event):
    return [(each["word"], each["start_s"], each["end_s"], each["aligned"]) for each in event["words"]]


ASKED = {"stream_format": "sse", "timestamp_granularities": ["word"], "response_format": "pcm"}


@pytest.mark.parametrize(("speed", "unit_s"), [(1, 1 / 240), (2, 1 / 480)])
def test_words_follow_the_audio_of_their_piece(server, speed, unit_s):
    answer = server.speak("pieces 2", **ASKED, speed=speed)
    told = [event for event in events(answer) if event["type"] == "speech.audio.words"]
    half_s = unit_s / 2
    times = [[("piece", 0, half_s, True), ("0", half_s, unit_s, False)]]
    times += [[("piece", unit_s, 3 * half_s, True), ("1", 3 * half_s, 2 * unit_s, False)]]
    for event, expected in zip(told, times, strict=True):
        found = words(event)
        assert [each[0] for each in found] == [each[0] for each in expected]
        assert [each[1:3] for each in found] == [pytest.approx(each[1:3], abs=1e-6) for each in expected]
        assert [each[3] for each in found] == [each[3] for each in expected]
    kinds = [event["type"] for event in events(answer)]
    assert kinds[-1] == "speech.audio.done" and "speech.audio.segment" not in kinds
    assert [piece.text for piece in aligner_of(server).pieces] == ["piece 0", "piece 1"]
    assert all(len(piece.pcm) == 2 * FRAME for piece in aligner_of(server).pieces)


def test_both_granularities_can_be_had(server):
    kinds = [
        event["type"]
        for event in events(
            server.speak("pieces 1", **ASKED | {"timestamp_granularities": ["word", "segment"]})
        )
    ]
    assert {"speech.audio.segment", "speech.audio.words"} <= set(kinds)


def test_a_text_without_pieces_is_aligned_as_a_whole(server):
    [event] = [each for each in events(server.speak("frames 3", **ASKED)) if "words" in each]
    assert [each["word"] for each in event["words"]] == ["frames", "3"]
    assert event["words"][-1]["end_s"] == pytest.approx(3 * FRAME / 24000, abs=1e-6)


def test_audio_does_not_wait_for_words(server):
    aligner_of(server).delay_s = 0.3
    kinds = [event["type"] for event in events_of(server.speak("pieces 2", **ASKED))]
    assert kinds[-3:] == ["speech.audio.words", "speech.audio.words", "speech.audio.done"]
    assert kinds.count("speech.audio.delta") == 2 and "speech.audio.words" not in kinds[:-3]


def test_a_server_without_an_aligner_says_so(server):
    server.app.state.server.aligner = None
    fault = error(server.speak("pieces 1", **ASKED), 400)
    assert fault["code"] == "no_aligner" and "--aligner DIR" in fault["message"]
    models = server.http.get("/v1/models").json()["data"]
    assert models[0]["timestamp_granularities"] == ["segment"]
    server.app.state.server.aligner = FakeAligner()
    assert server.http.get("/v1/models").json()["data"][0]["timestamp_granularities"] == ["segment", "word"]


def test_an_aligner_that_cannot_be_loaded_refuses_before_anything_is_spoken(server):
    aligner_of(server).fault = "aligner /a lacks 3 tensors"
    fault = error(server.speak("pieces 1", **ASKED), 503)
    assert fault["code"] == "aligner_failed" and "lacks 3 tensors" in fault["message"]


def test_an_aligner_that_fails_ends_the_answer_with_an_error(server):
    aligner_of(server).broken = "the aligner has ended"
    last = events(server.speak("pieces 2", **ASKED))[-1]
    assert last["type"] == "error" and last["error"]["code"] == "aligner_failed"


def test_audio_that_waits_for_the_aligner_is_bounded(server):
    last = events(server.speak("flood 3", **ASKED))[-1]
    assert last["type"] == "error" and "no memory is left for word times" in last["error"]["message"]


def test_a_client_that_leaves_gives_its_memory_back(server):
    aligner_of(server).delay_s = 5
    with server.stream("pieces 2", **ASKED) as answer:
        next(answer.iter_bytes())
    # the fixture waits until nothing is held


# Sessions.

WORDS = {"timestamp_granularities": ["word"]}


def of_kind(told, kind):
    return [event for event in told if event["type"] == kind]


def test_a_session_gives_the_words_of_each_sentence(server):
    told, audio = spoken(server, "frames 2 for the first. [pause:1s] frames 3 follow here.", **WORDS)
    first, second = of_kind(told, "audio.words")
    assert [each["word"] for each in first["words"]] == ["frames", "2", "for", "the", "first."]
    assert first["words"][-1]["end_s"] == pytest.approx(200 / 24000, abs=1e-6)
    # a second of silence lies between them
    assert second["words"][0]["start_s"] == pytest.approx(1 + 200 / 24000, abs=1e-6)
    assert second["words"][-1]["end_s"] == pytest.approx(len(audio) / 2 / 24000, abs=1e-6)
    assert told[-1]["type"] == "audio.done" and {each["utterance"] for each in (first, second)} == {1}


def test_text_that_is_fed_is_aligned_when_its_pass_ends(server):
    told, _ = spoken(server, "The old man told a story.", 7, model="feeder", **WORDS)
    [event] = of_kind(told, "audio.words")
    assert [each["word"] for each in event["words"]] == ["The", "old", "man", "told", "a", "story."]


def test_a_session_gives_the_times_of_its_sentences(server):
    segments = {"timestamp_granularities": ["segment"]}
    told, audio = spoken(
        server, "frames 2 for the first. [pause:1s] frames 3 follow here.", speed=2.0, **segments
    )
    first, second = of_kind(told, "audio.segment")
    assert (first["text"], second["text"]) == ("frames 2 for the first.", "frames 3 follow here.")
    ends = [0.0, 2 * FRAME / RATE_HZ, 1 + 2 * FRAME / RATE_HZ, 1 + 5 * FRAME / RATE_HZ]
    times = [first["start_s"], first["end_s"], second["start_s"], second["end_s"]]
    assert times == [pytest.approx(end_s / 2, abs=1e-6) for end_s in ends]
    assert len(audio) / 2 / RATE_HZ == pytest.approx(second["end_s"], rel=0.1)
    told, _ = spoken(server, "The old man told a story.", 7, model="feeder", **segments)
    [event] = of_kind(told, "audio.segment")
    assert event["text"] == "The old man told a story." and event["utterance"] == 1


@contextmanager
def talking(server, text, until_bytes, **config):
    """Open a session that speaks a text, and wait for some of its audio."""
    with connect(server.url.replace("http", "ws") + PATH, compression=None) as socket:
        socket.send(
            json.dumps({"type": "session.config", "model": "fake", "voice": "vivian", **WORDS, **config})
        )
        socket.send(json.dumps({"type": "input.text", "text": text}))
        socket.send(json.dumps({"type": "input.done"}))
        heard = 0
        while heard < until_bytes:
            message = socket.recv(timeout=5)
            heard += len(message) if isinstance(message, bytes) else 0
        yield socket


def events_until(socket, kind):
    told = []
    while not told or told[-1]["type"] != kind:
        message = socket.recv(timeout=5)
        if isinstance(message, str):
            told.append(json.loads(message))
    return told


@pytest.mark.parametrize(
    ("played", "text"),
    [
        ({}, "hold 3 words"),  # a word for each frame that was sent
        ({"played_s": 250 / 24000}, "hold 3"),
        ({"played_s": 0}, ""),
        ({"played_s": 250 / 24000, "utterance": 1}, "hold 3"),
    ],
)
def test_an_interruption_tells_which_words_were_heard(server, played, text):
    with talking(server, "hold 3 words go on here.", 600) as socket:
        socket.send(json.dumps({"type": "input.cancel", **played}))
        told = events_until(socket, "audio.heard")
    kinds = [event["type"] for event in told if event["type"] != "session.configured"]
    assert kinds == ["audio.done", "audio.words", "audio.heard"]
    assert told[-1] == {"type": "audio.heard", "utterance": 1, "text": text, "num_words": len(text.split())}
    assert of_kind(told, "audio.done")[0]["reason"] == "cancelled"


def test_what_was_heard_of_an_utterance_that_is_over_can_be_asked(server):
    told = []
    with talking(server, "frames 2 for the first.", 400) as socket:
        told = events_until(socket, "audio.done")
        socket.send(json.dumps({"type": "input.cancel", "played_s": 100 / 24000}))
        told = events_until(socket, "audio.heard")
        assert told[-1]["text"] == "frames 2"
        socket.send(json.dumps({"type": "input.cancel", "utterance": 7}))
        fault = events_until(socket, "error")[-1]["error"]
        assert fault["param"] == "utterance" and "these have some: 1" in fault["message"]


def test_the_words_of_the_oldest_utterance_are_there_when_it_is_asked_for(server, monkeypatch):
    """Cancelling keeps the words of another one, so those of the oldest are dropped."""
    monkeypatch.setattr(session, "MAX_QUEUED", 1)
    with talking(server, "frames 1 first.", 200) as socket:
        events_until(socket, "audio.done")
        for text in ("frames 1 second.", "hold 1 third."):
            socket.send(json.dumps({"type": "input.text", "text": text}))
            socket.send(json.dumps({"type": "input.done"}))
            events_until(socket, "audio.done" if "second" in text else "audio.start")
        socket.send(json.dumps({"type": "input.cancel", "utterance": 1}))
        told = events_until(socket, "audio.heard")
    assert told[-1]["utterance"] == 1 and told[-1]["text"] == "frames 1 first."


def test_a_new_utterance_that_cancels_tells_it_too(server):
    with talking(server, "hold 2 words.", 400, barge_in="cancel") as socket:
        socket.send(json.dumps({"type": "input.text", "text": "frames 1 here."}))
        socket.send(json.dumps({"type": "input.done"}))
        told = events_until(socket, "audio.heard")
        assert told[-1]["utterance"] == 1 and told[-1]["text"] == "hold 2"


def test_without_word_times_a_cancel_tells_nothing_of_words(server):
    with talking(server, "hold 2 words.", 400, timestamp_granularities=None) as socket:
        socket.send(json.dumps({"type": "input.cancel", "played_s": 1}))
        told = events_until(socket, "audio.done")
        socket.send(json.dumps({"type": "input.text", "text": "frames 1 here."}))
        socket.send(json.dumps({"type": "input.done"}))
        told += events_until(socket, "audio.done")
    assert not of_kind(told, "audio.heard") and not of_kind(told, "audio.words")


def test_an_aligner_that_fails_ends_the_utterance_with_an_error(server):
    aligner_of(server).broken = "the aligner has ended"
    told, _ = spoken(server, "frames 2 for the first.", **WORDS)
    assert told[-1]["type"] == "error" and told[-1]["utterance"] == 1
    assert told[-1]["error"]["code"] == "aligner_failed"
