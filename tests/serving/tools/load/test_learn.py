"""The load client finds out what a server offers before measuring it."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from speech_server import refusal, speaking, stream

from serving.audio.pcm import wav_header
from serving.tools.load.client import Target
from serving.tools.load.learn import address, learn
from serving.tools.load.plan import Work

WAV = [wav_header(16000), bytes(400)]


def learned(answer, formats=(), model=None, models=("m",), **fields):
    """Return the target, the work, and the printed lines."""
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


def test_pcm_has_the_rate_that_the_server_reports():
    target, work, lines = learned(ours)
    assert work.formats == ["pcm"] and target.sample_rate_hz == 44100 and work.has_seeds and not lines
    assert work.request(0).body["model"] == "m"


def test_an_interrupted_question_to_the_server_ends_the_run():
    async def go():
        asked = asyncio.Event()

        async def never(request, body):
            asked.set()
            await asyncio.Event().wait()

        async with speaking(never, ("m",)) as target:
            learning = asyncio.create_task(learn(target, Work([]), None, (), print))
            await asked.wait()
            learning.cancel()  # as Ctrl-C does
            with pytest.raises(asyncio.CancelledError):
                await learning

    asyncio.run(go())


def test_a_wav_gives_the_rate_that_pcm_lacks():
    target, work, _ = learned(silent_about_its_rate)
    assert work.formats == ["pcm"] and target.sample_rate_hz == 16000


def test_without_pcm_another_format_is_measured():
    _, work, lines = learned(wav_alone)
    assert work.formats == ["wav"]
    assert lines == ["the server returned no pcm (http_400 no pcm here); measuring wav"]


def test_a_server_that_refuses_seeds_gets_none():
    _, work, _ = learned(strict)
    assert not work.has_seeds and "seed" not in work.request(0).body


@pytest.mark.parametrize(
    ("answer", "more", "says"),
    [
        (mute, {}, "returned no audio: http_400 voice: a voice is needed"),
        (wav_alone, {"formats": ["wav", "mp3"]}, "returned no mp3: http_400 no mp3 here"),
        (ours, {"models": ("a", "b")}, "choose a model with --model; .*lists: a, b"),
        (ours, {"models": ()}, "lists: nothing"),
        (
            ours,
            {"models": None},
            r"refused the request \(the key is missing\); give an API key with --api-key",
        ),
    ],
)
def test_a_server_that_cannot_be_measured_is_an_error(answer, more, says):
    with pytest.raises(ValueError, match=says):
        learned(answer, **more)


async def slow(request):
    await asyncio.sleep(0.5)
    return web.json_response({"data": []})


async def closed(request):
    request.transport.close()
    return web.Response()


async def failed(request):
    return refusal(500, "boom")


@pytest.mark.parametrize(
    ("list_models", "says"),
    [
        (slow, r"models did not answer within 0\.2 s"),
        (closed, r"models did not answer \(Server disconnected\); choose a model with --model"),
        (failed, r"models answered 500 \(boom\); choose a model with --model"),
    ],
)
def test_a_server_that_lists_no_models_is_told_from_one_without_any(list_models, says):
    async def go():
        app = web.Application()
        app.router.add_get("/v1/models", list_models)
        async with TestServer(app) as server:
            await learn(Target(str(server.make_url("/v1")), timeout_s=0.2), Work([]), None, [], print)

    with pytest.raises(ValueError, match=says):
        asyncio.run(go())


def test_formats_and_a_model_can_be_chosen():
    _, work, _ = learned(ours, formats=["pcm"], model="b", models=("a", "b"))
    assert work.formats == ["pcm"] and work.fields["model"] == "b"
    assert learned(ours, models=("a", "b"), model="c")[1].fields["model"] == "c"


def test_addresses():
    expected = "http://x:1/v1"
    assert {
        address(given)
        for given in ("http://x:1", "http://x:1/", "http://x:1/v1/", "http://x:1/v1/audio/speech")
    } == {expected}
    for wrong in ("x:1", "http://", "http://x:99999", "http://[::1"):
        with pytest.raises(ValueError, match="use http://HOST:PORT"):
            address(wrong)


def test_no_server():
    async def go():
        async with speaking(ours) as target:
            pass
        await learn(target, Work([]), None, [], print)

    with pytest.raises(ValueError, match="there is no server at"):
        asyncio.run(go())
