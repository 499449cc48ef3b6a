"""The record of one request, with a server and a clock that follow a script."""

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from speech_server import refusal, speaking, stream, until

from serving.audio.pcm import wav_header
from serving.tools.load import client
from serving.tools.load.client import Target, connections, listen, rate_of, said, speak
from serving.tools.load.metrics import Record, Slo, summary
from serving.tools.load.plan import Planned


def asked(form="pcm", **more):
    return Planned({"input": "x", "response_format": form}, form, **more)


def recorded(answer, planned=None, timeout_s=20.0):
    """Return the record of one request to a server with this answer."""

    async def go():
        async with speaking(answer) as target, connections(target) as session:
            target.timeout_s = timeout_s
            return await speak(session, target, planned or asked(), 7, time.monotonic())

    return asyncio.run(go())


def test_arrivals_follow_the_script(monkeypatch):
    """The clock moves between chunks. The server sends a chunk once the client has read the last one."""
    script = [(11.0, 512), (11.5, 512), (12.25, 256)]
    clock = SimpleNamespace(now_s=10.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    record = Record(0, "listener", 10.0, 10.0, 12.25, "ok")

    async def answer(request, body):
        reply = web.StreamResponse(headers={"x-sample-rate": "1024"})
        await reply.prepare(request)
        await reply.write(wav_header(1024))  # a header alone does not count as first audio
        for num, (at_s, num_samples) in enumerate(script):
            await until(lambda num=num: len(record.arrivals) == num)
            clock.now_s = at_s
            await reply.write(bytes(2 * num_samples))
        await reply.write_eof()
        return reply

    async def go():
        async with speaking(answer) as target, connections(target) as session:
            await listen(session, target, asked("wav"), record)

    asyncio.run(go())
    assert record.arrivals == script and record.sample_rate_hz == 1024
    found = summary([record], Slo())
    # The last chunk is due at 12.0.
    assert found["ttfa_p50_ms"] == 1000 and found["chunk_viability"] == 0.5 and found["underrun_s"] == 0.25
    assert found["rtf_p50"] == 2.25 / 1.25


def test_a_complete_answer():
    record = recorded(
        lambda request, body: stream(request, [bytes(200), bytes(100)], {"x-sample-rate": "8000"})
    )
    assert record.failure is None and record.index == 7 and record.sample_rate_hz == 8000
    assert sum(num for _, num in record.arrivals) == 150
    assert record.submitted_s <= record.sent_s <= record.arrivals[0][0] <= record.end_s


async def cut(request, body):
    reply = web.StreamResponse()
    await reply.prepare(request)
    await reply.write(bytes(100))
    request.transport.abort()
    return reply


async def never(request, body):
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("answer", "form", "failure", "detail"),
    [
        (lambda request, body: asyncio.sleep(0, refusal(503, "come again")), "pcm", "http_503", "come again"),
        (
            lambda request, body: asyncio.sleep(0, web.Response(status=500, text="oops")),
            "pcm",
            "http_500",
            "oops",
        ),
        (lambda request, body: stream(request, []), "pcm", "no_audio", ""),
        (lambda request, body: stream(request, [wav_header(8000)]), "wav", "no_audio", ""),
        (
            lambda request, body: stream(request, [b"ID3 something else"]),
            "wav",
            "unreadable",
            "must begin with RIFF",
        ),
        (cut, "pcm", "cut", ""),
    ],
)
def test_failures_have_kinds(answer, form, failure, detail):
    record = recorded(answer, asked(form))
    assert record.failure == failure and detail in record.detail


def test_a_server_that_does_not_answer():
    assert recorded(never, timeout_s=0.05).failure == "timeout"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def go():
        target = Target(f"http://127.0.0.1:{port}/v1")
        async with connections(target) as session:
            return await speak(session, target, asked(), 0, time.monotonic())

    assert asyncio.run(go()).failure == "no_connection"


def test_a_planned_disconnect_is_not_a_failure_and_reaches_the_server():
    async def go():
        left = asyncio.Event()

        async def answer(request, body):
            reply = web.StreamResponse(headers={"x-sample-rate": "8000"})
            await reply.prepare(request)
            try:
                while True:
                    await reply.write(bytes(100))
                    await asyncio.sleep(0.001)
            finally:  # ends only when the client has disconnected
                left.set()

        async with speaking(answer) as target, connections(target) as session:
            record = await speak(
                session, target, asked(role="leaver", leaves_after_s=0.05), 0, time.monotonic()
            )
            async with asyncio.timeout(20):
                await left.wait()
        return record

    record = asyncio.run(go())
    assert record.outcome == "left" and record.failure is None


def test_a_page_is_no_audio():
    def answer(request, body):
        return stream(
            request, [b"<html>Sign in</html>"], {"x-sample-rate": "8000", "content-type": "text/html"}
        )

    record = recorded(answer)
    assert (record.failure, record.detail) == ("unreadable", "the answer is text/html, not audio")


def test_a_cancelled_request_keeps_its_record():
    async def go():
        async with speaking(never) as target, connections(target) as session:
            asking = asyncio.create_task(speak(session, target, asked(), 0, time.monotonic()))
            await asyncio.sleep(0.05)
            asking.cancel()
            return await asking

    assert asyncio.run(go()).outcome == "interrupted"


def test_slow_readers_read_slowly(monkeypatch):
    """They read at a quarter of the speed: after each second of audio they wait four seconds."""
    clock = SimpleNamespace(now_s=0.0)

    async def sleep(seconds):
        clock.now_s += max(seconds, 0.0)
        await asyncio.sleep(0)

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    fake = SimpleNamespace(**{name: getattr(asyncio, name) for name in asyncio.__all__} | {"sleep": sleep})
    monkeypatch.setattr(client, "asyncio", fake)
    record = Record(0, "slow", 0.0, 0.0, 0.0, "ok")

    def answer(request, body):
        return stream(request, [bytes(2000)] * 5, {"x-sample-rate": "1000"})

    async def go():
        async with speaking(answer) as target, connections(target, is_slow=True) as session:
            await listen(session, target, asked(role="slow"), record)

    asyncio.run(go())
    assert clock.now_s == pytest.approx(4 * 5.0)


def test_the_sample_rate_is_read_from_headers():
    def answer(**headers):
        return SimpleNamespace(headers={name.replace("_", "-"): value for name, value in headers.items()})

    assert rate_of(answer(x_sample_rate="44100")) == 44100
    assert rate_of(answer(content_type="audio/L16; rate=16000; channels=1")) == 16000
    assert rate_of(answer(content_type="audio/pcm", x_sample_rate="high")) == 0


def test_the_message_is_read_from_an_error():
    assert said('{"error": {"message": "no voice", "code": 1}}') == "no voice"
    assert said('{"detail": "no voice"}') == "no voice"
    assert said('{"error": "no voice"}') == "no voice" and said("no voice") == "no voice"
