"""The engine process's side of the protocol, with an engine that does what the test says."""

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from models import directory, family
from shell import ROOT
from structlog.testing import capture_logs
from toy import Toy

from serving import protocol, supervisor
from serving.audio.pcm import pcm16
from serving.engine import connections, loading
from serving.engine.connections import Bridge
from serving.engine.engine import Audio, Engine, Failed, Finished, Full, Text
from serving.engine.wire import describe, request_of
from serving.settings import EngineArguments, ModelOptions, Settings
from zoo.request import Request, RequestError

STATS = protocol.Stats(100, 60, 7, 3, 0, {"m": protocol.ModelStats(8, 2, 1, 5, 0)})
INFO = protocol.ModelInfo("m", "toy", "v", 24000, 12.5, 60.0, ["a"], ["english"], ["voice"])


class ScriptedEngine:
    """The engine's thread-safe half. `prepare` waits for `prompt_built`; the test delivers by hand."""

    def __init__(self):
        self.deliver = {}
        self.requests, self.models, self.pinned = {}, {}, {}
        self.cancelled, self.frames_heard = [], {}
        self.prompt_built = threading.Event()
        self.prompt_built.set()
        self.references_built = threading.Event()
        self.references_built.set()

    def accept(self, request_id, deliver, model, listener, text_bytes, reference_bytes):
        self.accepted = listener
        if model == "full":
            raise Full("256 requests are waiting already", retry_after_s=2.5)

        def turn(event):
            deliver(event)
            self.after_turn()

        return SimpleNamespace(id=request_id, deliver=turn, model=model, listener=listener)

    def prepare(self, place, make):
        request = make()
        self.prompt_built.wait(5)
        if request.references:
            self.references_built.wait(5)
        if request.text == "bad":
            raise RequestError("voice", "voice 'x' is not in this checkpoint; it has: a")
        if request.text == "broken":
            raise KeyError("a mistake of ours")
        self.requests[place.id] = request
        self.models[place.id] = place.model
        self.pinned[place.id] = place.listener.is_reproducible
        self.deliver[place.id] = place.deliver

    def consume(self, request_id, frames):
        self.frames_heard[request_id] = self.frames_heard.get(request_id, 0) + frames

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    def stats(self):
        return msgspec.to_builtins(STATS)


class Peer:
    """A plain blocking client."""

    def __init__(self, path):
        self.loop = asyncio.new_event_loop()
        self.reader, self.writer = self.loop.run_until_complete(asyncio.open_unix_connection(path))
        self.messages = protocol.read(self.reader, protocol.to_http)

    def send(self, message):
        self.writer.write(protocol.pack(message))
        self.loop.run_until_complete(self.writer.drain())

    def next(self):
        """The next message but Stats, which may come at any time."""
        while isinstance(message := self.any(), protocol.Stats):
            pass
        return message

    def any(self):
        return self.loop.run_until_complete(asyncio.wait_for(anext(self.messages), 30))

    def close(self):
        self.loop.run_until_complete(self.messages.aclose())
        self.writer.close()
        self.loop.run_until_complete(self.writer.wait_closed())
        self.loop.close()


@pytest.fixture
def bridge(tmp_path):
    bridge = Bridge()
    bridge.path = str(tmp_path / "engine.sock")
    bridge.listen(bridge.path)
    yield bridge
    until(lambda: not bridge.clients)
    bridge.pool.shutdown()
    bridge.slow_pool.shutdown()
    bridge.loop.call_soon_threadsafe(bridge.loop.stop)


@pytest.fixture
def engine(bridge):
    engine = ScriptedEngine()
    bridge.open(engine, [INFO])
    return engine


@pytest.fixture
def peer(bridge):
    peer = Peer(bridge.path)
    yield peer
    peer.close()


def until(fact):
    end = time.monotonic() + 5
    while not fact():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def test_status_goes_to_present_and_new_connections(bridge, peer):
    assert [peer.next(), peer.next()] == [protocol.Models([]), protocol.Status("loading")]
    peer.send(protocol.Speak("r", "m", protocol.Request("too early")))
    early = peer.next()
    assert (early.id, early.status, early.code) == ("r", 503, "engine_not_ready")
    bridge.tell(protocol.Status("warming", 0.5, "step"))
    assert [peer.next(), peer.next()] == [protocol.Models([]), protocol.Status("warming", 0.5, "step")]
    bridge.open(ScriptedEngine(), [INFO])
    assert [peer.next(), peer.next()] == [protocol.Models([INFO]), protocol.Status("ready", 1.0)]
    late = Peer(bridge.path)
    assert [late.next(), late.next()] == [protocol.Models([INFO]), protocol.Status("ready", 1.0)]
    late.close()


def test_a_request_and_its_audio(bridge, engine, peer):
    peer.next(), peer.next()
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello.", voice="a", seed=7, max_frames=9)))
    until(lambda: "r" in engine.deliver)
    assert (
        engine.requests["r"] == Request(text="Hello.", voice="a", seed=7, max_frames=9)
        and engine.models["r"] == "m"
    )
    assert not engine.pinned["r"]
    samples = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0], np.float32)
    engine.deliver["r"](Audio(samples, 1))
    engine.deliver["r"](Text("größer"))
    engine.deliver["r"](Finished("length", 1, {"output_frames": 1}))
    expected = np.array([0, 16384, -16384, 32767, -32767, 32767, -32767], "<i2")
    assert peer.next() == protocol.Audio("r", expected.tobytes(), 1) == protocol.Audio("r", pcm16(samples), 1)
    assert peer.next() == protocol.Text("r", "größer")
    assert peer.next() == protocol.Finished("r", "length", 1, {"output_frames": 1})
    assert engine.cancelled == []


def test_the_listener_reaches_the_engine(bridge, engine, peer):
    peer.next(), peer.next()
    fast = protocol.Listener(2.0, is_flexible=True, is_metered=True, wants_timestamps=True)
    for id, listener in (("a", protocol.Listener()), ("b", fast)):
        peer.send(protocol.Speak(id, "m", protocol.Request("Hello."), listener=listener))
        until(lambda id=id: id in engine.deliver)
        assert engine.accepted == listener


def test_references_and_options(bridge, engine, peer):
    samples = np.linspace(-1, 1, 5, dtype=np.float32)
    clip = protocol.AudioClip(samples.tobytes(), 16000)
    sent = [protocol.Reference(clip, "Hi.", "[S1]"), protocol.Reference(clip)]
    asked = protocol.Request("Hello.", options={"x_vector_only_mode": True})
    peer.send(protocol.Speak("r", "m", asked, sent, protocol.Listener(is_reproducible=True)))
    until(lambda: "r" in engine.deliver)
    request = engine.requests["r"]
    assert request.options == {"x_vector_only_mode": True} and engine.pinned["r"]
    assert [(one.transcript, one.speaker) for one in request.references] == [("Hi.", "[S1]"), (None, None)]
    heard = request.references[0].clip
    assert (
        np.array_equal(heard.samples, samples)
        and heard.samples.dtype == np.float32
        and heard.sample_rate_hz == 16000
    )
    assert heard.samples.flags.writeable  # or torch warns


def test_a_text_does_not_wait_for_recordings(bridge, engine, peer):
    engine.references_built.clear()
    clip = protocol.AudioClip(bytes(40), 16000)
    for i in range(40):
        peer.send(protocol.Speak(f"r{i}", "m", protocol.Request("Hello."), [protocol.Reference(clip)]))
    peer.send(protocol.Speak("s", "m", protocol.Request("Hello.")))
    until(lambda: "s" in engine.deliver)
    assert list(engine.deliver) == ["s"]
    engine.references_built.set()
    until(lambda: len(engine.deliver) == 41)


def test_nothing_is_built_for_a_client_that_disconnected(bridge, engine, peer):
    engine.references_built.clear()
    clip = protocol.AudioClip(bytes(40), 16000)
    for i in range(40):
        peer.send(protocol.Speak(f"r{i}", "m", protocol.Request("Hello."), [protocol.Reference(clip)]))
    until(lambda: len(bridge.messages) == 40 - connections.PROMPT_THREADS)
    for i in range(40):
        peer.send(protocol.Cancel(f"r{i}"))
    until(lambda: len(engine.cancelled) == 40)
    assert not bridge.messages
    engine.references_built.set()
    bridge.slow_pool.shutdown()
    assert sorted(engine.deliver) == ["r0", "r1"]


def test_stats_are_sent_once_there_is_an_engine(bridge, peer, monkeypatch):
    assert [peer.any(), peer.any()] == [protocol.Models([]), protocol.Status("loading")]
    monkeypatch.setattr(connections, "STATS_S", 0.01)
    bridge.open(ScriptedEngine(), [INFO])
    assert [peer.next(), peer.next()] == [protocol.Models([INFO]), protocol.Status("ready", 1.0)]
    assert peer.any() == peer.any() == STATS


@pytest.fixture
def no_stats_by_themselves(monkeypatch):
    monkeypatch.setattr(connections, "STATS_S", 3600.0)


def test_stats_arrive_before_the_ready_status(no_stats_by_themselves, bridge, peer):
    assert [peer.any(), peer.any()] == [protocol.Models([]), protocol.Status("loading")]
    bridge.engine, bridge.models = ScriptedEngine(), protocol.Models([INFO])
    bridge.tell(protocol.Status("ready", 1.0))
    told = [protocol.Models([INFO]), STATS, protocol.Status("ready", 1.0)]
    assert [peer.any() for _ in told] == told
    late = Peer(bridge.path)
    assert [late.any() for _ in told] == told
    late.close()


def test_the_engines_stats_are_what_the_protocol_carries():
    engine = Engine({"one": Toy(), "other": Toy()}, max_slots=2, compile=False)
    stats = msgspec.convert(engine.stats(), protocol.Stats)
    assert list(stats.models) == ["one", "other"] and stats.models["other"].slots == 2
    of_the_gateway = {"engine_restarts", "replicas"}
    assert set(engine.stats()) == set(protocol.Stats.__struct_fields__) - of_the_gateway
    assert set(engine.stats()["models"]["one"]) == set(protocol.ModelStats.__struct_fields__)


def test_a_directory_without_a_model_is_named_before_any_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.load", None)
    good = str(directory("qwen3_tts", "tiny"))
    with pytest.raises(ValueError, match=f"^model 'bad': {tmp_path} is not a model: it has no config.json"):
        loading.load({"good": good, "bad": str(tmp_path)}, "cpu", None, lambda *_: None)
    with pytest.raises(ValueError, match=f"^{tmp_path} is not a model: it has no config.json"):
        loading.load({"bad": str(tmp_path)}, "cpu", None, lambda *_: None)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    good, bad = directory("qwen3_tts", "tiny"), tmp_path / "bad"
    shutil.copytree(good, bad)
    (bad / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"^model 'bad': .*model\.safetensors"):
        loading.load({"good": str(good), "bad": str(bad)}, "cpu", None, lambda *_: None)


@pytest.mark.parametrize(
    ("built_for", "device", "told"), [("13.0", None, 1), ("13.0", "cpu", 0), (None, None, 0)]
)
def test_a_missing_gpu_is_named(monkeypatch, built_for, device, told):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with capture_logs() as lines:
        loading.load({"m": str(directory("qwen3_tts", "tiny"))}, device, "float32", lambda *_: None)
    assert [line["event"] for line in lines] == [
        "torch was built for CUDA 13.0 and finds no GPU: the CPU is used"
    ] * told


def test_a_model_that_streams_without_chunked_is_named():
    models = {"qwen": str(directory("qwen3_tts", "tiny")), "box": str(directory("chatterbox", "tiny"))}
    with capture_logs() as lines:
        loading.load(models, "cpu", "float32", lambda *_: None, chunked=True)
    assert [line["event"] for line in lines] == [
        "--chunked changes nothing for model 'qwen': it streams without it"
    ]


def test_loading_reports_progress():
    models, told = (
        {"one": str(directory("qwen3_tts", "tiny")), "other": str(directory("qwen3_tts", "tiny-base"))},
        [],
    )
    families = loading.load(models, "cpu", "float32", lambda *how_far: told.append(how_far))
    assert told == [(0, "one"), (0.5, "other")]
    assert {name: family.spec.variant for name, family in families.items()} == {
        "one": "custom_voice",
        "other": "base",
    }


def test_refusals_and_failures(bridge, engine, peer):
    peer.next(), peer.next()
    peer.send(protocol.Speak("r", "m", protocol.Request("bad")))
    assert peer.next() == protocol.Rejected("r", "voice 'x' is not in this checkpoint; it has: a", "voice")
    peer.send(protocol.Speak("s", "full", protocol.Request("Hello.")))
    full = peer.next()
    assert (full.id, full.status, full.code, full.retry_after_s) == ("s", 503, "engine_full", 2.5)
    peer.send(protocol.Speak("t", "m", protocol.Request("broken")))
    assert peer.next() == protocol.Failed("t", "an error in the engine; its log says more")
    peer.send(protocol.Speak("v", "m", protocol.Request("Hello.")))
    until(lambda: "v" in engine.deliver)
    engine.deliver["v"](Failed("the codec broke"))
    assert peer.next() == protocol.Failed("v", "the codec broke")
    peer.send(protocol.Speak("w", "m", protocol.Request("Hello.")))
    until(lambda: "w" in engine.deliver)
    engine.deliver["w"](Failed("no frame", code="no_audio"))
    assert peer.next() == protocol.Failed("w", "no frame", 422, "no_audio")


def test_a_value_that_no_model_takes_is_named(bridge, engine, peer):
    peer.next(), peer.next()
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello.", max_frames=0)))
    rejected = peer.next()
    assert (rejected.param, rejected.status) == (
        "max_frames",
        400,
    ) and "max_frames is 0; from 1" in rejected.message


@pytest.mark.parametrize(("code", "status"), [("engine_stopped", 503), ("cannot_continue", 400)])
def test_a_failure_has_the_status_of_its_code(bridge, engine, peer, code, status):
    peer.next(), peer.next()
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello.")))
    until(lambda: "r" in engine.deliver)
    engine.deliver["r"](Failed("why", code=code))
    assert peer.next() == protocol.Failed("r", "why", status, code)


def test_what_a_model_takes_is_described():
    spec = family("qwen3_tts", size="tiny-base").spec
    info = describe("m", spec)
    assert [option.name for option in info.options] == [option.name for option in spec.options]
    mode = next(option for option in info.options if option.name == "text_mode")
    assert (mode.type, mode.possible, mode.choices) == ("str", "full, interleaved", ("full", "interleaved"))
    assert (info.max_references, info.reference_s, info.licence) == (
        spec.max_references,
        spec.reference_s,
        spec.licence,
    )
    assert protocol.to_http.decode(msgspec.msgpack.encode(protocol.Models([info]))) == protocol.Models([info])


def test_all_events_of_an_iteration_are_sent_together(bridge, engine, peer, monkeypatch):
    woken = []
    plain = bridge.loop.call_soon_threadsafe
    for id in ("r", "s"):
        peer.send(protocol.Speak(id, "m", protocol.Request("Hello.")))
    until(lambda: len(engine.deliver) == 2)
    monkeypatch.setattr(
        bridge.loop, "call_soon_threadsafe", lambda f, *args: woken.append(f.__name__) or plain(f, *args)
    )
    client = next(iter(bridge.clients))
    audio = [Audio(np.full(4, i / 8, np.float32), 1) for i in range(4)]
    bridge.events += [(client, id, event) for event in audio for id in ("r", "s")]
    bridge.events.append((client, "r", Finished("stop", 4, {})))
    engine.after_turn()
    engine.after_turn()  # a turn that gave nothing wakes nobody
    peer.next(), peer.next()
    messages = [peer.next() for _ in range(9)]
    assert woken.count("_deliver_all") == 1
    assert [message.id for message in messages] == ["r", "s"] * 4 + ["r"]
    assert [message.pcm for message in messages[:8:2]] == [pcm16(event.samples) for event in audio]


def test_the_engine_learns_what_clients_consumed(bridge, engine, peer):
    for frames in (3, 4):
        peer.send(protocol.Heard("r", frames))
    until(lambda: engine.frames_heard == {"r": 7})


def test_a_cancelled_request_is_silent(bridge, engine, peer):
    peer.next(), peer.next()
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello.")))
    until(lambda: "r" in engine.deliver)
    peer.send(protocol.Cancel("r"))
    until(lambda: engine.cancelled == ["r"])
    engine.deliver["r"](Audio(np.zeros(4, np.float32), 1))
    engine.deliver["r"](Finished("cancelled", 1, {}))
    peer.send(protocol.Speak("s", "m", protocol.Request("bad")))
    assert peer.next().id == "s"  # and nothing of r came before


def test_a_cancel_while_the_prompt_is_built_goes_to_the_engine_at_once(bridge, engine, peer):
    engine.prompt_built.clear()
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello.")))
    peer.send(protocol.Cancel("r"))
    until(lambda: engine.cancelled == ["r"])
    engine.prompt_built.set()


def test_a_closed_connection_cancels_its_own_requests(bridge, engine, peer):
    other = Peer(bridge.path)
    for client, id in ((other, "r"), (other, "s"), (peer, "t")):
        client.send(protocol.Speak(id, "m", protocol.Request("Hello.")))
    until(lambda: len(engine.deliver) == 3)
    other.close()
    until(lambda: sorted(engine.cancelled) == ["r", "s"])
    engine.deliver["r"](Audio(np.zeros(4, np.float32), 1))
    engine.deliver["t"](Finished("stop", 0, {}))
    assert [peer.next() for _ in range(3)][-1] == protocol.Finished("t", "stop", 0, {})


def test_malformed_bytes_end_their_connection_alone(bridge, engine, peer):
    peer.next(), peer.next()
    stranger = Peer(bridge.path)
    stranger.writer.write(b"GET / HTTP/1.1\r\n\r\n")
    stranger.next(), stranger.next()
    with pytest.raises(StopAsyncIteration):
        stranger.next()
    peer.send(protocol.Speak("r", "m", protocol.Request("bad")))
    assert peer.next().id == "r"
    stranger.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds threads in /proc")
@pytest.mark.parametrize("is_main", [True, False])
def test_a_signal_ends_an_idle_engine_of_several_models(tmp_path, is_main):
    """Whichever of its threads the system interrupts: the main one may wait for requests all the while."""
    sizes = [("qwen3_tts", "tiny"), ("qwen3_tts", "tiny-base"), ("voxcpm2", "tiny"), ("higgs_v3", "tiny")]
    models = {f"{name}-{size}": str(directory(name, size)) for name, size in sizes}
    path = str(tmp_path / "sock")
    how = ModelOptions(device="cpu", compile=False, warm=False)
    command = supervisor.command(
        "serving.engine.engine_process", EngineArguments(Settings(models, model=how), path)
    )
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        peer = Peer(until_listening(path))
        while peer.next() != protocol.Status("ready", 1.0):
            pass
        [thread, *_] = {int(id) for id in os.listdir(f"/proc/{process.pid}/task")} - {process.pid}
        time.sleep(0.2)  # by now it waits for requests
        os.kill(process.pid if is_main else thread, signal.SIGTERM)
        assert process.wait(5) == 0
        peer.close()
    finally:
        process.kill()
        process.wait()


def until_listening(path):
    end = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < end, "the engine process does not listen"
        time.sleep(0.05)
    return path


# text that arrives while a request speaks


class FeedingEngine(ScriptedEngine):
    """`fed` is what came for each request; `go` may be cleared to hold prompts back."""

    def __init__(self):
        super().__init__()
        self.fed, self.go = {}, threading.Event()
        self.go.set()

    def family(self, model):
        return FED

    def prepare(self, place, request):
        self.go.wait(5)
        super().prepare(place, request)

    def feed(self, id, tokens, is_last):
        self.fed.setdefault(id, []).append((bytes(tokens).decode(), is_last))


class Bytes:
    spec = SimpleNamespace(feeds=True, tags=())

    def tokenize(self, text):
        return list(text.encode())


FED = Bytes()


@pytest.fixture
def feeding(bridge, peer):
    engine = FeedingEngine()
    bridge.open(engine, [INFO])
    return engine


def test_an_open_request_begins_when_a_word_is_there(bridge, feeding, peer):
    peer.send(protocol.Speak("r", "m", protocol.Request("Hel", is_open=True)))
    peer.send(protocol.Feed("r", "lo"))
    peer.send(protocol.Feed("other", "lo"))
    peer.send(protocol.Feed("r", " wor"))
    until(lambda: "r" in feeding.requests)
    assert feeding.requests["r"] == Request(text="Hello", is_open=True)
    peer.send(protocol.Feed("r", "ld. "))
    peer.send(protocol.Feed("r", "", True))
    until(lambda: feeding.fed.get("r", [])[-1:] == [(".", True)])
    assert feeding.fed == {"r": [(" world", False), (".", True)]}


def test_text_waits_for_the_prompt(bridge, feeding, peer):
    """The engine knows a request from when its prompt is made."""
    feeding.go.clear()
    peer.send(protocol.Speak("r", "m", protocol.Request("a b", is_open=True)))
    peer.send(protocol.Feed("r", " c d", True))
    until(lambda: bridge.fed and bridge.fed["r"].waiting)
    assert not feeding.fed
    feeding.go.set()
    until(lambda: feeding.fed)
    assert feeding.fed == {"r": [(" b c d", True)]}


def test_a_text_that_ends_before_it_began_is_spoken_as_it_is(bridge, feeding, peer):
    peer.send(protocol.Speak("r", "m", protocol.Request(" Hi", is_open=True)))
    peer.send(protocol.Feed("r", "", True))
    until(lambda: feeding.fed)
    assert feeding.requests["r"].text == "Hi" and feeding.fed == {"r": [("", True)]}


def test_recordings_of_an_open_request_are_free_once_its_prompt_is_made(bridge, feeding, peer, monkeypatch):
    """The request may be open for hours."""
    clips = []

    def noted(message):
        clips.extend(map(weakref.ref, message.recordings))
        return request_of(message)

    monkeypatch.setattr(connections, "request_of", noted)
    reference = protocol.Reference(protocol.AudioClip(bytes(64), 16000))
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello there", is_open=True), [reference]))
    until(lambda: "r" in feeding.deliver)
    peer.send(protocol.Feed("r", " you "))
    until(lambda: feeding.fed)
    until(lambda: clips[0]() is None)


@pytest.mark.parametrize("how", ["cancel", "end", "left"])
def test_what_is_known_of_an_open_request_goes_with_it(bridge, feeding, peer, how):
    other = Peer(bridge.path)
    other.send(protocol.Speak("r", "m", protocol.Request("Hello there", is_open=True)))
    until(lambda: "r" in feeding.deliver)
    assert set(bridge.fed) == {"r"}
    if how == "cancel":
        other.send(protocol.Cancel("r"))
    elif how == "end":
        feeding.deliver["r"](Finished("length", 1, {}))
    else:
        other.close()
    until(lambda: not bridge.fed)
    if how != "left":
        other.send(protocol.Feed("r", "too late", True))
        other.close()
    until(lambda: len(bridge.clients) == 1)
    assert not feeding.fed


def test_a_model_that_takes_no_such_text_refuses_it(bridge, feeding, peer, monkeypatch):
    monkeypatch.setattr(Bytes, "spec", SimpleNamespace(feeds=False, tags=()))
    peer.send(protocol.Speak("r", "m", protocol.Request("Hello", is_open=True)))
    until(lambda: "r" in feeding.requests)
    assert feeding.requests["r"].is_open and not bridge.fed
