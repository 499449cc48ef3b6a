"""Conversations through OpenAI's own client, with a whole server and a demo checkpoint of GLM-4-Voice."""

import base64
import io
import itertools

import numpy as np
import openai
import pytest
import soundfile
from audio_files import decoded
from served import connected, serving
from uploads import spoken

from zoo.glm4_voice import write_demo

pytestmark = pytest.mark.slow

AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
STREAM = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}, "stream": True}
HELLO = [{"role": "user", "content": "Good morning."}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    model = f"glm={write_demo(directory / 'model')}"
    with serving(directory, "--no-warm", models=[model]) as url, connected(url) as client:
        yield client


def asked(client, messages, **fields):
    settings = {"model": "glm", "seed": 1, "temperature": 1.0, "max_completion_tokens": 60}
    return client.chat.completions.create(messages=messages, **{**settings, **fields})


def refusal(client, messages, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, messages, **fields)
    return caught.value


def test_a_text_is_answered_in_text_and_speech(client):
    answer = asked(client, HELLO, **AUDIO)
    [choice] = answer.choices
    assert answer.object == "chat.completion" and choice.message.content is None
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(choice.message.audio.data)))
    made = answer.usage.completion_tokens_details
    assert rate_hz == 22_050 and len(samples) == 256 * (441 * made.audio_tokens // 64) and samples.any()
    assert choice.message.audio.transcript and made.text_tokens > 0
    assert answer.usage.completion_tokens == made.text_tokens + made.audio_tokens <= 60
    assert choice.finish_reason == ("length" if answer.usage.completion_tokens == 60 else "stop")
    assert answer.usage.prompt_tokens_details.audio_tokens == 0 < answer.usage.prompt_tokens


def test_a_stream_has_the_text_and_the_audio_of_the_whole_answer(client):
    """Timing decides which codes share a window, so samples may differ in the last bit."""
    whole = asked(client, HELLO, **AUDIO | {"audio": {"voice": "alloy", "format": "pcm16"}})
    chunks = list(asked(client, HELLO, **STREAM, stream_options={"include_usage": True}))
    *content, last = chunks
    deltas = [chunk.choices[0].delta.to_dict() for chunk in content]
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    assert deltas[0]["role"] == "assistant" and content[-1].choices[0].finish_reason in ("stop", "length")
    assert (
        last.choices == [] and last.usage.completion_tokens_details == whole.usage.completion_tokens_details
    )
    assert (
        last.usage.prompt_tokens == whole.usage.prompt_tokens
    )  # how many are cached depends on earlier requests
    expected = whole.choices[0].message.audio
    assert "".join(part.get("transcript", "") for part in audio) == expected.transcript
    pcm = b"".join(base64.b64decode(part.get("data", "")) for part in audio)
    streamed, at_once = (
        np.frombuffer(data, "<i2").astype(int) for data in (pcm, base64.b64decode(expected.data))
    )
    assert len(streamed) == len(at_once) > 0 and np.abs(streamed - at_once).max() <= 2
    assert ["id" in part for part in audio] == [True, *[False] * (len(audio) - 1)]
    assert list(audio[-1]) == ["expires_at"] and any("data" in part for part in audio)


def test_text_alone_is_the_content(client):
    whole = asked(client, HELLO)
    assert whole.choices[0].message.audio is None
    assert (
        whole.choices[0].message.content == asked(client, HELLO, **AUDIO).choices[0].message.audio.transcript
    )
    chunks = list(asked(client, HELLO, stream=True))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )


@pytest.mark.parametrize("form", ["mp3", "flac", "opus", "aac"])
def test_the_other_formats(client, form):
    answer = asked(client, HELLO, **AUDIO | {"audio": {"voice": "alloy", "format": form}})
    rate_hz = 48_000 if form == "opus" else 22_050
    samples = decoded(form, base64.b64decode(answer.choices[0].message.audio.data), rate_hz)
    expected = 256 * (441 * answer.usage.completion_tokens_details.audio_tokens // 64) * rate_hz / 22_050
    assert abs(len(samples) - expected) <= 3000 * rate_hz / 22_050 and samples.any()


def test_a_spoken_conversation_of_three_turns(client):
    """Each turn's prompt is the last one, its answer's transcript, and the new clip: 13 codes a second."""
    messages, prompts = [{"role": "system", "content": "Be brief."}], []
    for seconds in (1.0, 2.0, 0.5):
        messages.append(spoken(seconds))
        answer = asked(client, messages, **AUDIO)
        prompts.append(answer.usage.prompt_tokens_details)
        messages.append({"role": "assistant", "content": answer.choices[0].message.audio.transcript})
    assert [prompt.audio_tokens for prompt in prompts] == [13, 13 + 25, 13 + 25 + 7]
    assert all(a.text_tokens < b.text_tokens for a, b in itertools.pairwise(prompts))


def test_a_third_turn_prefills_only_its_new_positions(client):
    """Earlier answers are named by their IDs, so all but the last page of what was read before is in the cache."""
    page, messages, answers = 16, [{"role": "system", "content": "Be brief."}], []
    for seconds in (1.0, 2.0, 0.5):
        messages.append(spoken(seconds))
        answers.append(asked(client, messages, **AUDIO))
        messages.append({"role": "assistant", "audio": {"id": answers[-1].choices[0].message.audio.id}})
    first, second, third = (answer.usage for answer in answers)
    for before, usage in ((first, second), (second, third)):
        cached = usage.prompt_tokens_details.cached_tokens
        assert before.total_tokens - page - 1 <= cached <= before.total_tokens and cached % page == 0
        assert usage.prompt_tokens > before.total_tokens
    assert first.prompt_tokens_details.cached_tokens < first.prompt_tokens
    heard = [usage.prompt_tokens_details.audio_tokens for usage in (first, second, third)]
    assert heard[0] == 13 and heard[2] == 13 + 25 + 7 + sum(
        usage.completion_tokens_details.audio_tokens for usage in (first, second)
    )


def test_an_answer_ends_before_a_stop_string(client):
    whole = asked(client, HELLO)
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut = asked(client, HELLO, stop=["never", stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < whole.usage.completion_tokens
    chunks = list(asked(client, HELLO, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]


def test_special_tokens_in_a_text_are_text(client):
    plain = asked(client, [{"role": "user", "content": "a"}]).usage.prompt_tokens
    tricked = asked(client, [{"role": "user", "content": "<|user|>"}]).usage.prompt_tokens
    assert tricked > plain  # one special token would take as many as "a"


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "assistant", "content": "Hm."}], {}, "messages"),
        ([*HELLO, *HELLO], {}, "messages"),
        ([{"role": "user", "content": " "}], {}, "messages"),
        ([*HELLO, {"role": "assistant", "audio": {"id": "audio_1"}}, *HELLO], {}, "messages"),
        ([{"role": "user", "audio": {"id": "audio_1"}}], {}, "messages"),
        (HELLO, {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        (HELLO, {"stop": ""}, "stop"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "%", "format": "wav"}}]}], {}, "messages"),
        (HELLO, {"modalities": ["text", "audio"]}, "audio"),
        (HELLO, {"audio": {"voice": "alloy", "format": "wav"}}, "modalities"),
        (HELLO, {**AUDIO, "stream": True}, "audio"),
        (HELLO, {"max_completion_tokens": 10_000}, "max_completion_tokens"),
        (HELLO, {"max_tokens": 10, "max_completion_tokens": 10}, "max_tokens"),
        (HELLO, {"n": 2}, "n"),
        (HELLO, {"logit_bias": {"1": 2}}, "logit_bias"),
        (HELLO, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (HELLO, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client, messages, fields, param):
    assert refusal(client, messages, **fields).param == param


def test_the_fields_of_older_clients_are_taken(client):
    new, old = (
        client.chat.completions.create(model="glm", messages=HELLO, seed=1, **fields)
        for fields in ({"max_completion_tokens": 3}, {"max_tokens": 3, "n": 1, "user": "ann"})
    )
    assert new.usage == old.usage and new.usage.completion_tokens <= 3
    assert new.choices[0].message == old.choices[0].message


def test_fields_that_this_server_lacks_may_have_openais_defaults(client):
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "ann",
        "metadata": {"a": "b"},
    }
    nulls = {"reasoning_effort": None, "tools": None, "stop": None}
    answer = client.chat.completions.create(
        model="glm", messages=HELLO, seed=1, max_completion_tokens=3, **defaults, extra_body=nulls
    )
    plain = client.chat.completions.create(model="glm", messages=HELLO, seed=1, max_completion_tokens=3)
    assert answer.choices[0].message == plain.choices[0].message


def test_the_speech_route_points_to_this_one(client):
    with pytest.raises(openai.BadRequestError, match="use POST /v1/chat/completions"):
        client.audio.speech.create(model="glm", voice="alloy", input="Good morning.")
    assert client.models.retrieve("glm").model_extra["answers"] is True
