"""OpusLM and Bagpiper through OpenAI's own client, with a whole server and tiny checkpoints: continuations, transcripts,
speech from a request, and understanding. Each answer equals that of the model alone."""

import base64
import io

import numpy as np
import openai
import pytest
import soundfile
from served import connected, serving

import zoo
from zoo import bagpiper, opuslm
from zoo.request import AudioClip, Request, Turn

pytestmark = pytest.mark.slow

WAV = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
RATE_HZ = 16_000
TUNE = (np.sin(np.arange(RATE_HZ) ** 1.4 / 40) / 3).astype(np.float32)
GREEDY = {"seed": 1, "temperature": 0.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    found = {
        "opuslm": opuslm.write_demo(place / "opuslm"),
        "bagpiper": bagpiper.write_demo(place / "bagpiper"),
    }
    return {name: (path, zoo.load(path, "cpu", "float32")) for name, path in found.items()}


@pytest.fixture(scope="module")
def client(tmp_path_factory, models):
    named = [f"{name}={path}" for name, (path, _) in models.items()]
    with serving(tmp_path_factory.mktemp("server"), models=named) as url, connected(url) as client:
        yield client


def alone(models, name, **fields):
    return zoo.generate(models[name][1], Request(**{**GREEDY, **fields}))


def file_of(samples):
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV", subtype="FLOAT")
    return file.getvalue()


def message(role, text=None):
    """Return a message with the clip, and a text if there is one."""
    data = base64.b64encode(file_of(TUNE)).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    parts += [] if text is None else [{"type": "text", "text": text}]
    return {"role": role, "content": parts}


def completed(client, model, messages, **fields):
    return client.chat.completions.create(model=model, messages=messages, **{**GREEDY, **fields})


def samples_of(answer):
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(answer.choices[0].message.audio.data)))
    assert rate_hz == RATE_HZ
    return samples


def refused(client, model, messages, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        completed(client, model, messages, **fields)
    return caught.value.body["param"], str(caught.value)


def equal_samples(made, speech):
    expected = speech.samples.numpy()
    assert len(made) == len(expected) and expected.any()
    assert np.abs(made - expected).max() < 1e-4


def turn():
    return (Turn("user", clip=AudioClip(TUNE, RATE_HZ)),)


def test_a_text_goes_on(client, models):
    begun = [{"role": "assistant", "content": "Once upon a time"}]
    answer = completed(client, "opuslm", begun, max_completion_tokens=12)
    expected = alone(models, "opuslm", text="Once upon a time", output="text", options={"max_tokens": 12})
    [choice] = answer.choices
    assert choice.message.content == expected.text and choice.message.audio is None
    assert 0 < answer.usage.completion_tokens <= 12
    chunks = completed(client, "opuslm", begun, max_completion_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text


def test_a_text_ends_before_a_stop_string(client, models):
    whole = alone(models, "opuslm", text="Once", output="text", options={"max_tokens": 12}).text
    stop = whole[len(whole) // 2]
    begun = [{"role": "assistant", "content": "Once"}]
    answer = completed(client, "opuslm", begun, max_completion_tokens=12, stop=[stop])
    assert answer.choices[0].message.content == whole.partition(stop)[0]


def test_a_clip_goes_on(client, models):
    answer = completed(client, "opuslm", [message("assistant")], max_completion_tokens=20, **WAV)
    expected = alone(models, "opuslm", text="", output="continuation", turns=turn(), max_frames=20)
    equal_samples(samples_of(answer), expected)
    assert answer.usage.completion_tokens_details.audio_tokens == len(expected.frames)
    assert answer.usage.prompt_tokens_details.audio_tokens > 40  # frames of the clip


def test_a_clip_goes_on_in_a_stream(client):
    fields = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    whole = completed(client, "opuslm", [message("assistant")], max_completion_tokens=20, **fields)
    chunks = completed(
        client, "opuslm", [message("assistant")], max_completion_tokens=20, stream=True, **fields
    )
    audio = [chunk.choices[0].delta.to_dict().get("audio", {}) for chunk in chunks]
    streamed = b"".join(base64.b64decode(part.get("data", "")) for part in audio)
    made, expected = (
        np.frombuffer(pcm, "<i2").astype(int)
        for pcm in (streamed, base64.b64decode(whole.choices[0].message.audio.data))
    )
    assert len(made) == len(expected) > 0 and np.abs(made - expected).max() <= 1


@pytest.mark.parametrize(
    ("messages", "fields", "param", "why"),
    [
        ([{"role": "user", "content": "Hello."}], {}, "messages", "continues one message of the assistant"),
        ([{"role": "assistant", "content": "Once"}], WAV, "audio", "a text goes on in text"),
        ([message("assistant")], {}, "audio", "a clip goes on in audio"),
        ([message("assistant", "Once")], WAV, "messages", "a text and a clip"),
        ([{"role": "assistant", "content": " "}], {}, "messages", "empty"),
    ],
)
def test_what_cannot_go_on_is_refused(client, messages, fields, param, why):
    found, text = refused(client, "opuslm", messages, **fields)
    assert found == param and why in text


def test_the_words_of_a_clip(client, models):
    """A random model writes to its limit, so only the first words are compared."""
    expected = alone(models, "opuslm", text="", output="transcript", turns=turn(), options={"max_tokens": 8})
    asked = {"model": "opuslm", "file": ("a.wav", file_of(TUNE)), "temperature": 0, "stream": True}
    words = ""
    with client.audio.transcriptions.create(**asked) as events:
        while len(words) < len(expected.text):
            words += next(events).delta
    assert words[: len(expected.text)] == expected.text != ""


def test_speech_from_a_request(client, models):
    """The speech routes take a model that performs what a text asks for."""
    asked = {"text": "Say hello in a warm voice.", "max_frames": 30, "options": {"max_tokens": 8}}
    answer = client.audio.speech.create(
        model="bagpiper",
        voice="default",
        input=asked["text"],
        response_format="wav",
        extra_body={**GREEDY, "max_new_tokens": 30, "max_tokens": 8, "sample_rate": RATE_HZ},
    )
    samples, rate_hz = soundfile.read(io.BytesIO(answer.content))
    assert rate_hz == RATE_HZ
    equal_samples(samples, alone(models, "bagpiper", **asked))


def test_a_request_is_answered_in_text_and_speech(client, models):
    text = "Say hello in a warm voice."
    answer = completed(
        client, "bagpiper", [{"role": "user", "content": text}], max_completion_tokens=8, **WAV
    )
    expected = alone(models, "bagpiper", text=text, options={"max_tokens": 8})
    assert answer.choices[0].message.audio.transcript == expected.text
    equal_samples(samples_of(answer), expected)


def test_a_clip_is_understood(client, models):
    asked = [message("user", "What is this?")]
    answer = completed(client, "bagpiper", asked, max_completion_tokens=12)
    turns = (Turn("user", "What is this?", turn()[0].clip),)
    expected = alone(models, "bagpiper", text="", output="text", turns=turns, options={"max_tokens": 12})
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens_details.audio_tokens == 13  # vectors of a second
    assert answer.usage.prompt_tokens_details.text_tokens > 0


def test_a_model_says_whether_it_performs(client):
    found = {model.id: model.to_dict() for model in client.models.list().data}
    assert found["bagpiper"]["performs"] and found["bagpiper"]["answers"]
    assert not found["opuslm"]["performs"] and "continuation" in found["opuslm"]["outputs"]


def test_a_model_that_performs_gives_no_times(client):
    found = {model.id: model.to_dict() for model in client.models.list().data}
    assert found["bagpiper"]["timestamp_granularities"] == []
    assert found["opuslm"]["timestamp_granularities"] == ["segment"]
    asked = {"stream_format": "sse", "timestamp_granularities": ["segment"]}
    with pytest.raises(openai.BadRequestError, match="gives no times"):
        client.audio.speech.create(model="bagpiper", voice="default", input="A dog.", extra_body=asked)
