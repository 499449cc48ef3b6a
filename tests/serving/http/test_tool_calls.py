"""Tools and voices of chat completions, through OpenAI's own client with a fake engine (fake_engine.py)."""

import openai
import pytest
from fake_engine import ANSWERER, CALLER
from http_server import Server
from uploads import recording

from serving.http.tool_calls import Calls, read, written
from serving.settings import Limits

CALL = written("add", '{"a": 1}')
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SCHEMAS = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
LARGE = [{"type": "function", "function": {"name": "add", "description": "a" * 4 * Limits().text_chars}}]
ASK = {"role": "user", "content": "call 0"}
AUDIO = {"modalities": ["text", "audio"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("t"), models=[CALLER, ANSWERER], limits=Limits()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(client, messages, **fields):
    return client.chat.completions.create(**{"model": "caller", "messages": messages, **fields})


def sent(server):
    return list(server.engine.messages.values())[-1]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_call_is_taken_out_of_a_text_that_arrives_in_parts(size):
    text, calls = f"a <b {CALL} c <tool_", Calls()
    shown = "".join(calls.take(text[i : i + size]) for i in range(0, len(text), size))
    assert (shown, calls.rest(), calls.found) == ("a <b  c ", "<tool_", [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    "inside", ["", "function", "function\nadd", "other\nadd\n{}", "function\nadd\n{", "function\nadd\n1"]
)
def test_what_is_no_call_stays_text(inside):
    text, calls = f"<tool_call>{inside}</tool_call>", Calls()
    assert read(inside) is None and calls.take(text) + calls.rest() == text and not calls.found


def test_a_call_without_an_end_is_text():
    calls = Calls()
    assert calls.take(CALL[:-3]) + calls.rest() == CALL[:-3]


def test_an_answer_calls_a_tool(client, server):
    [choice] = asked(client, [ASK], tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm. "
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, call.type) == ("add", '{"a": 1}', "function")
    assert [(turn.role, turn.text) for turn in sent(server).turns] == [("tools", SCHEMAS), ("user", "call 0")]


def test_a_stream_calls_a_tool(client):
    deltas = [chunk.choices[0] for chunk in asked(client, [ASK], tools=TOOLS, stream=True)]
    assert "".join(each.delta.content or "" for each in deltas) == "Hm. "
    [call] = [call for each in deltas for call in each.delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 1}')
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_text_stays_as_it_is(client, server, fields):
    [choice] = asked(client, [ASK], **fields).choices
    assert choice.message.content == f"Hm. {CALL}" and choice.finish_reason != "tool_calls"
    assert choice.message.tool_calls is None and sent(server).turns[0].role == "user"


def test_a_result_is_a_turn(client, server):
    system = {"role": "system", "content": "Be brief."}
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "talk 1"}
    asked(client, [system, ASK, said, result], tools=TOOLS)
    expected = [("system", "Be brief."), ("tools", SCHEMAS), ("user", "call 0")]
    expected += [("assistant", f"Hm.{CALL}"), ("tool", "talk 1")]
    assert [(turn.role, turn.text) for turn in sent(server).turns] == expected


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([ASK], {"model": "answerer", "tools": TOOLS}, "tools"),
        ([ASK, {"role": "tool", "tool_call_id": "a", "content": "1"}], {"model": "answerer"}, "tools"),
        ([{**ASK, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "a", "arguments": ""}}]}], {}, "messages"),
        ([ASK], {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ([ASK], {"tools": LARGE}, "tools"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client, messages, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, messages, **fields)
    assert caught.value.param == param


def test_an_answer_is_in_the_voice_that_was_named(client, server):
    asked(client, [{"role": "user", "content": "talk 1"}], **AUDIO, audio={"voice": "bert", "format": "wav"})
    assert sent(server).request.voice == "bert" and sent(server).request.output == "speech"
    asked(client, [{"role": "user", "content": "talk 1"}])
    assert sent(server).request.voice is None and sent(server).request.output == "text"


def test_an_answer_is_in_an_uploaded_voice(client, server):
    body = {"name": "clara", "consent": "true"}
    client.post("/audio/voices", cast_to=object, body=body, files={"audio_sample": ("a.wav", recording())},
                options={"headers": {"content-type": "multipart/form-data"}})  # fmt: skip
    talk = [{"role": "user", "content": "talk 1"}]
    asked(client, talk, **AUDIO, audio={"voice": "clara", "format": "wav"})
    assert sent(server).request.voice is None and len(sent(server).references) == 1


def test_a_voice_that_does_not_exist_is_not_used(client, server):
    talk = [{"role": "user", "content": "talk 1"}]
    raw = client.chat.completions.with_raw_response.create(
        model="caller", messages=talk, **AUDIO, audio={"voice": "alloy", "format": "wav"}
    )
    assert "has no voice 'alloy'" in raw.headers["x-warning"] and not sent(server).references
