"""Tools in realtime sessions, with a fake engine (fake_engine.py), and the turns that a model reads."""

import pytest
from fake_engine import CALL, CALL_TOKENS, CALLER
from http_server import Server
from realtime_sessions import KEY, asked, half_told, talking

from serving.http.answers import Answer
from serving.http.realtime.conversation import Call, Conversation, Item, Speech
from serving.http.tool_calls import written
from serving.settings import Limits

TOOL = {"type": "function", "name": "add", "description": "Sums.", "parameters": {"type": "object"}}
SCHEMAS = '[{"type": "function", "function": {"name": "add", "description": "Sums.", "parameters": {"type": "object"}}}]'
ARGUMENTS = '{"a": 1}'
CREATE = "conversation.item.create"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(text_chars=200, reference_s=4, sessions=8)
    with Server(tmp_path_factory.mktemp("r"), models=[CALLER], limits=limits, api_key=KEY) as server:
        yield server


@pytest.fixture
def client(server):
    with talking(server, model="caller") as client:
        session = client.configure(tools=[TOOL], tool_choice="auto")
        assert session["tools"] == [TOOL] and session["tool_choice"] == "auto"
        yield client


def give(client, call_id, output):
    item = {"type": "function_call_output", "call_id": call_id, "output": output}
    client.send(CREATE, item=item)
    return client.until("conversation.item.done")["item"]


def call_of(seen):
    [done] = [event for event in seen if event["type"] == "response.function_call_arguments.done"]
    return done["call_id"]


def turns(server):
    return [(turn.role, turn.tokens or turn.text) for turn in asked(server).turns]


def test_a_spoken_answer_calls_a_tool_and_the_next_one_has_its_result(server, client):
    client.write("call 3")
    seen = client.answer()
    message, call = seen[-1]["response"]["output"]
    assert (
        message["content"][0]["transcript"] == "Hm. w0 w1 w2 "
        and seen[-1]["response"]["status"] == "completed"
    )
    assert call["type"] == "function_call" and (call["name"], call["arguments"]) == ("add", ARGUMENTS)
    kinds = [event["type"] for event in seen if event.get("output_index") == 1]
    assert kinds == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    result = give(client, call["call_id"], "talk 1")
    assert result["output"] == "talk 1" and result["call_id"] == call["call_id"]
    client.answer()
    expected = [
        ("tools", SCHEMAS),
        ("user", "call 3"),
        ("assistant", (*range(6), *CALL_TOKENS)),
        ("tool", "talk 1"),
    ]
    assert turns(server) == expected


def test_an_answer_may_be_a_call_alone(server, client):
    client.write("only 0")
    seen = client.answer()
    [call] = seen[-1]["response"]["output"]
    assert call["type"] == "function_call" and not [event for event in seen if "delta" in event["type"]][1:]
    give(client, call["call_id"], "talk 1")
    client.answer()
    assert turns(server) == [
        ("tools", SCHEMAS),
        ("user", "only 0"),
        ("assistant", tuple(CALL_TOKENS)),
        ("tool", "talk 1"),
    ]


def test_a_text_and_its_call_are_one_turn(server, client):
    client.configure(output_modalities=["text"], instructions="Be brief.")
    client.write("call 0")
    call_id = call_of(client.answer())
    give(client, call_id, "talk 1")
    client.answer()
    said = ("assistant", f"Hm. {CALL}")
    expected = [("system", "Be brief."), ("tools", SCHEMAS), ("user", "call 0"), said, ("tool", "talk 1")]
    assert turns(server) == expected and asked(server).request.output == "text"


def test_a_call_stays_when_its_answer_is_truncated(server, client):
    client.write("call 2")
    seen = client.answer()
    message, call = seen[-1]["response"]["output"]
    client.send("conversation.item.truncate", item_id=message["id"], content_index=0, audio_end_ms=80)
    client.next("conversation.item.truncated")
    give(client, call["call_id"], "talk 1")
    client.answer()
    assert turns(server)[2:] == [("assistant", f"Hm. w0 {CALL}"), ("tool", "talk 1")]


@pytest.mark.parametrize("choice", [{"tool_choice": "none"}, {"tools": []}])
def test_an_answer_may_go_without_tools(server, client, choice):
    client.write("call 0")
    [message] = client.answer(**choice)[-1]["response"]["output"]
    assert message["content"][0]["transcript"] == f"Hm. {CALL}" and turns(server) == [("user", "call 0")]
    client.write("call 0")
    assert call_of(client.answer())  # the session has them still


def test_an_interrupted_answer_calls_nothing(server, client):
    try:
        half_told(server, client)
        client.send("response.cancel")
        response = client.until("response.done")["response"]
    finally:
        server.call(server.engine.go.set)
    assert response["status"] == "cancelled" and len(response["output"]) == 1


def test_a_call_that_was_cut_off_is_not_read(server, client, held):
    server.call(server.engine.go.clear)
    client.write("half 3")
    client.send("response.create")
    client.until("response.output_audio.delta")
    client.send("response.cancel")
    assert client.until("response.done")["response"]["status"] == "cancelled"
    server.call(server.engine.go.set)
    client.write("talk 1")
    client.answer()
    assert turns(server)[1:] == [("user", "half 3"), ("assistant", ""), ("user", "talk 1")]


def test_a_call_comes_behind_its_message_and_not_behind_a_later_item(server, client, held):
    server.call(server.engine.go.clear)
    client.write("call 3")
    client.send("response.create")
    message = client.until("response.output_audio.delta")["item_id"]
    client.write("talk 2")
    server.call(server.engine.go.set)
    call = client.until("response.done")["response"]["output"][1]
    [done] = [
        each for each in client.seen if each["type"] == "conversation.item.done" and each["item"] == call
    ]
    assert done["previous_item_id"] == message
    give(client, call["call_id"], "7")
    client.write("talk 1")
    client.answer()
    assert [role for role, _ in turns(server)] == ["tools", "user", "assistant", "tool", "user"]


def test_a_client_may_tell_of_earlier_calls(server, client):
    client.write("Add one and two.")
    item = {"type": "function_call", "call_id": "a", "name": "add", "arguments": ARGUMENTS}
    client.send(CREATE, item=item)
    client.until("conversation.item.done")
    give(client, "a", "talk 1")
    client.answer()
    said = [("assistant", CALL), ("tool", "talk 1")]
    assert turns(server) == [("tools", SCHEMAS), ("user", "Add one and two."), *said]


def test_a_full_conversation_takes_a_call(client, monkeypatch):
    monkeypatch.setattr("serving.http.realtime.conversation.MAX_ITEMS", 2)
    client.write("call 1")
    call_id = call_of(client.answer())
    client.send(CREATE, item={"type": "function_call_output", "call_id": call_id, "output": "1"})
    assert client.error()["code"] == "too_many_items"


def updated(**session):
    return {"type": "session.update", "session": session}


def result(**fields):
    return {"type": CREATE, "item": {"type": "function_call_output", "call_id": "b", "output": "1"} | fields}


@pytest.mark.parametrize(
    ("event", "param", "message"),
    [
        (updated(tools=[{"type": "mcp", "name": "a"}]), "session.tools[0].type", "possible: a list of up to 128"),
        (updated(tools=[{"type": "function"}]), "session.tools[0]", "missing required field `name`"),
        (updated(tools=[TOOL | {"name": ""}]), "session.tools[0].name", "length >= 1"),
        (updated(tools=[TOOL | {"description": "a" * 800}]), "tools", "takes up to 800"),
        (updated(tool_choice="required"), "session.tool_choice", "possible: auto and none"),
        (updated(tool_choice={"type": "function", "name": "add"}), "session.tool_choice", "possible: auto and none"),
        (result(), "item.call_id", "there is no call 'b'"),
        (result(output="a" * 201), "item", "up to 200"),
        (result(call_id=""), "item.call_id", "length >= 1"),
    ],
)  # fmt: skip
def test_a_wrong_event_gets_an_error_that_names_it(client, event, param, message):
    client.send(**event)
    error = client.error()
    assert error["param"] == param and message in error["message"], error


# the turns that a model reads


def user(text="a"):
    return Item("user", text)


def called(id="c", **fields):
    return Item("assistant", call=Call("add", ARGUMENTS, id), **fields)


def got(text, id="c"):
    return Item("tool", text, result_of=id)


def spoken():
    """Return an answer with audio whose tokens call a tool, and the call."""
    speech = Speech(0.0125, 1, Answer.of(Answer([1, 2, 3], [2])), [(0, "Hm.")])
    message = Item("assistant", "Hm.", speech=speech)
    return message, called(first=message)


def read(*items):
    return [(turn.role, turn.tokens or turn.text) for turn in Conversation(list(items)).turns("")]


def test_what_is_said_while_a_tool_works_comes_behind_its_result():
    call = ("assistant", CALL)
    assert read(user(), called(), user("b"), got("1"), user("c")) == [
        ("user", "a"),
        call,
        ("tool", "1"),
        ("user", "b\nc"),
    ]


def test_a_result_comes_behind_the_answer_that_did_not_wait_for_it():
    items = [user(), called(), user("b"), Item("assistant", "Wait."), got("1")]
    assert [role for role, _ in read(*items)] == ["user", "assistant", "user", "assistant", "tool"]


def test_results_come_in_the_order_of_their_calls():
    calls = [called("c"), called("d")]
    expected = [("user", "a"), ("assistant", CALL * 2), ("tool", "1"), ("tool", "2")]
    assert read(user(), *calls, got("2", "d"), got("1", "c")) == expected


def test_an_answers_own_tokens_have_its_calls():
    message, call = spoken()
    assert read(user(), message, call, got("1")) == [("user", "a"), ("assistant", (1, 2, 3)), ("tool", "1")]


def test_a_deleted_call_is_no_longer_read():
    message, call = spoken()
    conversation = Conversation([user(), message, call, user("b")])
    conversation.delete(call.id)
    assert [turn.text for turn in conversation.turns("")] == ["a", "Hm.", "b"]


def test_a_call_is_read_when_its_message_is_deleted():
    message, call = spoken()
    conversation = Conversation([user(), message, call, got("1")])
    conversation.delete(message.id)
    expected = [("user", "a"), ("assistant", written("add", ARGUMENTS)), ("tool", "1")]
    assert [(turn.role, turn.text) for turn in conversation.turns("")] == expected
