"""A complete `zoo serve` with demo checkpoints, and text that arrives while they speak."""

import json
import random
import time
import urllib.request

import numpy as np
import pytest
from served import KEY, connected, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

pytestmark = pytest.mark.slow

TEXT = "Good morning, everybody who is here today. It's 7:45, and my phone rings again."
FIELDS = {"voice": "ryan", "seed": 3, "max_new_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served"), "--max-slots", "1", demo="tiny") as url:
        yield url


@pytest.fixture(scope="module")
def chance(tmp_path_factory):
    """A server of the small voice, which accepts no text while it speaks."""
    options = ("--alias", "fast=small_voice", "--alias-voice", "anna=rms", "--max-sessions", "1")
    with serving(tmp_path_factory.mktemp("served"), *options) as url:
        yield url


def say(socket, text, pause_s=0.0, size=3):
    for at in range(0, len(text), size):
        socket.send(json.dumps({"type": "input.text", "text": text[at : at + size]}))
        time.sleep(pause_s)
    socket.send(json.dumps({"type": "input.done"}))


def heard(socket):
    """Return the samples of an utterance, and its last event."""
    pcm = bytearray()
    while True:
        message = socket.recv(timeout=60)
        if isinstance(message, bytes):
            pcm += message
        elif (event := json.loads(message))["type"] in ("audio.done", "error"):
            return np.frombuffer(pcm, "<i2").astype(int), event


def session(url):
    headers = {"authorization": f"Bearer {KEY}"}
    return connect(url.replace("http", "ws") + "/v1/audio/speech/stream", additional_headers=headers)


def configure(socket, **fields):
    socket.send(json.dumps({"type": "session.config", **fields}))
    event = json.loads(socket.recv(timeout=10))
    assert event["type"] == "session.configured", event
    return event


def one_shot(url, text, **fields):
    fields = {**FIELDS, **fields}
    voice = fields.pop("voice")
    answer = connected(url).audio.speech.create(
        model=connected(url).models.list().data[0].id,
        voice=voice,
        input=text,
        response_format="pcm",
        extra_body=fields,
    )
    return np.frombuffer(answer.content, "<i2").astype(int)


def same(one, other):
    """Return whether samples are almost equal: which frames share a window depends on timing."""
    return len(one) == len(other) > 0 and np.abs(one - other).max() <= 2


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_text_by_token_gives_the_same_speech_as_the_whole_text(server, pause_s):
    with session(server) as socket:
        assert configure(socket, **FIELDS)["split_granularity"] == "token"
        say(socket, TEXT, pause_s)
        samples, done = heard(socket)
    assert same(samples, one_shot(server, TEXT, text_mode="interleaved"))
    assert done["usage"]["output_tokens"] == len(samples) // 1920 == 40 and done["reason"] == "length"


def test_text_by_sentence_gives_the_same_speech_as_each_sentence_alone(server):
    fields = {**FIELDS, "max_new_tokens": 200}
    with session(server) as socket:
        assert configure(socket, split_granularity="sentence", **fields)["split_granularity"] == "sentence"
        say(socket, TEXT)
        samples, done = heard(socket)
    first, second = TEXT[:43].strip(), TEXT[43:]
    alone = [one_shot(server, first, max_new_tokens=200)]
    left = 200 - len(alone[0]) // 1920
    alone += [one_shot(server, second, max_new_tokens=left)] if left else []
    assert same(samples, np.concatenate(alone)), done


def test_a_cancel_frees_the_only_slot_for_the_next_request(server):
    """The cancelled utterance waits for text and does not speak."""
    with session(server) as socket:
        configure(socket, **FIELDS)
        socket.send(json.dumps({"type": "input.text", "text": "Good morning, every"}))
        while not isinstance(socket.recv(timeout=60), bytes):
            pass
        time.sleep(0.3)
        until(lambda: running(server) == 1)  # the engine reports its figures every second
        socket.send(json.dumps({"type": "input.cancel"}))
        began_s = time.monotonic()
        _, done = heard(socket)
        assert done["reason"] == "cancelled"
        assert len(one_shot(server, "Hello.", max_new_tokens=2))
        assert time.monotonic() - began_s < 5
        say(socket, TEXT)
        samples, _ = heard(socket)
    assert same(samples, one_shot(server, TEXT, text_mode="interleaved"))
    until_idle(server)


def test_a_client_that_disconnects_frees_the_only_slot(server):
    with session(server) as socket:
        configure(socket, **FIELDS)
        socket.send(json.dumps({"type": "input.text", "text": "Good morning, every"}))
        while not isinstance(socket.recv(timeout=60), bytes):
            pass
    until_idle(server)


def test_cancelling_at_any_time_leaves_nothing_behind(server):
    """All pages, slots and requests are released, and the server speaks as before."""
    draw = random.Random(2)
    for _ in range(4):
        with session(server) as socket:
            granularity = draw.choice(["token", "sentence"])
            configure(
                socket, split_granularity=granularity, barge_in=draw.choice(["queue", "cancel"]), **FIELDS
            )
            for _ in range(6):
                words = TEXT[: draw.randrange(3, len(TEXT))]
                socket.send(json.dumps({"type": "input.text", "text": words}))
                time.sleep(draw.random() * 0.15)
                socket.send(json.dumps({"type": draw.choice(["input.done", "input.cancel"])}))
                time.sleep(draw.random() * 0.15)
    until_idle(server)
    until(lambda: metric(server, "zoo_requests_waiting{") == metric(server, "zoo_sessions ") == 0)
    until(lambda: metric(server, "zoo_pages_free ") == metric(server, "zoo_pages "))
    with session(server) as socket:
        configure(socket, **FIELDS)
        say(socket, TEXT)
        assert same(heard(socket)[0], one_shot(server, TEXT, text_mode="interleaved"))


def test_a_model_that_cannot_read_by_token_speaks_by_sentence(chance):
    assert not connected(chance).models.list().data[0].feeds
    fields = {"voice": "slt", "seed": 1, "temperature": 0, "depth_temperature": 0}
    with session(chance) as socket:
        assert configure(socket, **fields)["split_granularity"] == "sentence"
        say(socket, "She opened the window. I had bread and cheese for breakfast.", 0.005)
        samples, done = heard(socket)
    alone = [
        one_shot(chance, text, max_new_tokens=None, **fields)
        for text in ("She opened the window.", "I had bread and cheese for breakfast.")
    ]
    assert done["reason"] == "stop" and same(samples, np.concatenate(alone))


def test_the_flags_for_aliases_and_sessions_take_effect(chance):
    client = connected(chance)
    [model] = client.models.list().data
    assert (model.id, model.aliases) == ("small_voice", ["fast"])
    extra = {"seed": 1, "max_new_tokens": 3, "stream": False}
    heard_by_name = [
        client.audio.speech.create(model=name, voice=voice, input="Hello.", extra_body=extra)
        for name, voice in (("small_voice", "rms"), ("fast", "anna"), ("tts-1", "alloy"))
    ]
    assert len({answer.content for answer in heard_by_name}) == 1
    warnings = [answer.response.headers.get("x-warning", "") for answer in heard_by_name]
    assert warnings[:2] == ["", ""] and "'rms' is used instead" in warnings[2]
    with session(chance), pytest.raises(InvalidStatus, match="503"), session(chance):
        pass


def metric(url, name):
    with urllib.request.urlopen(url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def running(url):
    return metric(url, "zoo_requests_running{")


def until(fact):
    end = time.monotonic() + 5
    while not fact():
        assert time.monotonic() < end, "the condition did not become true within 5 s"
        time.sleep(0.1)


def until_idle(url):
    until(lambda: running(url) == 0)
