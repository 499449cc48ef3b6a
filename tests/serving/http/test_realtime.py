"""Realtime sessions over a real WebSocket, with a fake engine (fake_engine.py)."""

import asyncio
import base64
import json
from unittest.mock import Mock

import numpy as np
import pytest
import soxr
from fake_engine import ANSWERER, CALLER, MODEL, tone
from http_server import Server, until
from metrics import outcomes
from realtime_sessions import KEY, asked, check_is_idle, half_told, pcm, session, talking
from uploads import stored, upload
from websockets.exceptions import ConnectionClosed, InvalidStatus

from serving import protocol
from serving.http.errors import refusal
from serving.http.realtime import conversation, events
from serving.http.realtime.conversation import MAX_ITEMS, Conversation
from serving.http.realtime.hearing import samples_of
from serving.http.references import References
from serving.http.socket import MAX_WRONG
from serving.settings import Limits


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(text_chars=200, reference_s=4, sessions=8)
    where = tmp_path_factory.mktemp("r")
    with Server(where, models=[MODEL, ANSWERER], limits=limits, api_key=KEY) as server:
        yield server


def audio_of(seen):
    return b"".join(base64.b64decode(e["delta"]) for e in seen if e["type"] == "response.output_audio.delta")


def types(seen):
    return [event["type"] for event in seen]


def parts(seen):
    return [event["part"] for event in seen if event["type"].startswith("response.content_part")]


# a turn


def test_a_spoken_turn_is_answered_in_text_and_speech(server):
    before = outcomes(server, "answerer")["stop"]
    with talking(server) as client:
        client.say(pcm(0.5))
        client.send("input_audio_buffer.commit")
        committed = client.next("input_audio_buffer.committed")
        item = client.until("conversation.item.done")["item"]
        assert item["id"] == committed["item_id"] and item["content"][0]["type"] == "input_audio"
        seen = client.answer()
    assert audio_of(seen) == tone(0) + tone(1) + tone(2)
    kinds = types(seen)
    assert kinds[0] == "response.created" and kinds[-1] == "response.done"
    order = [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
    ]
    assert [kind for kind in kinds if kind in order and kinds.index(kind) >= 0][:3] == order[:3]
    assert sorted(order, key=kinds.index) == order
    assert parts(seen) == [{"type": "audio", "transcript": ""}, {"type": "audio", "transcript": "w0 w1 w2 "}]
    done = seen[-1]["response"]
    assert done["output"][0]["status"] == "completed"
    assert done["status"] == "completed" and done["output"][0]["content"][0]["transcript"] == "w0 w1 w2 "
    assert done["usage"]["output_token_details"] == {"text_tokens": 3, "audio_tokens": 3}
    assert done["usage"]["input_token_details"]["audio_tokens"] == 4
    assert outcomes(server, "answerer")["stop"] == before + 1
    [turn] = asked(server).turns
    assert (
        turn.role == "user" and abs(turn.clip.duration_s - 0.5) < 0.01 and turn.clip.sample_rate_hz == 16_000
    )
    heard = np.frombuffer(turn.clip.samples, "<f4")
    expected = soxr.resample(np.frombuffer(pcm(0.5), "<i2").astype("f4") / 32767, 24_000, 16_000)
    assert np.abs(heard[500:-500] - expected[500 : len(heard) - 500]).max() < 1e-3


def test_the_next_turn_has_the_answers_own_tokens(server):
    with talking(server) as client:
        client.configure(instructions="Be brief.")
        client.write("talk 2")
        client.answer()
        client.write("talk 1")
        client.answer()
    system, first, answer, last = asked(server).turns
    assert (
        (system.role, system.text) == ("system", "Be brief.")
        and first.text == "talk 2"
        and last.text == "talk 1"
    )
    assert answer.tokens == (0, 1, 2, 3) and answer.text is None


def test_what_the_user_says_in_two_parts_is_one_turn(server):
    with talking(server) as client:
        for seconds in (0.5, 0.25):
            client.say(pcm(seconds))
            client.send("input_audio_buffer.commit")
            client.until("conversation.item.done")
        client.write("talk 1")
        client.answer()
    [turn] = asked(server).turns
    assert abs(turn.clip.duration_s - 0.75) < 0.01 and turn.text == "talk 1"


def test_clips_that_are_too_large_together_fail_the_answer(server, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_CLIP_BYTES", 4 * 16_000)
    with talking(server) as client:
        client.say(pcm(1.5))
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        done = client.answer()[-1]["response"]
    assert done["status"] == "failed" and "exceed" in done["status_details"]["error"]["message"]


def test_text_alone_is_the_output_text(server):
    with talking(server) as client:
        client.configure(output_modalities=["text"])
        client.write("talk 2")
        seen = client.answer()
    assert not audio_of(seen) and "response.output_text.delta" in types(seen)
    assert parts(seen) == [{"type": "text", "text": ""}, {"type": "text", "text": "w0 w1 "}]
    assert seen[-1]["response"]["output"][0]["content"] == [{"type": "output_text", "text": "w0 w1 "}]


def purity(samples, hz, rate_hz):
    """Return the share of the power that a tone has."""
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))) ** 2
    at = round(hz * len(samples) / rate_hz)
    return power[at - 3 : at + 4].sum() / power.sum()


@pytest.mark.parametrize("law", ["pcmu", "pcma"])
def test_telephone_audio_in_and_out(server, law):
    form = {"type": f"audio/{law}"}
    with talking(server) as client:
        client.configure(
            audio={"input": {"format": form, "turn_detection": None}, "output": {"format": form}}
        )
        client.say(bytes(range(256)) * 16)  # half a second at 8 kHz
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        seen = client.answer()
    heard = samples_of(audio_of(seen), {"pcmu": events.Pcmu(), "pcma": events.Pcma()}[law])
    assert len(heard) == 3 * 640 and purity(heard, 220, 8_000) > 0.99  # one law read as the other: 0.18
    clip = asked(server).turns[0].clip
    assert abs(clip.duration_s - 0.512) < 0.01 and np.frombuffer(clip.samples, "<f4").std() > 0.1


def test_an_answer_at_its_limit_is_incomplete(server):
    with talking(server) as client:
        client.write("talk 2")
        done = client.answer(max_output_tokens=2)[-1]["response"]
    assert asked(server).request.options == {"max_tokens": 2}
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert done["output"][0]["status"] == "incomplete"


def test_an_answer_apart_from_the_conversation(server):
    with talking(server) as client:
        kept = client.write("talk 1")
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "talk 2"}]}
        given = [{"type": "item_reference", "id": kept["id"]}, item]
        seen = client.answer(conversation="none", input=given, metadata={"topic": "a"})
        assert "conversation.item.added" not in types(seen) and seen[-1]["response"]["metadata"] == {
            "topic": "a"
        }
        assert [turn.text for turn in asked(server).turns] == ["talk 1\ntalk 2"]
        client.answer()
        assert [turn.text for turn in asked(server).turns] == ["talk 1"]


def test_items_are_placed_retrieved_and_deleted(server):
    with talking(server) as client:
        last = client.write("talk 1")
        first = client.write("Hello.", previous_item_id="root")
        client.write("Hi.", role="assistant", previous_item_id=first["id"])
        client.write("Be kind.", role="system", previous_item_id="root")
        gone = client.write("Never mind.")
        client.send("conversation.item.delete", item_id=gone["id"])
        assert client.next("conversation.item.deleted")["item_id"] == gone["id"]
        client.send("conversation.item.retrieve", item_id=last["id"])
        assert client.next("conversation.item.retrieved")["item"] == last
        client.answer()
    assert [(turn.role, turn.text) for turn in asked(server).turns] == [
        ("system", "Be kind."),
        ("user", "Hello."),
        ("assistant", "Hi."),
        ("user", "talk 1"),
    ]


# interruptions


def test_a_cancelled_answer_ends_at_once_and_keeps_what_was_sent(server, held):
    with talking(server) as client:
        item_id = half_told(server, client)
        client.send("response.cancel")
        done = client.until("response.done")["response"]
        assert done["status"] == "cancelled" and done["status_details"]["reason"] == "client_cancelled"
        assert done["output"][0]["id"] == item_id and done["output"][0]["status"] == "incomplete"
        server.call(server.engine.go.set)
        client.write("talk 1")
        client.answer()
    assert server.engine.interrupted[-1] in server.engine.messages and not server.engine.talking
    # two frames were made, and one of them was sent: two tokens
    assert asked(server).turns[1].tokens == (0, 1)


def test_an_answer_may_be_cancelled_before_the_engine_knows_it(server, monkeypatch):
    find = References.find

    async def find_late(*given):
        await asyncio.sleep(0.3)
        return await find(*given)

    monkeypatch.setattr(References, "find", find_late)
    server.engine.messages.clear()
    with talking(server) as client:
        client.write("talk 9")
        client.send("response.create")
        client.next("response.created")
        assert not server.engine.messages
        client.send("response.cancel")
        done = client.until("response.done")["response"]
    assert done["status"] == "cancelled" and done["output"] == []


def test_each_item_names_the_one_before_it(server):
    with talking(server) as client:
        client.write("talk 1")
        client.answer()
        client.say(pcm(0.5))
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        done = [event for event in client.seen if event["type"] == "conversation.item.done"]
    ids = [event["item"]["id"] for event in done]
    assert [event["previous_item_id"] for event in done] == [None, *ids[:-1]] and len(ids) == 3


def test_a_conversation_goes_on_from_what_was_heard(server):
    with talking(server) as client:
        client.write("talk 5")
        done = client.answer()[-1]["response"]
        item_id = done["output"][0]["id"]
        client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=250)
        assert client.next("conversation.item.truncated")["audio_end_ms"] == 250
        client.write("talk 1")
        client.answer()
        assert asked(server).turns[1].tokens == tuple(range(6))  # three frames of 80 ms
        client.send("conversation.item.retrieve", item_id=item_id)
        assert client.next("conversation.item.retrieved")["item"]["content"][0]["transcript"] is None


def test_an_answer_that_a_client_adds_may_be_empty(server):
    """A client that repeats an earlier conversation may hold an answer that was interrupted at once."""
    with talking(server) as client:
        assert client.write("", "assistant")["content"] == [{"type": "output_text", "text": ""}]


def test_truncating_an_answer_under_way_ends_it(server, held):
    with talking(server) as client:
        item_id = half_told(server, client)
        client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=0)
        assert client.until("response.done")["response"]["status"] == "cancelled"
        client.next("conversation.item.truncated")
        server.call(server.engine.go.set)
        client.write("talk 1")
        client.answer()
    assert asked(server).turns[1].tokens == ()


def test_a_client_that_leaves_cancels_its_answer_and_leaves_nothing_behind(server, held):
    with talking(server) as client:
        client.say(pcm(1))
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        half_told(server, client)
        id = list(server.engine.messages)[-1]
    until(lambda: id in server.engine.cancelled)
    check_is_idle(server)


# voices


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("v"), models=[CALLER]) as server:
        assert upload(server, "carla").status_code == 200
        yield server


def spoken_in(voice):
    return {"input": {"turn_detection": None}, "output": {"voice": voice}}


def test_a_session_speaks_in_an_uploaded_voice_until_it_chooses_another(speaker):
    with talking(speaker, model="caller", key=None) as client:
        assert client.configure(audio=spoken_in("carla"))["audio"]["output"]["voice"] == "carla"
        client.write("talk 1")
        assert audio_of(client.answer()) == tone(0)
        [reference] = asked(speaker).references
        assert reference.clip == stored(speaker.voices_dir / "carla") and asked(speaker).request.voice is None
        client.configure(audio=spoken_in("anna"))
        client.write("talk 1")
        client.answer()
        assert asked(speaker).request.voice == "anna" and not asked(speaker).references
        client.write("talk 1")
        seen = client.answer(audio={"output": {"voice": {"id": "carla"}}})
        assert seen[0]["response"]["audio"]["output"]["voice"] == "carla" and asked(speaker).references
        client.write("talk 1")
        client.answer(output_modalities=["text"])  # needs no voice
        assert asked(speaker).request.voice is None and not asked(speaker).references


def test_voices_that_do_not_exist_become_null(server, speaker):
    for each, options in ((speaker, {"model": "caller", "key": None}), (server, {})):
        with talking(each, **options) as client:
            assert client.configure(audio=spoken_in("marin"))["audio"]["output"]["voice"] is None


def test_a_voice_that_was_removed_is_an_error_of_the_answer(speaker):
    assert upload(speaker, "doris").status_code == 200
    with talking(speaker, model="caller", key=None) as client:
        client.configure(audio=spoken_in("doris"))
        assert speaker.http.delete("/v1/audio/voices/doris").status_code == 200
        client.write("talk 1")
        client.send("response.create")
        assert "there is no voice 'doris'" in client.error()["message"]
        client.configure(audio=spoken_in("anna"))
        assert audio_of(client.answer()) == tone(0)


# what is wrong


CREATE = "conversation.item.create"
AUDIO = base64.b64encode(pcm(0.2)).decode()
MESSAGE = {"type": "message", "role": "user"}
TEXT = [{"type": "input_text", "text": "a"}]


def heard_with(**input):
    return {"type": "session.update", "session": {"audio": {"input": input}}}


@pytest.mark.parametrize(
    ("event", "param", "message"),
    [
        ({"type": "session.close"}, "type", "'session.close'; possible: session.update, input_audio_buffer.append"),
        ({"type": "session.update", "session": {"type": "x"}}, "session.type", "possible: realtime"),
        ({"type": "session.update", "session": {"output_modalities": ["x"]}}, "session.output_modalities[0]", 'possible: ["audio"]'),
        ({"type": "session.update", "session": {"max_output_tokens": "x"}}, "session.max_output_tokens", 'and "inf"'),
        ({"type": "response.create", "response": {"conversation": "x"}}, "response.conversation", "possible: auto and none"),
        ({"type": CREATE, "item": {**MESSAGE, "role": "x", "content": TEXT}}, "item.role", "possible: user, assistant"),
        ({"type": "session.update", "session": {"modalities": ["text"]}}, "session", "unknown field `modalities`; possible: instructions"),
        ({"type": "session.update", "session": {"audio": {"output": {"speed": 4}}}}, "session.audio.output.speed", "0.25 to 1.5"),
        ({"type": "session.update", "session": {"model": "other"}}, "session.model", "cannot change"),
        ({"type": "session.update", "session": {"tools": [{"name": "a"}]}}, "tools", "takes no tools"),
        ({"type": "session.update", "session": {"instructions": "a" * 201}}, "instructions", "up to 200"),
        (heard_with(turn_detection={"type": "vad"}), "session.audio.input.turn_detection.type", "possible: null"),
        (heard_with(format={"type": "audio/pcm", "rate": 16000}), "session.audio.input.format.rate", "rate 24000"),
        ({"type": "input_audio_buffer.append", "audio": "%"}, "audio", "not base64"),
        ({"type": "input_audio_buffer.append", "audio": "AA=="}, "audio", "two bytes a sample"),
        ({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm(5)).decode()}, "audio", "4 s"),
        ({"type": "input_audio_buffer.commit"}, None, "at least 0.1 s"),
        ({"type": CREATE, "item": {"type": "mcp_call"}}, "item.type", "possible: message, function_call"),
        ({"type": CREATE, "item": {"type": "function_call_output", "call_id": "a", "output": "b"}}, "item.type", "takes no tools"),
        ({"type": CREATE, "item": {**MESSAGE, "content": [{"type": "input_text"}]}}, "item.content", "neither"),
        ({"type": CREATE, "item": {**MESSAGE, "content": [{"type": "input_text", "text": ""}]}}, "item.content", "neither"),
        ({"type": CREATE, "item": {**MESSAGE, "content": [{"type": "input_audio", "audio": ""}]}}, "item.content", "0.01 to 4 s"),
        ({"type": CREATE, "item": {**MESSAGE, "content": [{"type": "input_audio", "audio": AUDIO}] * 2}}, "item.content", "at most one"),
        ({"type": CREATE, "item": {**MESSAGE, "content": [{"type": "input_text", "text": "a" * 201}]}}, "item.content", "up to 200"),
        ({"type": CREATE, "item": {**MESSAGE, "content": TEXT}, "previous_item_id": "b"}, "previous_item_id", "no item 'b'"),
        ({"type": "conversation.item.delete", "item_id": "b"}, "item_id", "no item 'b'"),
        ({"type": "conversation.item.truncate", "item_id": "b", "content_index": 0, "audio_end_ms": 1}, "item_id", "no item"),
        ({"type": "conversation.item.truncate", "item_id": "b", "content_index": 1, "audio_end_ms": 1}, "content_index", ""),
        ({"type": "response.cancel"}, None, "no answer is under way"),
        ({"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "b"}]}}, "response.input[0].id", "no item"),
        ({"type": "response.create", "response": {"input": [{"type": "message"}]}}, "response.input", "role"),
    ],
)  # fmt: skip
def test_a_wrong_event_gets_an_error_that_names_it(server, event, param, message):
    with talking(server) as client:
        client.send(**event, event_id="mine")
        error = client.error()
        assert error["event_id"] == "mine" and error["param"] == param and message in error["message"], error
        client.configure()  # the session goes on


def test_a_refused_commit_leaves_the_audio_in_the_buffer(server, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_ITEMS", 1)
    with talking(server) as client:
        item = client.write("talk 1")
        client.say(pcm(0.5))
        client.send("input_audio_buffer.commit")
        assert client.error()["code"] == "too_many_items"
        client.send("conversation.item.delete", item_id=item["id"])
        client.next("conversation.item.deleted")
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        client.send("input_audio_buffer.commit")
        assert client.error()["code"] == "input_audio_buffer_commit_empty"


def test_silence_is_refused_and_later_turns_are_answered(server):
    with talking(server) as client:
        client.say(bytes(24_000))
        client.send("input_audio_buffer.commit", event_id="mine")
        error = client.error()
        assert (error["event_id"], error["code"]) == ("mine", "invalid_audio")
        assert "is silent" in error["message"]
        part = {"type": "input_audio", "audio": base64.b64encode(bytes(24_000)).decode()}
        client.send(CREATE, item={**MESSAGE, "content": [part]})
        assert client.error()["param"] == "item.content"
        client.say(pcm(0.5))
        client.send("input_audio_buffer.commit")
        client.until("conversation.item.done")
        assert client.answer()[-1]["response"]["status"] == "completed"
    [turn] = asked(server).turns
    assert abs(turn.clip.duration_s - 1) < 0.01


def test_only_one_answer_at_a_time(server, held):
    with talking(server) as client:
        half_told(server, client)
        client.send("response.create")
        assert client.error()["code"] == "conversation_already_has_active_response"


def test_a_heard_end_behind_the_audio_is_refused(server):
    with talking(server) as client:
        client.write("talk 2")
        item_id = client.answer()[-1]["response"]["output"][0]["id"]
        client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=500)
        assert "160 ms" in client.error()["message"]


def test_a_wrong_end_of_what_was_heard_does_not_end_the_answer(server, held):
    with talking(server) as client:
        item_id = half_told(server, client)
        client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=9000)
        assert client.error()["param"] == "audio_end_ms"
        server.call(server.engine.go.set)
        assert client.until("response.done")["response"]["status"] == "completed"


def test_a_full_conversation_has_no_room_for_an_answer(server, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_ITEMS", 1)
    with talking(server) as client:
        client.write("talk 1")
        client.send("response.create")
        assert client.error()["code"] == "too_many_items"
        client.answer(conversation="none")


def test_an_answer_that_finds_no_room_has_no_item(server, monkeypatch):
    """Items may come while the answer is prepared."""
    rooms = Mock(side_effect=[None, None, refusal(400, "full")])  # the client's item, the answer, its item
    monkeypatch.setattr(Conversation, "check_room", rooms)
    with talking(server) as client:
        client.write("talk 1")
        seen = client.answer()
    assert types(seen) == ["response.created", "response.done"]
    assert seen[-1]["response"]["status"] == "failed" and seen[-1]["response"]["output"] == []


def test_a_request_that_the_engine_refuses_is_a_failed_response(server):
    with talking(server) as client:
        client.write("reject 1")
        done = client.answer()[-1]["response"]
    assert (
        done["status"] == "failed"
        and "conversation are not possible" in done["status_details"]["error"]["message"]
    )


@pytest.mark.slow
def test_a_conversation_is_bounded(server):
    with talking(server) as client:
        for _ in range(MAX_ITEMS):
            client.write("a")
        item = {**MESSAGE, "content": [{"type": "input_text", "text": "a"}]}
        client.send(CREATE, item=item)
        assert client.error()["code"] == "too_many_items"


def test_too_many_wrong_events_close_the_session(server):
    with talking(server) as client, pytest.raises(ConnectionClosed) as closed:
        for _ in range(MAX_WRONG + 1):
            client.send("nonsense")
            client.error()
    assert closed.value.rcvd.code == 1008


def test_an_idle_session_is_closed(tmp_path):
    with Server(tmp_path, models=[ANSWERER], limits=Limits(session_idle_s=0.2)) as server:
        with session(server, model=None, key=None) as client, pytest.raises(ConnectionClosed) as closed:
            while True:
                client.receive()
        assert closed.value.rcvd.code == 4408


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"key": "wrong"}, 401, "API key"),
        ({"model": "nobody"}, 404, "not served"),
        ({"model": "fake"}, 400, "use POST /v1/audio/speech"),
        ({"model": "tts-1"}, 404, "not served"),
    ],
)
def test_a_session_that_cannot_begin_is_refused_with_a_reason(server, options, status, message):
    with pytest.raises(InvalidStatus) as refused, session(server, **options):
        pass
    assert refused.value.response.status_code == status
    assert message in json.loads(refused.value.response.body)["error"]["message"]


def test_a_browser_gives_the_key_as_a_subprotocol(server):
    protocols = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with session(server, key=None, subprotocols=protocols) as client:
        client.next("session.created")
        assert client.socket.subprotocol == "realtime"


@pytest.mark.parametrize(
    "name", [None, "gpt-realtime", "gpt-realtime-mini-2025-12-15", "gpt-4o-realtime-preview"]
)
def test_openais_names_mean_the_only_model_that_answers(server, name):
    with session(server, model=name) as client:
        assert client.next("session.created")["session"]["model"] == "answerer"
        assert client.configure(model=name)["model"] == "answerer"


def test_detection_by_words_becomes_detection_by_silence(server):
    """Agent frameworks ask for it by default."""
    detection = {"type": "semantic_vad", "eagerness": "auto", "interrupt_response": False}
    with talking(server) as client:
        settings = client.configure(audio={"input": {"turn_detection": detection}})
    assert settings["audio"]["input"]["turn_detection"] == {
        "type": "server_vad",
        "threshold": 0.5,
        "prefix_padding_ms": 300,
        "silence_duration_ms": 500,
        "create_response": True,
        "interrupt_response": False,
        "idle_timeout_ms": None,
    }


def test_the_default_settings_are_openais():
    settings = events.Settings()
    assert settings.has_audio and settings.max_tokens is None and settings.speed == 1
    assert events.ServerVad().silence_duration_ms == 500 and events.ServerVad().prefix_padding_ms == 300
