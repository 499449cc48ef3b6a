"""Servers differ: what is found out about one before it is measured."""

import asyncio

import pytest
from speech_server import refusal, speaking, stream

from serving.audio import wav_header
from serving.tools.load.learn import address, learn
from serving.tools.load.plan import Work

WAV = [wav_header(16000), bytes(400)]


def learned(answer, formats=(), model=None, models=("m",), **fields):
    """-> target, work, and what was said meanwhile."""
    work, lines = Work([], fields=fields), []

    async def go():
        async with speaking(answer, models) as target:
            await learn(target, work, model, formats, lines.append)
            return target

    return asyncio.run(go()), work, lines


async def ours(request, body):
    return await stream(request, [bytes(200)], {"x-sample-rate": "44100"})


async def silent_about_its_rate(request, body):
    return await stream(request, WAV if body["response_format"] == "wav" else [bytes(200)])


async def wav_alone(request, body):
    if body["response_format"] != "wav":
        return refusal(400, f"no {body['response_format']} here")
    return await stream(request, WAV)


async def strict(request, body):
    if "seed" in body:
        return refusal(422, "seed: extra fields not permitted")
    return await ours(request, body)


async def mute(request, body):
    return refusal(400, "voice: a voice is needed")


def test_pcm_at_the_rate_that_the_server_says():
    target, work, lines = learned(ours)
    assert work.formats == ["pcm"] and target.sample_rate_hz == 44100 and work.has_seeds and not lines
    assert work.request(0).body["model"] == "m"


def test_pcm_whose_rate_only_a_wav_tells():
    target, work, _ = learned(silent_about_its_rate)
    assert work.formats == ["pcm"] and target.sample_rate_hz == 16000


def test_another_format_where_there_is_no_pcm():
    _, work, lines = learned(wav_alone)
    assert work.formats == ["wav"]
    assert lines == ["the server gave no pcm (http_400 no pcm here); measured in wav"]


def test_a_server_that_takes_no_seeds():
    _, work, _ = learned(strict)
    assert not work.has_seeds and "seed" not in work.request(0).body


@pytest.mark.parametrize(
    ("answer", "more", "says"),
    [
        (mute, {}, "gave no audio: http_400 voice: a voice is needed"),
        (wav_alone, {"formats": ["wav", "mp3"]}, "gave no mp3: http_400 no mp3 here"),
        (ours, {"models": ("a", "b")}, "--model must say which; .*lists: a, b"),
        (ours, {"models": ()}, "lists: nothing"),
    ],
)
def test_what_cannot_be_measured(answer, more, says):
    with pytest.raises(ValueError, match=says):
        learned(answer, **more)


def test_formats_that_are_asked_for_and_a_model():
    _, work, _ = learned(ours, formats=["pcm"], model="b", models=("a", "b"))
    assert work.formats == ["pcm"] and work.fields["model"] == "b"
    assert learned(ours, models=("a", "b"), model="c")[1].fields["model"] == "c"


def test_addresses():
    expected = "http://x:1/v1"
    assert {
        address(given)
        for given in ("http://x:1", "http://x:1/", "http://x:1/v1/", "http://x:1/v1/audio/speech")
    } == {expected}
    with pytest.raises(ValueError, match="http://HOST:PORT is"):
        address("x:1")


def test_no_server():
    async def go():
        async with speaking(ours) as target:
            pass
        await learn(target, Work([]), None, [], print)

    with pytest.raises(ValueError, match="there is no server at"):
        asyncio.run(go())
