"""All of `zoo serve` on the demo checkpoint, used through OpenAI's own client."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import soundfile
from audio_files import decoded
from served import connected, serving

from zoo.text.pieces import split

pytestmark = pytest.mark.slow

FRAME_BYTES = 2 * 1920


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served"), demo="tiny") as url:
        yield url


@pytest.fixture(scope="module")
def cloner(tmp_path_factory):
    """Return a client of a server with two models: one that takes references, and the other server's."""
    with (
        serving(tmp_path_factory.mktemp("served"), demo="tiny-base", talker="tiny") as url,
        connected(url) as client,
    ):
        yield client


def same(one: bytes, other: bytes) -> bool:
    """Whether two PCM answers are equal up to the last bits: timing decides which frames share a window."""
    a, b = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (one, other))
    return len(a) == len(b) and np.abs(a - b).max() <= 2


@pytest.fixture
def client(server):
    with connected(server) as client:
        yield client


def test_openais_client_streams_speech(client):
    fields = {"model": "demo", "voice": "vivian", "response_format": "pcm"}
    extra = {"seed": 1, "max_new_tokens": 40, "repetition_penalty": 1.05}
    with client.audio.speech.with_streaming_response.create(
        input="Hello from the zoo.", extra_body=extra, **fields
    ) as answer:
        chunks = list(answer.iter_bytes(FRAME_BYTES))
        assert answer.headers["x-sample-rate"] == "24000"
    streamed = b"".join(chunks)
    assert 0 < len(streamed) <= 40 * FRAME_BYTES and len(streamed) % FRAME_BYTES == 0 and any(streamed)
    whole = client.audio.speech.create(
        input="Hello from the zoo.", extra_body={**extra, "stream": False}, **fields
    )
    assert same(whole.content, streamed)  # the same seed gives the same speech


def test_long_texts_are_split_and_numbers_are_written_out(client):
    def pcm(text, **extra):
        body = {"seed": 1, "max_new_tokens": 12, "stream": False, **extra}
        fields = {"model": "demo", "voice": "vivian", "response_format": "pcm", "extra_body": body}
        return client.audio.speech.create(input=text, **fields).content

    sentence = "Once there was a small house near the river. "
    pieces = split(sentence * 60, client.models.retrieve("demo").piece_s)
    assert len(pieces) > 3
    assert pcm(sentence * 60) == pcm(pieces[0]) != pcm(sentence * 60, split_text=False)
    assert pcm("It is 3.", normalize=True) == pcm("It is three.") != pcm("It is 3.")
    with pytest.raises(
        openai.BadRequestError, match="normalize is possible in chinese, english, japanese"
    ) as refused:
        pcm("Drei.", normalize=True, language="german")
    assert refused.value.param == "normalize"


def test_audio_arrives_in_chunks(client):
    """Chunks are passed on one by one, so the first is only a part of the answer."""
    fields = {
        "model": "demo",
        "voice": "vivian",
        "response_format": "pcm",
        "extra_body": {"seed": 1, "max_new_tokens": 60},
    }
    with client.audio.speech.with_streaming_response.create(
        input="A somewhat longer text to speak.", **fields
    ) as answer:
        chunks = list(answer.iter_bytes())
    assert len(chunks) > 2 and len(chunks[0]) < sum(map(len, chunks)) / 2


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_every_format_of_openais(client, tmp_path, name):
    extra = {"seed": 1, "max_new_tokens": 10, "repetition_penalty": 1.05}
    fields = {"model": "demo", "voice": "vivian", "input": "Hello.", "extra_body": extra}
    with client.audio.speech.with_streaming_response.create(response_format=name, **fields) as answer:
        answer.stream_to_file(tmp_path / name)
        rate_hz = int(answer.headers["x-sample-rate"])
    truth_s = len(client.audio.speech.create(response_format="pcm", **fields).content) / 2 / 24000
    heard_s = len(decoded(name, (tmp_path / name).read_bytes(), rate_hz)) / rate_hz
    assert 0 <= heard_s - truth_s < 0.1 if name in ("mp3", "aac") else heard_s == truth_s


def test_mp3_is_the_default_format(client):
    answer = client.audio.speech.create(
        model="demo", voice="vivian", input="Hello.", extra_body={"max_new_tokens": 5}
    )
    assert (
        answer.response.headers["content-type"] == "audio/mpeg"
        and len(decoded("mp3", answer.content, 24000)) > 0
    )


def test_the_events_join_to_the_answer(client):
    extra = {"seed": 1, "max_new_tokens": 10}
    fields = {
        "model": "demo",
        "voice": "vivian",
        "input": "Hello.",
        "response_format": "pcm",
        "extra_body": extra,
    }
    with client.audio.speech.with_streaming_response.create(stream_format="sse", **fields) as answer:
        *deltas, done = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    pcm = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert same(pcm, client.audio.speech.create(**fields).content)
    usage = done.pop("usage")
    assert done == {"type": "speech.audio.done", "token_usage": usage}
    assert usage["output_tokens"] == len(pcm) // FRAME_BYTES
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > usage["output_tokens"]


def test_concurrent_requests_equal_single_ones(client):
    def speak(seed):
        fields = {"model": "demo", "voice": "ryan", "response_format": "pcm", "input": "Hello."}
        return client.audio.speech.create(extra_body={"seed": seed, "max_new_tokens": 20}, **fields).content

    alone = [speak(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(speak, range(4)))
    for one, among_others in zip(alone, together, strict=True):
        assert same(one, among_others)
    assert len(set(alone)) == 4  # other seeds give other speech


def test_openais_client_lists_the_models(client):
    [model] = client.models.list().data
    assert model.id == "demo" and "vivian" in model.voices
    assert client.models.retrieve("demo") == model


def test_errors_become_openais_exceptions(server, client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(input="Hello.", model="demo", voice="carl")
    assert refused.value.param == "voice" and "vivian" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(input="Hello.", model="demo", voice="vivian", speed=4.5)
    assert refused.value.param == "speed"
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(input="Hello.", model="demo", voice="vivian", extra_body={"sede": 1})
    assert refused.value.param == "sede"
    with pytest.raises(openai.NotFoundError) as refused:
        client.audio.speech.create(input="Hello.", model="tts-2", voice="vivian")
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server + "/v1", api_key="wrong", max_retries=0).models.list()


# A model that takes references, next to one that does not


@pytest.mark.slow
def test_two_models_at_once_equal_each_model_alone(client, cloner):
    [demo_model, talker] = cloner.models.list().data
    assert (demo_model.id, demo_model.modes, talker.id, talker.modes) == (
        "demo",
        ["clone"],
        "talker",
        ["voice"],
    )
    with pytest.raises(openai.BadRequestError, match="several: demo, talker"):
        cloner.audio.speech.create(model=openai.omit, voice="vivian", input="Hello.")

    def talk(client, model, seed):
        fields = {"voice": "vivian", "input": "Hello.", "response_format": "pcm"}
        return client.audio.speech.create(
            model=model, extra_body={"seed": seed, "max_new_tokens": 15}, **fields
        ).content

    inline = {"ref_audio": base64.b64encode(recording()).decode(), "ref_text": "Hi."}
    clone_alone, talk_alone = (
        clone(cloner, extra_body=inline),
        [talk(client, "demo", seed) for seed in range(3)],
    )
    with ThreadPoolExecutor(4) as pool:
        cloning = pool.submit(clone, cloner, extra_body=inline)
        talking = list(pool.map(lambda seed: talk(cloner, "talker", seed), range(3)))
    assert (
        same(cloning.result(), clone_alone) and all(map(same, talking, talk_alone)) and len(set(talking)) == 3
    )


def recording(seed=0, seconds=2.0):
    file = io.BytesIO()
    soundfile.write(
        file, np.random.default_rng(seed).uniform(-0.3, 0.3, int(16000 * seconds)), 16000, format="FLAC"
    )
    return file.getvalue()


def clone(client, **fields):
    """Return the PCM of a short text with a fixed seed."""
    extra = {"seed": 1, "max_new_tokens": 6, **fields.pop("extra_body", {})}
    fields = {"model": "demo", "input": "Hello.", "response_format": "pcm", "voice": openai.omit, **fields}
    return client.audio.speech.create(extra_body=extra, **fields).content


def test_a_voice_is_uploaded_used_and_deleted(cloner):
    sample = ("anna.flac", recording())
    voice = cloner.audio.voices.create(
        name="Anna", audio_sample=sample, consent="I agree.", extra_body={"ref_text": "Hi."}
    )
    assert (voice.id, voice.name, voice.object, voice.type) == (
        "anna",
        "anna",
        "audio.voice",
        "audio_sample",
    ) and voice.created_at > 0
    by_name, again = clone(cloner, voice="anna"), clone(cloner, voice={"id": "Anna"})
    inline = {"ref_audio": base64.b64encode(recording()).decode(), "ref_text": "Hi."}
    assert same(by_name, again) and same(by_name, clone(cloner, extra_body=inline)) and any(by_name)
    assert not same(
        by_name, clone(cloner, extra_body={**inline, "ref_audio": base64.b64encode(recording(1)).decode()})
    )
    with pytest.raises(openai.ConflictError):
        cloner.audio.voices.create(name="ANNA", audio_sample=recording(), consent="I agree.")
    deleted = cloner.audio.voices.delete("anna")
    assert deleted.deleted and deleted.id == "anna"
    with pytest.raises(openai.NotFoundError):
        cloner.audio.voices.delete("anna")
    with pytest.raises(openai.BadRequestError, match="no voice 'anna'"):
        clone(cloner, voice="anna")


def test_a_voice_without_a_text_gives_only_its_sound(cloner):
    cloner.audio.voices.create(name="bert", audio_sample=recording(), consent="")
    inline = {"ref_audio": "data:audio/flac;base64," + base64.b64encode(recording()).decode()}
    sound = clone(cloner, voice="bert")
    assert same(sound, clone(cloner, extra_body={**inline, "x_vector_only_mode": True}))
    assert not same(sound, clone(cloner, extra_body={**inline, "ref_text": "Hi."}))
    cloner.audio.voices.delete("bert")


def test_references_that_the_model_cannot_use_are_refused(cloner):
    def fault(seconds=2.0, loud=1.0, **extra):
        samples = loud * np.random.default_rng(0).uniform(-0.3, 0.3, int(16000 * seconds))
        file = io.BytesIO()
        soundfile.write(file, samples, 16000, format="WAV")
        with pytest.raises(openai.BadRequestError) as refused:
            clone(cloner, extra_body={"ref_audio": base64.b64encode(file.getvalue()).decode(), **extra})
        return refused.value.param, refused.value.message

    assert fault(loud=0, ref_text="Hi.")[0] == "ref_audio" and "silent" in fault(loud=0, ref_text="Hi.")[1]
    assert (
        fault(seconds=0.01, ref_text="Hi.")[0] == "ref_audio"
        and "lasts" in fault(seconds=0.01, ref_text="Hi.")[1]
    )
    assert fault()[0] == "ref_text"
    with pytest.raises(openai.BadRequestError) as refused:
        clone(cloner)
    assert refused.value.param == "ref_audio"
