"""The formats and events over HTTP: streams are valid, complete and early, also next to each other."""

import asyncio
import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from audio_files import decoded
from fake_engine import RATE_HZ, TONE_SAMPLES, frame, tone
from http_server import Server, error, until

from serving.audio import encode

MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "webm": "audio/webm",
    "aac": "audio/aac",
    "m4a": "audio/mp4",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "ulaw": "audio/basic",
    "alaw": "audio/x-alaw-basic",
}
MEDIA_TYPES |= {"ogg": MEDIA_TYPES["opus"], "mulaw": MEDIA_TYPES["ulaw"]}
OWN_HZ = {"opus": 48000, "ogg": 48000, "webm": 48000, "ulaw": 8000, "mulaw": 8000, "alaw": 8000}
FRAMES = 25
LASTS_S = FRAMES * TONE_SAMPLES / RATE_HZ


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as server:
        yield server


def listen(server, name, **fields):
    """Return the headers, the body, and the time of its first byte as a share of the time of its last."""
    with httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"input": f"tone {FRAMES}", "response_format": name, **fields}
        with http.stream("POST", "/v1/audio/speech", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            began, first_s, heard = time.perf_counter(), None, b""
            for chunk in answer.iter_raw():
                first_s = first_s or time.perf_counter() - began
                heard += chunk
            return answer.headers, heard, first_s / (time.perf_counter() - began)


def events(data):
    """Return all events of a body, and check that it has nothing else."""
    lines = data.decode().split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_eight_streams_at_once_in_all_formats_leave_the_event_loop_responsive(server):
    """A task on the event loop measures how late it is woken up."""
    lags = []

    async def watch():
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - began - 0.002)

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    names = [*encode.FORMATS]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: listen(server, name), names))
    watching.cancel()
    for name, (headers, data, first) in zip(names, answers, strict=True):
        rate_hz = OWN_HZ.get(name, RATE_HZ)
        assert headers["content-type"] == MEDIA_TYPES[name] and headers["x-sample-rate"] == str(rate_hz)
        assert headers["transfer-encoding"] == "chunked"
        assert first < 0.3, f"{name} is silent for {first:.0%} of the time"
        more_s = len(decoded(name, data, rate_hz)) / rate_hz - LASTS_S
        assert 0 <= more_s < 0.1 if name in ("mp3", "aac", "m4a") else more_s == 0, (
            f"{name} lasts {more_s} s longer"
        )
    # The median: a busy machine always delays some iterations.
    assert sorted(lags)[len(lags) // 2] < 0.01


def test_whole_files_in_every_format(server):
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda name: listen(server, name, stream=False), encode.FORMATS))
    for name, (headers, data, _) in zip(encode.FORMATS, answers, strict=True):
        rate_hz = int(headers["x-sample-rate"])
        assert headers["content-length"] == str(len(data)) and headers["content-type"] == MEDIA_TYPES[name]
        duration_s = len(decoded(name, data, rate_hz)) / rate_hz
        assert duration_s == LASTS_S or (name in ("aac", "m4a") and 0 <= duration_s - LASTS_S < 0.1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_bit_rate_makes_answers_smaller(server, stream):
    sizes = [len(listen(server, "opus", stream=stream, bit_rate=rate)[1]) for rate in (16_000, 64_000)]
    assert sizes[0] < 0.6 * sizes[1]


def test_mp3_is_the_default_format(server):
    answer = server.http.post("/v1/audio/speech", json={"input": "tone 2"})
    assert (
        answer.headers["content-type"] == "audio/mpeg"
        and len(decoded("mp3", answer.content, RATE_HZ)) >= 2 * TONE_SAMPLES
    )


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_can_have_another_sample_rate(server, stream):
    headers, data, _ = listen(server, "wav", sample_rate=16000, stream=stream)
    heard = decoded("wav", data, 16000)
    truth = 0.5 * np.sin(2 * np.pi * 220 * np.arange(len(heard)) / 16000)
    assert headers["x-sample-rate"] == "16000" and abs(len(heard) - 16000 * LASTS_S) <= 1
    assert np.abs(heard - truth)[100:-100].max() < 1e-3


@pytest.mark.parametrize("name", ["mp3", "opus", "pcm"])
def test_events_contain_the_file(server, name):
    headers, data, first = listen(server, name, stream_format="sse")
    assert headers["content-type"].startswith("text/event-stream") and first < 0.3
    *deltas, done = events(data)
    assert len(deltas) > 5 and all(
        set(delta) == {"type", "audio"} and delta["type"] == "speech.audio.delta" for delta in deltas
    )
    usage = {"input_tokens": 2, "output_tokens": FRAMES, "total_tokens": FRAMES + 2}
    assert done == {"type": "speech.audio.done", "usage": usage, "token_usage": usage}
    file = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert len(decoded(name, file, int(headers["x-sample-rate"]))) >= FRAMES * TONE_SAMPLES
    if name == "pcm":
        assert file == b"".join(map(tone, range(FRAMES)))


def test_an_error_after_audio_is_an_event(server):
    [delta, error_event] = events(server.speak("fail 1", stream_format="sse", response_format="pcm").content)
    assert base64.b64decode(delta["audio"]) == frame(0)
    fault = {"message": "the codec broke", "type": "server_error", "param": None, "code": "engine_failed"}
    assert error_event == {"type": "error", "error": fault}
    # Before any audio it is a normal HTTP error.
    assert "codec" in error(server.speak("fail 0", stream_format="sse"), 500)["message"]
    assert error(server.speak("reject voice", stream_format="sse"), 400)["param"] == "voice"


def test_an_answer_with_text_but_no_audio_ends_with_an_error_event(server):
    text, fault = events(server.speak("mute", stream_format="sse").content)
    assert text == {"type": "speech.text.delta", "delta": "Hm."}
    assert fault["type"] == "error" and fault["error"]["code"] == "no_audio"
    # Without events the text is left out, so nothing has been sent.
    assert error(server.speak("mute"), 422)["code"] == "no_audio"


@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_disconnect_during_encoding_cancels_the_request(server, name):
    before = len(server.engine.cancelled)
    with server.stream("tone 100", response_format=name) as answer:
        next(answer.iter_raw())
    until(lambda: len(server.engine.cancelled) == before + 1, seconds=2)
    assert server.engine.cancelled[-1] == answer.headers["x-request-id"]
    assert server.speak("frames 1").content[44:] == frame(0)


@pytest.mark.parametrize("name", ["mp3", "flac"])
def test_a_failure_after_audio_cuts_an_encoded_answer_too(server, name):
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        server.speak("fail 20", response_format=name)
