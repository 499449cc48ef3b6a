"""Conversations with Step-Audio 2 through OpenAI's own client, with a whole server and a demo checkpoint."""

import base64
import io

import numpy as np
import openai
import pytest
import soundfile
from served import connected, serving
from uploads import spoken

from zoo.step_audio2 import write_demo

pytestmark = pytest.mark.slow

AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "default_male", "format": "wav"}}
HELLO = [{"role": "user", "content": "Good morning."}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    with (
        serving(directory, models=[f"step={write_demo(directory / 'model')}"]) as url,
        connected(url) as client,
    ):
        yield client


def asked(client, messages, **fields):
    settings = {"model": "step", "seed": 1, "temperature": 1.0, "max_completion_tokens": 60}
    return client.chat.completions.create(messages=messages, **{**settings, **fields})


def samples_of(answer):
    return soundfile.read(io.BytesIO(base64.b64decode(answer.choices[0].message.audio.data)))


def test_a_third_turn_prefills_only_its_new_positions(client):
    """Rows of clips, paddings and codes are all found again."""
    page, messages, answers = 16, [{"role": "system", "content": "Be brief."}], []
    for seconds in (1.0, 2.0, 0.5):
        messages.append(spoken(seconds))
        answers.append(asked(client, messages, **AUDIO))
        messages.append({"role": "assistant", "audio": {"id": answers[-1].choices[0].message.audio.id}})
    first, second, third = (answer.usage for answer in answers)
    for before, usage in ((first, second), (second, third)):
        cached = usage.prompt_tokens_details.cached_tokens
        assert before.total_tokens - page - 1 <= cached <= before.total_tokens
    assert [usage.prompt_tokens_details.audio_tokens for usage in (first, second, third)] == [13, 38, 44]


def test_voices_differ_and_text_has_none(client):
    male, female = (
        asked(client, HELLO, **AUDIO | {"audio": {"voice": voice, "format": "wav"}})
        for voice in ("default_male", "default_female")
    )
    (one, rate_hz), (other, _) = samples_of(male), samples_of(female)
    assert (
        rate_hz == 24_000
        and len(one) == len(other) == 960 * male.usage.completion_tokens_details.audio_tokens
    )
    assert not np.array_equal(one, other) and one.any() and other.any()
    text = asked(client, HELLO)
    assert text.choices[0].message.audio is None and text.usage.completion_tokens_details.audio_tokens == 0
    assert text.usage.completion_tokens <= 60


def test_a_text_may_follow_a_clip(client):
    both = spoken(1.0)
    both["content"].append({"type": "text", "text": "What is it?"})
    alone, longer = asked(client, [spoken(1.0)]).usage, asked(client, [both]).usage
    assert longer.prompt_tokens > alone.prompt_tokens
    assert longer.prompt_tokens_details.audio_tokens == alone.prompt_tokens_details.audio_tokens == 13


def test_a_clip_is_transcribed(client):
    file = base64.b64decode(spoken(1.0)["content"][0]["input_audio"]["data"])
    words = client.audio.transcriptions.create(model="step", file=("a.wav", file))
    assert words.usage.input_token_details.audio_tokens == 13 and isinstance(words.text, str)


def test_tools_are_read(client):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with_tools = asked(client, HELLO, tools=tools)
    assert with_tools.usage.prompt_tokens > asked(client, HELLO).usage.prompt_tokens + 20


def test_tools_and_a_result_are_read_in_a_realtime_session(client):
    """The weights are random, so the client tells of the call."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    tokens = []
    for tools in ([tool], []):
        with client.realtime.connect(model="step") as connection:
            settings = {"type": "realtime", "tools": tools, "audio": {"input": {"turn_detection": None}}}
            connection.session.update(session=settings)
            for item in (
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "One and two?"}],
                },
                {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"terms": [1, 2]}'},
                {"type": "function_call_output", "call_id": "a", "output": "3"},
            ):
                connection.conversation.item.create(item=item)
            connection.response.create(response={"max_output_tokens": 20})
            done = next(event.response for event in connection if event.type == "response.done")
        assert done.status in ("completed", "incomplete"), done
        tokens.append(done.usage.input_tokens)
    assert tokens[0] > tokens[1] + 20


def test_a_session_has_the_words_of_the_user(client):
    """The same model writes them and answers."""
    pcm = (9000 * np.sin(2 * np.pi * 200 * np.arange(24_000) / 24_000)).astype("<i2").tobytes()
    with client.realtime.connect(model="step") as connection:
        input = {"turn_detection": None, "transcription": {"model": "whisper-1"}}
        connection.session.update(session={"type": "realtime", "audio": {"input": input}})
        connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())
        connection.input_audio_buffer.commit()
        connection.response.create(response={"max_output_tokens": 20})
        ends = ("response.done", "conversation.item.input_audio_transcription.completed")
        seen = {}
        while len(seen) < len(ends):
            event = connection.recv()
            assert event.type not in ("error", "conversation.item.input_audio_transcription.failed"), event
            seen |= {event.type: event} if event.type in ends else {}
    done, words = (seen[end] for end in ends)
    assert done.response.status in ("completed", "incomplete")
    assert words.usage.input_token_details.audio_tokens == 13 and isinstance(words.transcript, str)


def test_other_voices_are_named(client):
    with pytest.raises(openai.BadRequestError, match="use POST /v1/chat/completions"):
        client.audio.speech.create(model="step", voice="default_male", input="Good morning.")
    assert client.models.retrieve("step").model_extra["takes_tools"] is True
