"""Text in while speech goes out, as ElevenLabs' clients send it, with a fake engine. The messages are those of
elevenlabs 2.78 for Python, LiveKit Agents 1.8.9 and Pipecat 1.14.0, read in December 2026."""

import base64
import json
from contextlib import contextmanager, suppress

import pytest
from elevenlabs import VoiceSettings
from elevenlabs.client import ElevenLabs
from fake_aligner import FRAME, FakeAligner
from fake_engine import FEEDER, MODEL, RATE_HZ, frame
from http_server import Server, until
from sessions import WITHIN_S, frames, last_asked
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from serving.http.elevenlabs.contexts import MAX_CONTEXTS
from serving.settings import Aliases, Limits

GEORGE = "JBFqnCBsd6RMkjVDRZzb"  # the voice of their first example
FRAME_MS = 1000 * FRAME / RATE_HZ


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[MODEL]) as server:
        yield server


@pytest.fixture(scope="module")
def feeder(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), models=[FEEDER], limits=Limits(text_chars=200)) as server:
        yield server


class Client:
    def __init__(self, socket):
        self.socket = socket

    def send(self, *messages):
        for message in messages:
            self.socket.send(json.dumps(message))

    def say(self, id, *texts, **more):
        self.send(*({"text": text, "context_id": id, **more} for text in texts))

    def close(self, id):
        self.send({"context_id": id, "close_context": True})

    def next(self):
        return json.loads(self.socket.recv(timeout=WITHIN_S))

    def audio(self):
        """Return the next audio."""
        while not (message := self.next()).get("audio"):
            assert "error" not in message and "isFinal" not in message, message
        return base64.b64decode(message["audio"])

    def heard(self, *ids):
        """Receive contexts to their ends. Return the audio and the alignments of each."""
        audio, alignments = dict.fromkeys(ids, b""), {id: [] for id in ids}
        left = set(ids)
        while left:
            message = self.next()
            assert "error" not in message, message
            id = message.get("contextId")
            if message.get("isFinal"):
                left.remove(id)
            elif message["audio"]:
                audio[id] += base64.b64decode(message["audio"])
            else:
                alignments[id].append((message["alignment"], message["normalizedAlignment"]))
        return audio, alignments

    def error(self, id=None):
        """Skip what is no error. Return the code and the message of the next one."""
        while "error" not in (message := self.next()):
            pass
        assert message.get("contextId") == id and message["error"] == message["message"], message
        return message["code"], message["message"]

    def closed(self):
        with pytest.raises(ConnectionClosed) as ended:
            while True:
                self.next()
        return ended.value.rcvd.code, ended.value.rcvd.reason


@contextmanager
def connection(server, end="multi-stream-input", voice=GEORGE, headers=None, **query):
    query = {"output_format": f"pcm_{RATE_HZ}", **query}
    address = "&".join(f"{name}={value}" for name, value in query.items())
    url = f"{server.url.replace('http', 'ws')}/v1/text-to-speech/{voice}/{end}?{address}"
    with connect(url, compression=None, additional_headers=headers) as socket:
        yield Client(socket)


def one(server, *texts, **query):
    """Return what a connection without names of contexts hears of texts, and how it closes."""
    with connection(server, "stream-input", **query) as client:
        client.send({"text": " "}, *({"text": text} for text in texts), {"text": ""})
        audio, alignments = client.heard(None)
        return audio[None], alignments[None], client.closed()


def is_cancelled(server, text):
    ids = [id for id, asked in server.engine.asked.items() if asked["text"] == text]
    return bool(ids) and set(ids) <= set(server.engine.cancelled)


# Speech


def test_a_text_is_spoken_while_it_arrives_and_the_connection_ends_with_it(server):
    with connection(server, "stream-input", "ryan", model_id="eleven_flash_v2_5", seed=7) as client:
        client.send({"text": " ", "voice_settings": {"stability": 0.5}, "generation_config": {}})
        client.send({"text": "frames 3 of the ", "try_trigger_generation": True}, {"text": "first. fra"})
        assert b"".join(client.audio() for _ in range(3)) == frames(3)  # before the text has ended
        client.send({"text": "mes 1"}, {"text": ""})
        assert client.audio() == frame(0)
        assert client.closed() == (1000, "")
    asked = last_asked(server, 2)
    assert [each["text"] for each in asked] == ["frames 3 of the first.", "frames 1"]
    assert all((each["seed"], each["voice"]) == (7, "ryan") for each in asked)


def test_their_own_client_speaks_a_stream_of_text(server):
    client = ElevenLabs(base_url=server.url, api_key="none")
    client.text_to_speech._ws_base_url = server.url.replace("http", "ws")  # it takes TLS for granted
    made = client.text_to_speech.convert_realtime(
        GEORGE,
        text=iter(["frames 3 of", " the first. ", "frames 2 of the second."]),
        model_id="eleven_multilingual_v2",
        output_format=f"pcm_{RATE_HZ}",
        voice_settings=VoiceSettings(speed=1.0),
    )
    assert b"".join(made) == frames(3) + frames(2)


def test_contexts_are_spoken_at_once_each_with_its_own_end(server):
    with connection(server) as client:
        client.say("a", " ", "frames 2 of all. ")
        client.say("b", " ", "frames 4 of all. ")
        client.say("a", "", flush=True)
        client.close("a")
        client.say("b", "", flush=True)
        client.close("b")
        audio, _ = client.heard("a", "b")
        assert audio == {"a": frames(2), "b": frames(4)}
        client.say("a", "frames 1 of more.", flush=True)  # the name is free again
        client.close("a")
        assert client.heard("a")[0] == {"a": frames(1)}


def test_a_flush_speaks_all_text_at_once_and_the_context_goes_on(server):
    with connection(server) as client:
        client.say("a", "frames 2 of", " it")
        client.send({"context_id": "a", "flush": True})
        assert client.audio() + client.audio() == frames(2)
        client.say("a", "frames 1 of", "frames 1 more", flush=True)
        client.close("a")
        assert client.heard("a")[0] == {"a": frame(0) + frame(0)}
    assert [each["text"] for each in last_asked(server, 3)] == [
        "frames 2 of it",
        "frames 1 of",
        "frames 1 more",
    ]


def test_in_auto_mode_each_text_is_spoken_at_once(server):
    with connection(server, auto_mode="true", sync_alignment="true", inactivity_timeout=180) as client:
        client.say("a", " ", "frames 2 of all.")
        assert client.audio() + client.audio() == frames(2)
        client.say("a", "frames 1 of all.")
        assert client.audio() == frame(0)
        client.close("a")
        _, alignments = client.heard("a")
        assert (
            "".join(sent["chars"][0] for sent, _ in alignments["a"]) == "  "
        )  # before the second, and at the end


def test_text_goes_token_by_token_if_the_model_supports_it(feeder):
    with connection(feeder) as client:
        client.say("a", " ", "Hello ")
        assert client.audio() == frame(0)
        client.say("a", "you ", "there ", "")
        assert client.audio() + client.audio() == frame(1) + frame(2)
        client.say("a", "", flush=True)
        client.close("a")
        _, alignments = client.heard("a")
    [asked] = last_asked(feeder)
    assert asked["is_open"] and asked["text"] == "Hello "
    [(sent, _)] = alignments["a"]
    assert "".join(sent["chars"]) == "Hello you there "


def test_the_speed_of_a_context_is_that_of_its_first_message(server):
    with connection(server) as client:
        for id, speed in (("a", 2.0), ("b", 1.0)):
            client.say(id, " ", voice_settings={"speed": speed})
            client.say(id, "tone 40 of all.", flush=True, voice_settings={"speed": 0.5})
            client.close(id)
        audio, _ = client.heard("a", "b")
        assert len(audio["a"]) == pytest.approx(len(audio["b"]) / 2, rel=0.05)


@pytest.mark.parametrize("name", ["mp3_44100_128", "opus_48000_64", "ulaw_8000"])
def test_every_format_streams(server, name):
    audio, _, end = one(server, "tone 10 of all.", output_format=name)
    assert len(audio) > 500 and end == (1000, "")


# Alignment


def texts_of(alignments):
    return ["".join(spoken["chars"]) for _, spoken in alignments]


def test_the_characters_of_a_sentence_share_its_time(server):
    _, alignments, _ = one(server, "frames 2 for the first. frames 3 ", "follow here.")
    assert texts_of(alignments) == ["frames 2 for the first.", " frames 3 follow here."]
    ends = []
    for sent, spoken in alignments:
        assert sent == spoken and sent["charStartTimesMs"][0] == 0  # from the end of the alignment before
        ends.append(sent["charStartTimesMs"][-1] + sent["charDurationsMs"][-1])
    assert ends == [pytest.approx(2 * FRAME_MS, abs=1), pytest.approx(3 * FRAME_MS, abs=1)]


def test_a_server_with_an_aligner_gives_the_times_of_words(server, monkeypatch):
    monkeypatch.setattr(server.app.state.server, "aligner", FakeAligner())
    _, [(sent, _)], _ = one(server, "frames 5 of it all.")
    assert "".join(sent["chars"]) == "frames 5 of it all."
    starts = dict(zip(range(len(sent["chars"])), sent["charStartTimesMs"], strict=True))
    # each word has an equal part: "5" is the second of five
    assert starts[7] == pytest.approx(FRAME_MS, abs=1) and starts[9] == pytest.approx(2 * FRAME_MS, abs=1)


def test_an_aligner_that_fails_ends_the_context_with_an_error(server, monkeypatch):
    aligner = FakeAligner()
    aligner.broken = "the aligner is broken"
    monkeypatch.setattr(server.app.state.server, "aligner", aligner)
    with connection(server) as client:
        client.say("a", "frames 1 of all.", flush=True)
        client.close("a")
        assert client.error("a") == ("aligner_failed", "the aligner is broken")


# Ends


def test_a_context_that_is_closed_before_a_flush_is_cancelled(server):
    with connection(server) as client:
        client.say("a", " ", "hold 1 cut off. And")
        client.audio()
        client.close("a")
        client.heard("a")
        until(lambda: is_cancelled(server, "hold 1 cut off."))
        client.say("b", "frames 1 of all.", flush=True)
        client.close("b")
        assert client.heard("b")[0] == {"b": frames(1)}


def test_a_context_that_is_closed_twice_is_cancelled(server):
    with connection(server) as client:
        client.say("a", "hold 1 closed twice.", flush=True)
        client.audio()
        client.close("a")
        client.close("a")
        client.heard("a")
        until(lambda: is_cancelled(server, "hold 1 closed twice."))
        client.close("a")  # of a context that is gone: nothing happens
        client.close("never")
        client.say("b", "frames 1 of all.", flush=True)
        client.close("b")
        assert client.heard("b")[0] == {"b": frames(1)}


def test_a_socket_closes_once_its_flushed_contexts_are_spoken(server):
    with connection(server) as client:
        client.say("b", "hold 1 not flushed.  Never")
        assert client.audio() == frame(0)
        client.say("a", "frames 4 of all.", flush=True)
        client.say("c", " ")
        client.send({"close_socket": True})
        assert client.heard("a", "b", "c")[0]["a"] == frames(4)
        assert client.closed() == (1000, "")
    until(lambda: is_cancelled(server, "hold 1 not flushed."))


def test_a_client_that_leaves_cancels_all_contexts(server):
    with connection(server) as client:
        client.say("a", "hold 1 left alone.", flush=True)
        client.say("b", "hold 1 left too.", flush=True)
        client.audio(), client.audio()
    until(lambda: is_cancelled(server, "hold 1 left alone.") and is_cancelled(server, "hold 1 left too."))
    until(lambda: server.app.state.server.sessions.num_held == 0)


def test_a_stopping_server_lets_contexts_end(tmp_path):
    with Server(tmp_path) as server, connection(server) as client, connection(server) as idle:
        server.call(server.engine.go.clear)
        client.say("a", "frames 3 of it all.", flush=True)
        client.close("a")
        assert client.audio() == frame(0)
        server.uvicorn.should_exit = True
        assert idle.closed()[0] == 1012
        client.say("b", "frames 1 of all.", flush=True)
        assert client.error()[1] == "the connection is closing; it takes no more text"
        server.call(server.engine.go.set)
        assert client.heard("a")[0]["a"] == frame(1) + frame(2)
        assert client.closed() == (1012, "this server is stopping")


def test_an_empty_text_keeps_a_context_open(tmp_path):
    with Server(tmp_path, limits=Limits(text_idle_s=0.4)) as server, connection(server) as client:
        client.say("a", "frames 1 of a long text. And")
        client.audio()
        for _ in range(4):
            with pytest.raises(TimeoutError):
                while "error" not in json.loads(client.socket.recv(timeout=0.25)):
                    pass
            client.say("a", "")
        client.send({"text": ""})  # without a context it opens none
        assert client.error("a") == ("idle", "no text and no input.done for 0.4 s")
        client.heard("a")
        client.say("a", "the rest of the text.", flush=True)  # is not spoken: its beginning has failed
        client.close("a")
        client.say("b", "frames 1 of all.", flush=True)
        client.close("b")
        assert client.heard("b")[0] == {"b": frames(1)}


# Errors


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"model_id": "nothing"}, "model 'nothing' is not served"),
        ({"output_format": "mp9"}, "output_format 'mp9' is not possible; it takes mp3_44100_128 (default)"),
        ({"seed": "x"}, "seed takes an integer from 0 to 2^63 - 1"),
        ({"auto_mode": "maybe"}, "auto_mode takes true or false"),
        ({"voice": "nobody"}, "there is no voice 'nobody'; available voices: vivian, ryan"),
    ],
)
def test_a_wrong_address_closes_the_connection_and_says_why(server, query, says):
    for end in ("stream-input", "multi-stream-input"):
        with connection(server, end, **query) as client:
            with suppress(ConnectionClosed):
                client.say(None, " ")
            _, message = client.error()
            assert says in message and client.closed() == (1008, message.encode()[:123].decode())


def test_an_error_ends_its_context_alone(feeder):
    with connection(feeder) as client:
        client.say("a", "x" * 300)
        assert client.error("a") == (None, "the utterance has 300 characters; this server takes up to 200")
        client.say("b", "Hello you ", flush=True)
        client.close("b")
        client.close("a")
        assert client.heard("a", "b")[0]["b"] == frames(2)


def test_an_error_closes_a_connection_without_contexts(feeder):
    with connection(feeder, "stream-input") as client:
        client.send({"text": "x" * 300})
        assert client.error() == (None, "the utterance has 300 characters; this server takes up to 200")
        assert client.closed()[0] == 1008


@pytest.mark.parametrize("message", ['{"text": 3}', "[]", '"text"', '{"text": "a"', '{"context_id": {}}'])
def test_a_wrong_message_gets_an_error_and_has_no_other_effect(server, message):
    with connection(server) as client:
        client.say("a", "frames 2 of ")
        client.socket.send(message)
        assert client.error()[0] in ("invalid_event", "invalid_json")
        client.say("a", "it.", flush=True)
        client.close("a")
        assert client.heard("a")[0] == {"a": frames(2)}


def test_too_many_contexts_are_refused(server):
    with connection(server) as client:
        for id in range(MAX_CONTEXTS):
            client.say(f"c{id}", " ")
        client.say("more", " ")
        code, message = client.error()
        assert code == "too_many_contexts" and message.startswith("8 contexts are open")
        client.close("c0")
        client.heard("c0")
        client.say("more", "frames 1 of all.", flush=True)
        client.close("more")
        assert client.heard("more")[0] == {"more": frames(1)}


def test_a_strict_server_takes_its_own_names_alone(tmp_path):
    with Server(tmp_path, names=Aliases(is_strict=True)) as server:
        with connection(server) as client:
            client.say("a", " ")
            assert f"no voice '{GEORGE}'" in client.error("a")[1]
        with connection(server, voice="ryan", model_id="fake") as client:
            client.say("a", "frames 1 of all.", flush=True)
            client.close("a")
            assert client.heard("a")[0] == {"a": frames(1)}


def test_a_connection_needs_the_api_key(tmp_path):
    with Server(tmp_path, api_key="sk-a") as server:
        with pytest.raises(InvalidStatus) as refused, connection(server):
            pass
        assert refused.value.response.status_code == 401
        with connection(server, headers={"xi-api-key": "sk-a"}) as client:
            client.say("a", "frames 1 of all.", flush=True)
            client.close("a")
            assert client.heard("a")[0] == {"a": frames(1)}


@pytest.mark.parametrize("end", ["stream-input", "multi-stream-input"])
def test_a_plain_request_gets_426(server, end):
    for method in ("GET", "POST"):
        answer = server.http.request(method, f"/v1/text-to-speech/{GEORGE}/{end}")
        assert answer.status_code == 426 and answer.json()["error"]["code"] == "upgrade_required"
