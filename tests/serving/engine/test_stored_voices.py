"""A stored voice is spoken as fast as one of the model's own, however many recordings are being encoded."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from models import directory

import zoo
from serving import protocol, voice_file
from serving.engine.connections import PROMPT_THREADS, Bridge
from serving.engine.engine import Engine
from serving.engine.wire import NotEncoded, is_quick, reference_of
from zoo.request import RequestError, recording_name
from zoo.voices.references import References, content

RATE_HZ = 16000
HUM = np.sin(np.arange(RATE_HZ) ** 1.3 / 30).astype("<f4") / 4


def store(place: Path, samples: np.ndarray = HUM) -> protocol.StoredClip:
    """Write an uploaded voice, and return what the HTTP process sends of it."""
    place.mkdir(exist_ok=True)
    sample = protocol.AudioClip(samples.tobytes(), RATE_HZ)
    voice = voice_file.StoredVoice(place.name, 0, sample.duration_s)
    (place / voice_file.VOICE_FILE).write_bytes(voice_file.packed(voice, sample))
    return protocol.StoredClip(recording_name(samples, RATE_HZ), len(samples), RATE_HZ, str(place))


class Client:
    """A connection that notes which requests were heard or have ended."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.messages: dict[str, list[protocol.Message]] = {}

    def hold(self) -> None: ...
    def release(self) -> None: ...

    def send(self, message: protocol.Audio) -> None:
        self.messages.setdefault(message.id, []).append(message)

    def ended(self, id: str) -> protocol.Message:
        """Wait for a request's last message."""
        end_s = time.monotonic() + 30
        kinds = protocol.Finished | protocol.Failed | protocol.Rejected
        while not isinstance((last := self.messages.get(id, [None])[-1]), kinds):
            assert time.monotonic() < end_s, f"{id} does not end: {self.messages}"
            time.sleep(0.005)
        return last


class Speaking:
    """An engine with a model that clones, whose encoder waits for `may_encode`."""

    def __init__(self) -> None:
        self.family = zoo.load(directory("qwen3_tts", "tiny-base"), "cpu", "float32")
        self.cloner = self.family.writer.cloner
        self.may_encode = threading.Event()
        self.may_encode.set()
        encode = self.cloner._encode

        def wait(*given):
            assert self.may_encode.wait(30)
            return encode(*given)

        self.cloner._encode = wait
        self.engine = Engine(self.family, max_slots=8, compile=False)
        self.bridge = Bridge()
        self.bridge.engine = self.engine
        self.engine.after_turn = self.bridge.flush
        self.threads = [
            threading.Thread(target=run, daemon=True)
            for run in (self.engine.run, self.bridge.loop.run_forever)
        ]
        for thread in self.threads:
            thread.start()
        self.client = Client()

    def ask(self, id: str, clip: protocol.AudioClip | protocol.StoredClip) -> None:
        how = {"x_vector_only_mode": True}
        request = protocol.Request("Hello.", seed=1, max_frames=3, options=how)
        message = protocol.Speak(id, "qwen3_tts", request, [protocol.Reference(clip)])
        self.bridge.loop.call_soon_threadsafe(self.bridge._speak, self.client, message)

    def pcm(self, id: str) -> bytes:
        assert isinstance(self.client.ended(id), protocol.Finished)
        return b"".join(m.pcm for m in self.client.messages[id] if isinstance(m, protocol.Audio))

    def stop(self) -> None:
        self.may_encode.set()
        self.engine.stop()
        self.bridge.loop.call_soon_threadsafe(self.bridge.loop.stop)
        for thread in self.threads:
            thread.join(30)
        self.bridge.pool.shutdown()
        self.bridge.slow_pool.shutdown()


@pytest.fixture
def speaking():
    speaking = Speaking()
    yield speaking
    speaking.stop()


def new_recording(i: int) -> protocol.AudioClip:
    return protocol.AudioClip((HUM / (i + 1)).tobytes(), RATE_HZ)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_an_encoded_voice_does_not_wait_for_new_recordings(speaking, tmp_path, is_in_memory):
    stored = store(tmp_path / "anna")
    speaking.ask("first", stored)
    first = speaking.pcm("first")
    if not is_in_memory:
        speaking.cloner.references = References()  # as in a new process
    speaking.may_encode.clear()
    new = [f"new{i}" for i in range(4 * PROMPT_THREADS)]
    for i, id in enumerate(new):
        speaking.ask(id, new_recording(i + 1))
    speaking.ask("again", stored)
    assert speaking.pcm("again") == first
    assert not speaking.client.messages.keys() & set(new)
    speaking.may_encode.set()
    assert all(isinstance(speaking.client.ended(id), protocol.Finished) for id in new)
    assert speaking.cloner.references.num_encoded == len(new) + is_in_memory


def test_a_stored_voice_says_what_its_recording_says(speaking, tmp_path):
    speaking.ask("stored", store(tmp_path / "anna"))
    stored = speaking.pcm("stored")
    speaking.ask("sent", protocol.AudioClip(HUM.tobytes(), RATE_HZ))
    assert speaking.pcm("sent") == stored
    assert speaking.cloner.references.num_encoded == 1


def test_a_voice_that_is_not_encoded_does_not_keep_the_others_waiting(speaking, tmp_path):
    encoded = store(tmp_path / "anna")
    speaking.ask("first", encoded)
    speaking.pcm("first")
    speaking.may_encode.clear()
    new = [f"new{i}" for i in range(2 * PROMPT_THREADS)]
    for i, id in enumerate(new):
        speaking.ask(id, store(tmp_path / id, HUM / (i + 2)))
    speaking.ask("again", encoded)
    speaking.pcm("again")
    [model] = speaking.engine.stats()["models"].values()
    assert model["preparing"] == len(new)
    speaking.may_encode.set()
    for id in new:
        speaking.pcm(id)


def test_a_client_that_left_before_its_voice_was_encoded_leaves_nothing(speaking, tmp_path):
    speaking.may_encode.clear()
    for i in range(PROMPT_THREADS + 2):
        speaking.ask(f"new{i}", store(tmp_path / f"v{i}", HUM / (i + 2)))
    speaking.bridge.loop.call_soon_threadsafe(
        speaking.bridge._cancel, speaking.client, f"new{PROMPT_THREADS + 1}"
    )
    speaking.may_encode.set()
    for i in range(PROMPT_THREADS + 1):
        speaking.pcm(f"new{i}")
    assert not speaking.bridge.messages and speaking.engine.num_requests == 0


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("removed", "the stored voice 'anna' was removed or is damaged"),
        ("damaged", "the stored voice 'anna' was removed or is damaged"),
        ("replaced", "the stored voice 'anna' was replaced while this request waited; send it again"),
    ],
)
def test_a_voice_that_changed_before_it_was_encoded(speaking, tmp_path, what, says):
    stored = store(tmp_path / "anna")
    file = tmp_path / "anna" / voice_file.VOICE_FILE
    if what == "removed":
        file.unlink()
    elif what == "damaged":
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    else:
        store(tmp_path / "anna", HUM / 2)
    speaking.ask("late", stored)
    ended = speaking.client.ended("late")
    assert isinstance(ended, protocol.Rejected) and (ended.message, ended.param) == (says, "references")


def test_a_recording_is_read_once_and_only_if_it_is_needed(tmp_path):
    clip = reference_of(protocol.Reference(store(tmp_path / "anna"))).clip
    sent = reference_of(protocol.Reference(protocol.AudioClip(HUM.tobytes(), RATE_HZ))).clip
    token = is_quick.set(True)
    assert content(clip) == content(sent)
    with pytest.raises(NotEncoded):
        _ = clip.samples
    is_quick.reset(token)
    samples = clip.samples
    os.unlink(tmp_path / "anna" / voice_file.VOICE_FILE)
    assert clip.samples is samples and np.array_equal(samples, HUM)
    with pytest.raises(RequestError):
        _ = reference_of(protocol.Reference(store_gone(tmp_path))).clip.samples


def store_gone(tmp_path: Path) -> protocol.StoredClip:
    return protocol.StoredClip(bytes(16), 5, RATE_HZ, str(tmp_path / "gone"))


def test_the_samples_of_a_stored_voice_do_not_cross_the_socket(tmp_path):
    minute = np.tile(HUM, 60)
    message = protocol.Speak("r", "m", protocol.Request("Hi."), [protocol.Reference(store(tmp_path, minute))])
    assert len(protocol.pack(message)) < 500 + len(str(tmp_path))
