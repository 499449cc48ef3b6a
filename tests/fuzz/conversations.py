"""Sequences of events in realtime sessions, valid and not, with a model that answers, calls tools and transcribes."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, seed
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.attack.target import Target
from tests.fuzz.trials import trials

DECLARED = TypeAdapter(RealtimeServerEvent)
LAST = "last"  # the ID of an event that is wrong, so that the server answers it
END_S = 60.0
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TONE = (9000 * np.sin(np.arange(7200) / 20)).astype("<i2").tobytes()
AUDIO = [base64.b64encode(data).decode() for data in (TONE, TONE, TONE, bytes(9600), b"\0")]
ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.just([]), st.just({}))
TEXT = st.one_of(st.sampled_from(["", "Hello.", "<|EOT|>", "<tool_call>"]), st.text(max_size=30))
SESSION = {
    "tools": st.sampled_from([None, [], [TOOL], [TOOL, TOOL]]),
    "tool_choice": st.sampled_from(["auto", "none", None]),
    "instructions": st.one_of(st.none(), TEXT),
    "output_modalities": st.sampled_from([["audio"], ["text"]]),
    "max_output_tokens": st.sampled_from([1, 40]),
    "temperature": st.sampled_from([0.0, 1.0]),
}
DETECTION = st.sampled_from(
    [None, {"type": "server_vad"}, {"type": "semantic_vad", "create_response": False}]
)
INPUT = st.fixed_dictionaries(
    {"turn_detection": DETECTION},
    optional={
        "transcription": st.sampled_from([None, {}, {"model": "nobody"}]),
        "format": st.sampled_from([{"type": "audio/pcm", "rate": 24000}, {"type": "audio/pcmu"}]),
    },
)
# An item that the session has had: 0 is the latest. If it has not had so many, the ID is one that it never had.
ID = st.integers(0, 9)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": TEXT}),
    st.fixed_dictionaries({"type": st.just("input_audio"), "audio": st.sampled_from(AUDIO)}),
)
ITEM = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.sampled_from(["user", "user", "user", "assistant", "system"]),
            "content": st.lists(PART, min_size=1, max_size=2),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "name": st.sampled_from(["add", "a\nb"]),
            "arguments": TEXT,
            "call_id": st.sampled_from(["a", "b"]),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": st.sampled_from(["a", "c"]), "output": TEXT}
    ),
)
RESPONSE = st.fixed_dictionaries(
    {},
    optional={
        **SESSION,
        "conversation": st.sampled_from(["auto", "none"]),
        "input": st.lists(ITEM, min_size=1, max_size=2),
    },
)
EVENTS = {
    "session.update": {
        "session": st.fixed_dictionaries(
            {"type": st.just("realtime")},
            optional={**SESSION, "audio": st.fixed_dictionaries({"input": INPUT})},
        )
    },
    "input_audio_buffer.append": {"audio": st.sampled_from(AUDIO)},
    "input_audio_buffer.commit": {},
    "input_audio_buffer.clear": {},
    "conversation.item.create": {
        "item": ITEM,
        "previous_item_id": st.one_of(*[st.none()] * 3, st.just("root"), ID),
    },
    "conversation.item.retrieve": {"item_id": ID},
    "conversation.item.delete": {"item_id": ID},
    "conversation.item.truncate": {
        "item_id": ID,
        "content_index": st.just(0),
        "audio_end_ms": st.sampled_from([0, 40, 10_000]),
    },
    "response.create": {"response": st.one_of(st.none(), RESPONSE)},
    "response.cancel": {},
}


OFTEN = ["conversation.item.create"] * 4 + ["response.create", "input_audio_buffer.append"] * 2


@st.composite
def events(draw: Callable[..., Any]) -> dict[str, Any]:
    """Draw an event. One of twenty has a field of another type."""
    kind = draw(st.sampled_from([*EVENTS, *OFTEN]))
    event = {"type": kind, **{name: draw(values) for name, values in EVENTS[kind].items()}}
    if draw(st.integers(0, 19)) == 0:
        event[draw(st.sampled_from(sorted(event)))] = draw(ANY)
    return event


def fuzz(target: Target, examples: int, start: int) -> Counter[str]:
    """Return what the server sent, by its type. Raises the first failure, shrunk."""
    counts: Counter[str] = Counter()

    @seed(start)
    @trials(examples)
    @given(
        sent=st.lists(events(), min_size=15, max_size=40),
        pause_s=st.sampled_from([0, 0.01]),
        stays=st.booleans(),
    )
    def tried(sent: list[dict[str, Any]], pause_s: float, stays: bool) -> None:
        counts.update(talked(target, sent, pause_s, stays))

    tried()
    return counts


def talked(target: Target, sent: list[dict[str, Any]], pause_s: float, stays: bool) -> Counter[str]:
    """Hold a session. stays: whether the client reads the answer to its last event. Raises AssertionError."""
    with connect(f"{target.url.replace('http', 'ws')}/v1/realtime", compression=None) as socket:
        seen = Seen(socket)
        reading = threading.Thread(target=seen.read, daemon=True)
        reading.start()
        for event in sent:
            seen.send(event)
            time.sleep(pause_s)
        if stays:
            seen.send({"type": "nothing", "event_id": LAST})
            reading.join(END_S)
            assert not reading.is_alive(), f"no answer to the last event within {END_S:g} s"
    reading.join(END_S)
    assert seen.fault is None, seen.fault
    return seen.counts


class Seen:
    """What a session has seen. fault: what is wrong with it."""

    def __init__(self, socket: ClientConnection):
        self.socket = socket
        self.ids: list[str] = []
        self.counts: Counter[str] = Counter()
        self.fault: str | None = None

    def send(self, event: dict[str, Any]) -> None:
        """Send an event, with the IDs of items in the place of their numbers."""
        for name in ("item_id", "previous_item_id"):
            at = event.get(name)
            if type(at) is int:
                event = event | {name: self.ids[-1 - at] if -1 < at < len(self.ids) else "nobody"}
        self.socket.send(json.dumps(event))

    def read(self) -> None:
        """Read until the end of the session, or up to the answer to the last event."""
        try:
            while True:
                event = json.loads(self.socket.recv())
                DECLARED.validate_python(event, strict=False)
                self.counts[what(event)] += 1
                if event["type"] == "conversation.item.added":
                    self.ids.append(event["item"]["id"])
                if event["type"] == "error" and event["error"]["event_id"] == LAST:
                    return
        except ConnectionClosed as closed:
            if closed.sent is None:  # the server has ended it
                self.fault = str(closed)
        except ValueError as error:  # no event of OpenAI's
            self.fault = str(error)


def what(event: dict[str, Any]) -> str:
    """Return the type of an event, with the code of an error or the status of an answer."""
    match event["type"]:
        case "error":
            return f"error: {event['error']['code']}"
        case "response.done":
            return f"response.done: {event['response']['status']}"
    return str(event["type"])
