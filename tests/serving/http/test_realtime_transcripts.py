"""The words of what the user said in a realtime session, with a fake engine (fake_engine.py)."""

import pytest
from fake_engine import ANSWERER, MODEL, TRANSCRIBER
from http_server import Server, until
from realtime_sessions import KEY, asked, check_is_idle, pcm, session, talking

from serving.audio import voice_activity
from serving.http.errors import refusal
from serving.settings import Limits

WORDS = "Guten Morgen."
EVENT = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits, models = Limits(reference_s=4), [MODEL, ANSWERER, TRANSCRIBER]
    with Server(tmp_path_factory.mktemp("r"), models=models, limits=limits, api_key=KEY) as server:
        yield server


def with_words(**transcription):
    return {"input": {"turn_detection": None, "transcription": transcription}}


def commit(client, seconds=0.5):
    client.say(pcm(seconds))
    client.send("input_audio_buffer.commit")
    return client.until("conversation.item.done")["item"]["id"]


def requested(server):
    return list(server.engine.messages.values())


@pytest.mark.parametrize("name", ["transcriber", "whisper-1", "gpt-4o-mini-transcribe", None])
def test_the_client_gets_the_words_of_a_turn(server, name):
    with talking(server) as client:
        settings = client.configure(audio=with_words(model=name, language="de"))
        assert settings["audio"]["input"]["transcription"] == {"model": "transcriber", "language": "de"}
        id = commit(client)
        deltas = [client.next(f"{EVENT}.delta") for _ in range(2)]
        done = client.next(f"{EVENT}.completed")
        assert "".join(each["delta"] for each in deltas).strip() == done["transcript"] == WORDS
        assert {each["item_id"] for each in [*deltas, done]} == {id} and done["usage"]["output_tokens"] == 4
        message = asked(server)
        assert message.request.output == "transcript" and message.request.language == "de"
        client.send("conversation.item.retrieve", item_id=id)
        content = client.next("conversation.item.retrieved")["item"]["content"]
        assert content == [{"type": "input_audio", "transcript": WORDS}]
        client.answer()
        [turn] = asked(server).turns
        assert turn.clip is not None and turn.text is None  # the model hears the audio


@pytest.mark.parametrize("input", [with_words(model="nobody"), {"input": {"transcription": None}}, {}])
def test_without_a_model_that_can_there_are_no_words(server, input):
    with talking(server) as client:
        client.configure(audio=with_words())
        settings = client.configure(audio={"input": {"turn_detection": None} | input.get("input", {})})
        is_kept = not input
        assert (settings["audio"]["input"]["transcription"] is not None) is is_kept
        commit(client)
        seen = client.answer()
    assert any(event["type"].startswith(EVENT) for event in seen) is is_kept


def test_transcripts_are_written_one_at_a_time_and_in_order(server, held):
    server.engine.messages.clear()
    server.call(server.engine.go.clear)
    with talking(server) as client:
        client.configure(audio=with_words())
        ids = [commit(client) for _ in range(3)]
        until(lambda: len(requested(server)) == 1)
        server.call(server.engine.go.set)
        assert [client.until(f"{EVENT}.completed")["item_id"] for _ in ids] == ids
    assert len(requested(server)) == 3


def test_an_answer_is_asked_for_before_the_words(server, monkeypatch):
    monkeypatch.setattr(voice_activity, "network", Loud)
    monkeypatch.setattr(voice_activity, "is_installed", lambda: True)
    server.engine.messages.clear()
    with session(server) as client:
        client.next("session.created")
        client.configure(audio={"input": {"transcription": {}, "turn_detection": {"type": "server_vad"}}})
        client.say(pcm(0.6) + bytes(48_000))
        client.until("response.done")
        until(lambda: len(requested(server)) == 2)
    assert [message.request.output for message in requested(server)] == ["speech", "transcript"]


class Loud:
    """Stands for the network: what is loud is speech."""

    def __call__(self, chunk):
        return float(any(chunk))

    def reset(self):
        pass


def test_a_failure_names_its_item_and_the_next_turn_has_words(server, monkeypatch):
    def full(num_chars):
        monkeypatch.undo()
        raise refusal(503, "full", code="engine_full")

    monkeypatch.setattr("serving.http.realtime.transcripts.admit", full)
    with talking(server) as client:
        client.configure(audio=with_words())
        id = commit(client)
        failed = client.next(f"{EVENT}.failed")
        assert failed["item_id"] == id and failed["error"]["code"] == "engine_full"
        commit(client)
        assert client.until(f"{EVENT}.completed")["transcript"] == WORDS


def test_a_client_that_leaves_ends_its_transcripts(server, held):
    server.engine.messages.clear()
    server.call(server.engine.go.clear)
    with talking(server) as client:
        client.configure(audio=with_words())
        commit(client)
        commit(client)
        until(lambda: requested(server))
        [id] = server.engine.messages
    until(lambda: id in server.engine.cancelled)
    check_is_idle(server)
