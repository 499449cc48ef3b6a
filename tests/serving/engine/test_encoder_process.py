"""Recordings that are encoded in another process: the same prompts, and whatever goes wrong there is one request's."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from models import directory

import zoo
from serving import protocol
from serving.engine.encoder_process import Encoders, Ended
from serving.engine.engine import Engine
from serving.engine.engine_process import Bridge, request_of
from zoo.references import NotEncoded, only_encoded
from zoo.request import RequestError

RATE_HZ = 24000


def speak(seed: int, kept_in: Path | None = None, loudness: float = 0.1) -> protocol.Speak:
    samples = (loudness * np.random.default_rng(seed).standard_normal(2 * RATE_HZ)).astype("<f4")
    clip = protocol.AudioClip(samples.tobytes(), RATE_HZ)
    reference = protocol.Reference(clip, "What it says.", kept_in=None if kept_in is None else str(kept_in))
    fields = {"text": "Good morning, everybody who is here today.", "seed": seed, "max_frames": 4}
    return protocol.Speak(f"{seed}", "clone", fields, [reference])


@pytest.fixture
def family():
    """One that nobody else has encoded anything with."""
    return zoo.load(directory("qwen3_tts", "tiny-base"), "cpu", "float32")


@pytest.fixture
def started():
    """Encoders that end with the test, and leave nothing."""
    begun = []

    def start(family, request_of=request_of):
        begun.append(Encoders({"clone": family}, request_of))
        return begun[-1]

    yield start
    for encoders in begun:
        encoders.close()
        assert not encoders.place.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(encoders.pid, 0)


def until(fact):
    end_s = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.005)


def encoded_here(family) -> int:
    return family.writer.cloner.references.num_encoded


def served(family, encoders) -> tuple[Bridge, Engine]:
    bridge = Bridge()
    bridge.engine = Engine({"clone": family}, max_slots=2, compile=False)
    bridge.encoders = encoders
    return bridge, bridge.engine


def prepared(bridge: Bridge, engine: Engine, message: protocol.Speak):
    """-> the prompt that waits for a slot."""
    place = engine.accept(message.id, lambda event: None, "clone", reference_bytes=1)
    bridge.messages[message.id] = message
    bridge.prepare(engine, place)
    return engine._inbox[-1].prompt


def test_nothing_is_encoded_within(family):
    request = request_of(speak(1))
    with only_encoded(), pytest.raises(NotEncoded):
        next(family.passes(request))
    assert encoded_here(family) == 0
    made = next(family.passes(request))
    with only_encoded():
        again = next(family.passes(request))
    assert encoded_here(family) == 1 and torch.equal(again.lanes[0].inputs, made.lanes[0].inputs)


def test_a_prompt_is_the_same_and_nothing_was_encoded_here(family, started, tmp_path):
    plain = zoo.load(directory("qwen3_tts", "tiny-base"), "cpu", "float32")
    bridge, engine = served(family, started(family))
    for message in (speak(1), speak(2, kept_in=tmp_path)):
        prompt, expected = prepared(bridge, engine, message), next(plain.passes(request_of(message)))
        assert encoded_here(family) == 0
        assert len(prompt.tensors()) == len(expected.tensors())
        for tensor, other in zip(prompt.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(tensor, other, rtol=0, atol=1e-5)
        assert prompt.lanes[0].prefix_keys == expected.lanes[0].prefix_keys
    assert len(list(tmp_path.glob("qwen3_tts-*.safetensors"))) == 1  # of the one that is kept there
    assert not list(bridge.encoders.place.iterdir())
    num_asked = []
    bridge.encoders.encode = lambda *_: num_asked.append(1)
    prepared(bridge, engine, protocol.Speak("again", "clone", speak(1).request, speak(1).references))
    assert not num_asked and encoded_here(family) == 0


def test_what_an_encoder_refuses_is_refused(family, started):
    bridge, engine = served(family, started(family))
    with pytest.raises(RequestError, match="the reference is silent") as refused:
        prepared(bridge, engine, speak(1, loudness=1e-6))
    assert refused.value.param == "references" and not engine.num_requests
    assert not list(bridge.encoders.place.iterdir())


def killed(message: protocol.Speak):
    if message.id == "13":
        os.kill(os.getpid(), signal.SIGSEGV)
    if message.id == "14":
        raise KeyError("a mistake of ours")
    return request_of(message)


@pytest.mark.parametrize(("id", "how"), [(13, "it died of signal 11"), (14, "its line on stderr")])
def test_what_fails_there_is_one_requests_error(family, started, id, how):
    encoders = started(family, killed)
    with pytest.raises(RuntimeError, match=f"the process that encodes recordings failed on one: {how}"):
        encoders.encode(speak(id))
    assert not list(encoders.place.iterdir())
    for _ in range(2):  # what was encoded there before leaves a file again
        assert list(encoders.encode(speak(1)).glob("qwen3_tts-*.safetensors"))


def sleeping(message: protocol.Speak):
    if message.id == "13":
        Path(message.references[0].kept_in, "begun").write_text(str(os.getpid()))
        time.sleep(3600)
    return request_of(message)


def begun(encoders: Encoders) -> int:
    """The worker's process id."""
    until(lambda: any(file.read_text() for file in encoders.place.glob("*/begun")))
    return int(next(encoders.place.glob("*/begun")).read_text())


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_who_leaves_is_encoded_no_further(family, started):
    bridge, engine = served(family, started(family, sleeping))
    message = speak(13)
    place = engine.accept(message.id, lambda event: None, "clone", reference_bytes=1)
    bridge.messages[message.id] = message
    future = bridge.slow_pool.submit(bridge.prepare, engine, place)
    pid = begun(bridge.encoders)
    engine.cancel(message.id)
    assert isinstance(future.exception(60), RequestError)
    until(lambda: is_gone(pid))
    assert encoded_here(family) == 0 and not list(bridge.encoders.place.iterdir())
    assert list(bridge.encoders.encode(speak(1)).glob("qwen3_tts-*.safetensors"))


def test_where_they_are_gone_recordings_are_encoded_in_this_process(family, started):
    bridge, engine = served(family, started(family))
    keeper = bridge.encoders.pid
    children = Path(f"/proc/{keeper}/task/{keeper}/children")
    until(children.read_text)
    worker = int(children.read_text())
    os.kill(keeper, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    prepared(bridge, engine, speak(1))
    assert encoded_here(family) == 1
    prepared(bridge, engine, speak(2))
    assert encoded_here(family) == 2


def test_the_worker_ends_when_nobody_asks_any_more(family):
    encoders = Encoders({"clone": family}, sleeping)
    errors = []

    def ask():
        try:
            encoders.encode(speak(13))
        except Ended as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    pid = begun(encoders)
    encoders.close()
    thread.join(60)
    assert len(errors) == 1 and not encoders.place.exists()
    until(lambda: is_gone(pid))


def test_a_keeper_holds_nothing_that_is_open_here(family, started, tmp_path):
    with (tmp_path / "file").open("w") as file:
        encoders = started(family)
        until(lambda: len(os.listdir(f"/proc/{encoders.pid}/fd")) <= 4)
        held = [os.readlink(f"/proc/{encoders.pid}/fd/{each}") for each in os.listdir(f"/proc/{encoders.pid}/fd")]
        assert file.name not in held
    assert os.getpriority(os.PRIO_PROCESS, encoders.pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_places_that_have_left_are_not_encoded_at_all(family, started):
    encoders = started(family)
    found = encoders.encode(speak(1), lambda: True)
    assert not list(found.glob("*.safetensors"))
