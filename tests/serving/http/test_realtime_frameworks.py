"""What agent frameworks send to a realtime session, with a fake engine (fake_engine.py). The events are those of OpenAI's
Agents SDK 0.24.0, LiveKit Agents 1.8.9 and Pipecat 1.14.0, in their default settings."""

import pytest
from fake_engine import CALLER, TRANSCRIBER
from http_server import Server
from realtime_sessions import KEY, asked, session

from serving.audio import voice_activity

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Sums.",
    "parameters": {"type": "object", "properties": {}},
}
PCM = {"rate": 24000, "type": "audio/pcm"}
WORDS = {"model": "gpt-4o-mini-transcribe"}
SEMANTIC = {"type": "semantic_vad", "interrupt_response": True}
AGENTS_SDK = {
    "type": "realtime",
    "audio": {
        "input": {"format": PCM, "transcription": WORDS, "turn_detection": SEMANTIC},
        "output": {"format": PCM, "voice": "ash"},
    },
    "instructions": "Be brief.",
    "model": "gpt-realtime-2.1",
    "output_modalities": ["audio"],
    "tools": [TOOL],
}
LIVEKIT = {
    "type": "realtime",
    "audio": {
        "input": {
            "format": PCM,
            "noise_reduction": None,
            "transcription": WORDS,
            "turn_detection": {**SEMANTIC, "create_response": True, "eagerness": "medium"},
        },
        "output": {"format": PCM, "speed": 1.0, "voice": "marin"},
    },
    "max_output_tokens": "inf",
    "model": "gpt-realtime",
    "output_modalities": ["audio"],
    "tool_choice": "auto",
    "tracing": None,
}
PIPECAT = {"type": "realtime", "model": "gpt-realtime", "instructions": "Be brief.", "tools": [TOOL]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("r"), models=[CALLER, TRANSCRIBER], api_key=KEY) as server:
        yield server


@pytest.fixture
def client(server, monkeypatch):
    monkeypatch.setattr(voice_activity, "is_installed", lambda: True)
    with session(server, model="gpt-realtime") as client:
        client.next("session.created")
        yield client


def update(client, settings):
    client.send("session.update", session=settings)
    return client.next("session.updated")["session"]


def turns(server):
    return [(turn.role, turn.tokens or turn.text) for turn in asked(server).turns]


@pytest.mark.parametrize("settings", [AGENTS_SDK, LIVEKIT, PIPECAT], ids=["agents-sdk", "livekit", "pipecat"])
def test_the_default_settings_of_a_framework_are_taken(client, settings):
    taken = update(client, settings)
    assert taken["model"] == "caller" and taken["tools"] == settings.get("tools", [])
    if "audio" in settings:
        assert taken["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        assert taken["audio"]["input"]["transcription"] == {"model": "transcriber", "language": None}


@pytest.mark.parametrize("asked_for", [{}, {"instructions": None, "tools": None, "max_output_tokens": None}])
def test_a_null_in_a_response_is_the_sessions_own(server, client, asked_for):
    """LiveKit sends null for what it does not set."""
    update(client, PIPECAT | {"max_output_tokens": 7})
    client.write("talk 1")
    response = client.answer(**asked_for)[-1]["response"]
    assert response["max_output_tokens"] == 7
    assert [role for role, _ in turns(server)] == ["system", "tools", "user"]


@pytest.mark.parametrize("own", ["talk 2", "Be brief.\ntalk 2"])
def test_an_answer_without_a_turn_follows_its_instructions(server, client, own):
    """LiveKit's generate_reply greets the user, and puts the session's instructions in front of its own."""
    update(client, {"type": "realtime", "instructions": "Be brief."})
    client.answer(instructions=own)
    assert turns(server) == [("system", "Be brief."), ("user", "talk 2")]
    client.write("talk 1")
    client.answer()
    greeting = [("user", "talk 2"), ("assistant", (0, 1, 2, 3))]
    assert turns(server) == [("system", "Be brief."), *greeting, ("user", "talk 1")]
    client.answer(instructions="talk 3")  # the user says nothing
    assert turns(server)[-2:] == [("assistant", (0, 1)), ("user", "talk 3")]


def test_an_answer_without_a_turn_follows_the_sessions_instructions(server, client):
    update(client, {"type": "realtime", "instructions": "talk 1"})
    client.answer()
    assert turns(server) == [("user", "talk 1")]


def test_an_answer_without_a_turn_follows_the_systems_last_message(server, client):
    update(client, {"type": "realtime", "instructions": "Be brief."})
    client.write("talk 1", role="system")
    client.answer()
    assert turns(server) == [("system", "Be brief.\ntalk 1"), ("user", "talk 1")]


def test_a_call_without_a_turn_follows_its_instructions(server, client):
    update(client, {"type": "realtime", "tools": [TOOL]})
    [call] = client.answer(instructions="only 0")[-1]["response"]["output"]
    item = {"type": "function_call_output", "call_id": call["call_id"], "output": "talk 1"}
    client.send("conversation.item.create", item=item)
    client.answer()
    assert [role for role, _ in turns(server)] == ["tools", "user", "assistant", "tool"]


def test_instructions_replace_the_sessions_where_a_turn_waits(server, client):
    update(client, {"type": "realtime", "instructions": "Be brief."})
    client.write("talk 1")
    client.answer(instructions="Be kind.")
    assert turns(server) == [("system", "Be kind."), ("user", "talk 1")]


def test_errors_have_the_codes_that_frameworks_know(client):
    """LiveKit and Pipecat pass over a late cancel, and the first goes on if an item is there already."""
    update(client, PIPECAT)
    client.send("response.cancel")
    late = client.error()
    assert late["code"] == "response_cancel_not_active" and late["message"].startswith("Cancellation failed")
    item = client.write("talk 1")
    client.send("conversation.item.create", item=item)
    assert client.error()["code"] == "item_create_duplicate_item_id"
    for kind, fields in (
        ("retrieve", {}),
        ("delete", {}),
        ("truncate", {"content_index": 0, "audio_end_ms": 1}),
    ):
        client.send(f"conversation.item.{kind}", item_id="nobody", **fields)
        assert client.error()["code"] == f"item_{kind}_invalid_item_id"
