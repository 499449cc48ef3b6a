"""Messages of sessions that take text while they speak, valid and not: the server's own, and ElevenLabs' two."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, seed
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from serving.http.elevenlabs.contexts import Failed, Final, Output
from serving.http.events import ServerEvent
from tests.attack.target import Target
from tests.fuzz.trials import trials

END_S = 60.0
SPEAKS_S = 0.5  # a session of the server's own has no last message
OWN = "/v1/audio/speech/stream"
ONE, MANY = (
    f"/v1/text-to-speech/vivian/{end}?model_id=tiny" for end in ("stream-input", "multi-stream-input")
)
QUERIES = ["", "&output_format=pcm_24000", "&auto_mode=true", "&output_format=opus_48000_32&seed=3"]
CLOSES = {1000, 1008}  # what the server may close with
ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.just([]), st.just({}))
TEXT = st.one_of(
    st.sampled_from(
        ["", " ", "Hello there. ", "It is late.", "[pause:0s]", "<break time=", '"0.1s"/>', "x" * 300]
    ),
    st.text(max_size=30),
)
MAYBE = st.sampled_from([True, False, False, None])
OWN_EVENTS: dict[str, Any] = {
    "session.config": st.fixed_dictionaries(
        {"model": st.just("tiny")},
        optional={
            "voice": st.sampled_from(["vivian", "ryan", "nobody"]),
            "timestamp_granularities": st.sampled_from([["segment"], []]),
            "split_granularity": st.sampled_from(["auto", "token", "sentence"]),
            "barge_in": st.sampled_from(["queue", "cancel"]),
            "audio": st.sampled_from(["binary", "base64"]),
            "sentence_gap_s": st.sampled_from([0.0, 0.2]),
            "text_format": st.sampled_from(["plain", "markdown"]),
        },
    ),
    "input.text": st.fixed_dictionaries({"text": TEXT}),
    "input.done": st.just({}),
    "input.cancel": st.fixed_dictionaries({}, optional={"played_s": st.sampled_from([0, 0.1])}),
}
THEIRS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "context_id": st.sampled_from(["a", "b", "c"]),
        "flush": MAYBE,
        "close_context": MAYBE,
        "voice_settings": st.fixed_dictionaries({}, optional={"speed": st.sampled_from([0.5, 1.0, 9])}),
        "generation_config": ANY,
    },
)


@st.composite
def messages(draw: Callable[..., Any], path: str) -> dict[str, Any]:
    """Draw a message. One of twenty has a field of another type."""
    if path == OWN:
        kind = draw(st.sampled_from([*OWN_EVENTS, *["input.text"] * 4, "input.done"]))
        message = {"type": kind, **draw(OWN_EVENTS[kind])}
    else:
        message = draw(THEIRS)
    if message and draw(st.integers(0, 19)) == 0:
        message[draw(st.sampled_from(sorted(message)))] = draw(ANY)
    return message


@st.composite
def sessions(draw: Callable[..., Any]) -> tuple[str, list[dict[str, Any]]]:
    path = draw(st.sampled_from([OWN, ONE, MANY, MANY]))
    sent = draw(st.lists(messages(path), min_size=5, max_size=25))
    if path == OWN:
        return path, [{"type": "session.config", "model": "tiny"}, *sent]
    return path + draw(st.sampled_from(QUERIES)), sent


def fuzz(target: Target, examples: int, start: int) -> Counter[str]:
    """Return what the server sent, by its kind. Raises the first failure, shrunk."""
    counts: Counter[str] = Counter()

    @seed(start)
    @trials(examples)
    @given(session=sessions(), pause_s=st.sampled_from([0, 0.01]), stays=st.booleans())
    def tried(session: tuple[str, list[dict[str, Any]]], pause_s: float, stays: bool) -> None:
        counts.update(spoken(target, *session, pause_s, stays))

    tried()
    return counts


def spoken(
    target: Target, path: str, sent: list[dict[str, Any]], pause_s: float, stays: bool
) -> Counter[str]:
    """Hold a session. stays: whether the client reads it to its end. Raises AssertionError."""
    counts: Counter[str] = Counter()
    faults: list[str] = []

    def read() -> None:
        try:
            while True:
                counts[kind_of(socket.recv(), path)] += 1
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.sent is not None and closed.rcvd_then_sent:
                counts[f"closed: {closed.rcvd.code}"] += 1
                if closed.rcvd.code not in CLOSES:
                    faults.append(str(closed))
        except (ValueError, AssertionError) as error:
            faults.append(repr(error))

    with connect(target.url.replace("http", "ws") + path, compression=None) as socket:
        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        try:
            for message in sent:
                socket.send(json.dumps(message))
                time.sleep(pause_s)
            if stays and path == OWN:
                reading.join(SPEAKS_S)
            elif stays:
                socket.send(json.dumps({"close_socket": True}))
                reading.join(END_S)
                assert not reading.is_alive(), f"{path} has not ended within {END_S:g} s"
        except ConnectionClosed:
            pass  # the server has ended it, and `read` knows why
    reading.join(END_S)
    assert not faults, faults[0]
    return counts


def kind_of(message: str | bytes, path: str) -> str:
    """Return what a message is. Raises ValueError if it is not declared, AssertionError if it is wrong."""
    if isinstance(message, bytes):
        return "audio"
    if path == OWN:
        event = msgspec.json.decode(message, type=ServerEvent)
        return str(type(event).__name__)
    fields = set(json.loads(message)) - {"contextId"}
    for kind in (Output, Final, Failed):
        if fields == set(kind.__struct_encode_fields__) - {"contextId"}:
            found = msgspec.json.decode(message, type=kind)
            if isinstance(found, Output):
                for times in filter(None, (found.alignment, found.normalized_alignment)):
                    assert len(times.chars) == len(times.char_start_times_ms) == len(times.char_durations_ms)
                    assert all(each >= 0 for each in times.char_start_times_ms + times.char_durations_ms)
                return "their audio" if found.audio else "their characters"
            return "their error" if isinstance(found, Failed) else "their end"
    raise ValueError(f"no message of ElevenLabs': {message[:200]}")
