"""Clients of WS /v1/realtime, for servers with a fake engine (fake_engine.py). Every event that a server sends must
be one that OpenAI's own client declares."""

import base64
import gc
import json
from contextlib import contextmanager

import numpy as np
from http_server import until
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.sync.client import connect

KEY = "sk-here"
DECLARED = TypeAdapter(RealtimeServerEvent)
PUSH_TO_TALK = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}


class Client:
    def __init__(self, socket):
        self.socket = socket
        self.seen = []

    def send(self, type, **fields):
        self.socket.send(json.dumps({"type": type, **fields}))

    def receive(self):
        event = json.loads(self.socket.recv(timeout=5))
        DECLARED.validate_python(event, strict=False)
        self.seen.append(event)
        return event

    def until(self, type):
        """Receive events up to one of a type, and return that one."""
        while (event := self.receive())["type"] != type:
            assert event["type"] != "error", event
        return event

    def next(self, type):
        event = self.receive()
        assert event["type"] == type, event
        return event

    def error(self):
        return self.next("error")["error"]

    def configure(self, **session):
        self.send("session.update", session={**PUSH_TO_TALK, **session})
        return self.next("session.updated")["session"]

    def say(self, pcm):
        for at in range(0, len(pcm), 9600):
            self.send("input_audio_buffer.append", audio=base64.b64encode(pcm[at : at + 9600]).decode())

    def write(self, text, role="user", **fields):
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        self.send("conversation.item.create", item=item, **fields)
        return self.until("conversation.item.done")["item"]

    def answer(self, **response):
        """Ask for an answer, and return its events."""
        self.send("response.create", **({"response": response} if response else {}))
        first = len(self.seen)
        self.until("response.done")
        return self.seen[first:]


@contextmanager
def session(server, *, model="answerer", key=KEY, **options):
    url = f"{server.url.replace('http', 'ws')}/v1/realtime" + (f"?model={model}" if model else "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with connect(url, additional_headers=headers, compression=None, **options) as socket:
        yield Client(socket)


@contextmanager
def talking(server, **options):
    """Yield a session in which the client says where turns end."""
    with session(server, **options) as client:
        client.next("session.created")
        client.configure()
        yield client


def pcm(seconds=0.5, rate_hz=24_000):
    return (
        (9000 * np.sin(2 * np.pi * 200 * np.arange(int(seconds * rate_hz)) / rate_hz)).astype("<i2").tobytes()
    )


def half_told(server, client, frames=5):
    """Begin an answer and hold it at its first frame; return its item's ID."""
    server.call(server.engine.go.clear)
    client.write(f"talk {frames}")
    client.send("response.create")
    return client.until("response.output_audio.delta")["item_id"]


def asked(server):
    return list(server.engine.messages.values())[-1]


def check_is_idle(server):
    """Check that sessions that have ended hold no place, no memory and no request."""
    state = server.app.state.server
    server.engine.messages.clear()  # of the fake engine: they hold clips
    until(lambda: state.sessions.num_held == 0)
    until(lambda: gc.collect() >= 0 and state.memory.num_held == 0)
    assert not state.engine._inboxes
