"""Clients of WS /v1/audio/speech/stream, for servers with a fake engine (fake_engine.py)."""

import json
from contextlib import contextmanager

import msgspec
import pytest
from fake_engine import CLONER, frame
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

PATH = "/v1/audio/speech/stream"
WITHIN_S = 30.0  # a message arrives, also on a machine that does much else
CHANCE = msgspec.structs.replace(
    CLONER, id="chance", modes=["voice", "clone"], keeps_voice=True, reference_s=(0.01, 30.0)
)


class Client:
    def __init__(self, socket):
        self.socket = socket

    def send(self, type, **fields):
        self.socket.send(json.dumps({"type": type, **fields}))

    def configure(self, **fields):
        self.send("session.config", **{"model": "fake", "voice": "vivian", **fields})
        return self.event("session.configured")

    def say(self, *texts, done=True):
        for text in texts:
            self.send("input.text", text=text)
        if done:
            self.send("input.done")

    def receive(self):
        return self.socket.recv(timeout=WITHIN_S)

    def event(self, type):
        event = json.loads(self.receive())
        assert event["type"] == type, event
        return event

    def error(self, utterance=None):
        event = self.event("error")
        assert event["utterance"] == utterance and set(event["error"]) == {"message", "type", "param", "code"}
        return event["error"]

    def audio(self):
        chunk = self.receive()
        assert isinstance(chunk, bytes), chunk
        return chunk

    def heard(self):
        """Receive an utterance to its end. Return audio.start, the audio and audio.done."""
        start, chunks = self.event("audio.start"), []
        while isinstance(message := self.receive(), bytes):
            chunks.append(message)
        done = json.loads(message)
        assert done["type"] == "audio.done" and done["utterance"] == start["utterance"], done
        return start, b"".join(chunks), done


@contextmanager
def session(server, headers=None, **options):
    url = server.url.replace("http", "ws") + PATH
    with connect(url, additional_headers=headers or {}, compression=None, **options) as socket:
        yield Client(socket)


def frames(count):
    return b"".join(map(frame, range(count)))


def last_asked(server, count=1):
    return list(server.engine.asked.values())[-count:]


def closed(client):
    """Skip other messages, and return the code and the reason of the server's close."""
    with pytest.raises(ConnectionClosed) as ended:
        while True:
            client.receive()
    return ended.value.rcvd.code, ended.value.rcvd.reason


def spoken(server, text, size=1000, headers=None, **config):
    """Say a text in parts of `size` characters. Return all events, and the audio."""
    events, audio = [], b""
    url = server.url.replace("http", "ws") + PATH
    with connect(url, compression=None, additional_headers=headers) as socket:
        socket.send(json.dumps({"type": "session.config", "model": "fake", "voice": "vivian", **config}))
        for at in range(0, len(text), size):
            socket.send(json.dumps({"type": "input.text", "text": text[at : at + size]}))
        socket.send(json.dumps({"type": "input.done"}))
        while not events or events[-1]["type"] not in ("audio.done", "error"):
            message = socket.recv(timeout=WITHIN_S)
            if isinstance(message, bytes):
                audio += message
            else:
                events.append(json.loads(message))
    return events, audio
