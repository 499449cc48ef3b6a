"""Realtime sessions whose server finds out where turns begin and end, with a fake engine (fake_engine.py)."""

import base64
import gc
import socket
import weakref
from typing import ClassVar

import numpy as np
import pytest
from fake_engine import ANSWERER, MODEL
from http_server import Server, until
from realtime_sessions import KEY, asked, half_told, pcm, session

from serving.audio import voice_activity
from serving.http.realtime import conversation
from serving.settings import Limits


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(reference_s=4)
    where = tmp_path_factory.mktemp("r")
    with Server(where, models=[MODEL, ANSWERER], limits=limits, api_key=KEY) as server:
        yield server


class Loud:
    """Stands for the network: what is loud is speech."""

    alive: ClassVar = weakref.WeakSet()

    def __init__(self):
        Loud.alive.add(self)

    def __call__(self, chunk):
        return float(np.abs(np.frombuffer(chunk, "<i2")).max() > 1000)

    def reset(self):
        pass


@pytest.fixture
def loud_is_speech(monkeypatch):
    monkeypatch.setattr(voice_activity, "network", Loud)
    monkeypatch.setattr(voice_activity, "is_installed", lambda: True)


SILENCE = bytes(2 * 24_000)
QUIET = np.full(24_000, 100, "<i2").tobytes()


def test_speech_is_detected_committed_and_answered(server, loud_is_speech):
    with session(server) as client:
        created = client.next("session.created")["session"]
        assert created["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        client.say(SILENCE + pcm(0.6) + SILENCE)
        started = client.next("input_audio_buffer.speech_started")
        stopped = client.next("input_audio_buffer.speech_stopped")
        committed = client.next("input_audio_buffer.committed")
        assert started["item_id"] == stopped["item_id"] == committed["item_id"]
        assert abs(started["audio_start_ms"] - 700) <= 35 and abs(stopped["audio_end_ms"] - 2100) <= 50
        client.until("response.done")
    clip = asked(server).turns[0].clip
    assert abs(clip.duration_s - (stopped["audio_end_ms"] - started["audio_start_ms"]) / 1000) < 0.01


def test_speech_during_an_answer_interrupts_it(server, held, loud_is_speech):
    with session(server) as client:
        client.next("session.created")
        half_told(server, client)
        client.say(pcm(0.2))
        client.until("input_audio_buffer.speech_started")
        done = client.until("response.done")["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert not server.engine.talking
        server.call(server.engine.go.set)
        client.say(SILENCE)
        assert client.until("response.done")["response"]["status"] == "completed"
    assert [turn.role for turn in asked(server).turns] == ["user", "assistant", "user"]


def test_a_client_may_do_without_automatic_answers_and_interruptions(server, held, loud_is_speech):
    detection = {"type": "server_vad", "create_response": False, "interrupt_response": False}
    with session(server) as client:
        client.next("session.created")
        client.configure(audio={"input": {"turn_detection": detection}})
        half_told(server, client)
        client.say(pcm(0.2) + SILENCE)
        client.until("input_audio_buffer.committed")
        server.call(server.engine.go.set)
        assert client.until("response.done")["response"]["status"] == "completed"
        client.answer()
    assert len(asked(server).turns) == 3


def test_speech_without_an_end_becomes_turns_of_the_longest_length(server, loud_is_speech):
    detection = {"type": "server_vad", "create_response": False}
    with session(server) as client:
        client.next("session.created")
        client.configure(audio={"input": {"turn_detection": detection}})
        for _ in range(5):
            client.say(pcm(1))
        client.until("input_audio_buffer.committed")
        client.until("input_audio_buffer.speech_started")


def test_audio_without_speech_is_not_kept(server, loud_is_speech):
    with session(server) as client:
        client.next("session.created")
        client.say(6 * QUIET)  # longer than the buffer
        client.send("input_audio_buffer.commit")
        client.until("input_audio_buffer.committed")
        client.answer()
    assert asked(server).turns[0].clip.duration_s == pytest.approx(0.3, abs=0.04)  # the prefix padding


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_session_has_a_network_from_its_first_audio_to_its_end(server, loud_is_speech, is_closed):
    """The garbage collector would find ended sessions late, since it does not count the bytes of networks."""
    gc.collect()
    gc.disable()
    try:
        with session(server) as client:
            client.next("session.created")
            assert not Loud.alive
            client.say(SILENCE + pcm(0.6) + SILENCE)
            client.until("response.done")
            assert len(Loud.alive) == 1
            if not is_closed:
                client.socket.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: not Loud.alive)
    finally:
        gc.enable()


def test_without_the_package_the_client_is_told_once(server, monkeypatch):
    monkeypatch.setattr(voice_activity, "is_installed", lambda: False)
    with session(server) as client:
        created = client.next("session.created")["session"]
        assert created["audio"]["input"]["turn_detection"] is None
        client.say(pcm(0.4))
        assert "pip install -e '.[realtime]'" in client.error()["message"]
        client.send("input_audio_buffer.commit")
        client.next("input_audio_buffer.committed")
        session_ = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        client.until("conversation.item.done")
        client.send("session.update", session=session_)
        assert client.error()["code"] == "not_installed"


def test_a_refused_turn_does_not_hide_the_next_one_of_the_same_audio(server, loud_is_speech, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_ITEMS", 1)
    with session(server) as client:
        client.next("session.created")
        client.write("talk 1")
        audio = SILENCE + pcm(0.6) + SILENCE + pcm(0.6) + SILENCE
        client.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode())
        ids = []
        for _ in range(2):
            ids.append(client.next("input_audio_buffer.speech_started")["item_id"])
            assert client.next("input_audio_buffer.speech_stopped")["item_id"] == ids[-1]
            assert client.error()["code"] == "too_many_items"
    assert len(set(ids)) == 2
