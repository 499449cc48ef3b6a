"""Requests of well-known clients, copied from their sources, and the answers that these clients need.

Each test names the repository and the file of the request (read in November 2026). The clients know this
server's address and otherwise use their own defaults, so they ask for OpenAI's models and voices.
"""

import asyncio
import json

import aiohttp
import httpx
import msgspec
import numpy as np
import openai
import pytest
from audio_files import decoded
from fake_engine import MODEL, RATE_HZ, frame
from http_server import Server, error

TEXT = "tone 10"
TEXT_S = 0.8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), api_key="sk-key") as server:
        yield server


def lasts(name, data, seconds, rate_hz=RATE_HZ):
    """Check that a file is valid and has this length."""
    heard_s = len(decoded(name, data, rate_hz)) / rate_hz
    assert 0 <= heard_s - seconds < 0.1, heard_s


# Open WebUI


def test_open_webui_lists_models_and_voices(server):
    """open-webui/open-webui, backend/open_webui/routers/audio.py: get_available_models,
    get_available_voices. It sends no key and reads `models`, and `id` and `name` of each entry in
    `voices`."""
    models = server.http.get("/v1/audio/models").json().get("models", [])
    assert [model["id"] for model in models] == ["fake"]
    voices = server.http.get("/v1/audio/voices").json().get("voices", [])
    assert {voice["id"]: voice["name"] for voice in voices} == {"vivian": "vivian", "ryan": "ryan"}


@pytest.mark.parametrize("model", ["tts-1", "fake"])
def test_open_webui_speaks(keyed, model):
    """open-webui/open-webui, backend/open_webui/routers/audio.py: speech. It sends the body of its page
    with the model from its settings, and headers about the user. It stores the answer as an MP3 file."""
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer sk-key",
        "X-OpenWebUI-User-Name": "Jo%20Doe",
        "X-OpenWebUI-User-Id": "8a1f",
        "X-OpenWebUI-User-Email": "jo@example.org",
        "X-OpenWebUI-User-Role": "user",
    }

    async def ask():
        async with aiohttp.ClientSession(trust_env=True) as session:
            payload = {"input": TEXT, "voice": "alloy", "model": model}
            async with session.post(keyed.url + "/v1/audio/speech", json=payload, headers=headers) as answer:
                answer.raise_for_status()
                return answer.content_type, await answer.read()

    kind, data = asyncio.run(ask())
    assert kind == "audio/mpeg"
    lasts("mp3", data, TEXT_S)


def test_open_webui_gets_an_error_message(keyed):
    """From the same file: if a request fails, it shows `error`."""
    payload = {"input": TEXT, "voice": "nobody", "model": "tts-1"}
    answer = keyed.http.post("/v1/audio/speech", json=payload, headers={"Authorization": "Bearer sk-key"})
    assert "no voice 'nobody'" in error(answer, 400)["message"]


# Home Assistant


@pytest.mark.parametrize("name", ["mp3", "opus", "wav", "aac", "flac", "pcm"])
@pytest.mark.parametrize("speed", [1.0, 1.25, 0.5])
def test_home_assistant_openai_tts_speaks(server, name, speed):
    """sfortis/openai_tts, custom_components/openai_tts/openaitts_engine.py: get_tts (a whole MP3 file) and
    async_get_tts_stream (chunks)."""
    payload = {"model": "tts-1", "input": TEXT, "voice": "shimmer", "response_format": name, "speed": speed}
    headers = {"Content-Type": "application/json", "User-Agent": "HomeAssistant-OpenAI-TTS"}
    with server.http.stream("POST", "/v1/audio/speech", json=payload, headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("audio/")
        data, rate_hz = b"".join(answer.iter_bytes(4096)), int(answer.headers["x-sample-rate"])
    lasts(name, data, TEXT_S / speed, rate_hz)


def test_home_assistant_openai_tts_can_send_extra_fields(server):
    """From the same file: `extra_payload` is JSON that is merged into the request."""
    payload = {"model": "tts-1", "input": TEXT, "voice": "shimmer", "response_format": "mp3", "speed": 1.0}
    payload.update(json.loads('{"language": "english", "seed": 7, "cfg_scale": 3.0}'))
    answer = server.http.post("/v1/audio/speech", json=payload)
    assert answer.status_code == 200 and answer.headers["x-seed"] == "7"


def test_home_assistant_openai_tts_lists_voices(server):
    """sfortis/openai_tts, custom_components/openai_tts/voice_listing.py: it sends `limit`, and prefers
    `data` to `voices`."""
    answer = server.http.get("/v1/audio/voices", params={"limit": 100})
    items = answer.json().get("items") or answer.json().get("data") or answer.json().get("voices")
    assert [(item["id"], item["name"]) for item in items] == [("vivian", "vivian"), ("ryan", "ryan")]


def test_wyoming_openai_lists_voices_and_speaks(server):
    """roryeckel/wyoming_openai, src/wyoming_openai/compatibility.py reads `id` of each entry in `voices`.
    handler.py uses OpenAI's client, reads the answer in pieces, and sends no key if it has none."""
    voices = server.http.get("/v1/audio/voices").json()["voices"]
    assert [voice.get("id") or voice.get("name") for voice in voices] == ["vivian", "ryan"]

    async def speak():
        headers = {"Authorization": openai.omit}
        fields = {"model": "fake", "voice": "vivian", "input": TEXT, "response_format": "wav"}
        async with (
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client,
            client.audio.speech.with_streaming_response.create(**fields, extra_headers=headers) as answer,
        ):
            return b"".join([chunk async for chunk in answer.iter_bytes(chunk_size=2048)])

    data = asyncio.run(speak())
    assert data[:4] == b"RIFF" and len(data) - 44 == 2 * TEXT_S * RATE_HZ


# SillyTavern


@pytest.mark.parametrize("speed", [0.25, 1, 4])
def test_sillytavern_openai_compatible_speaks(server, speed):
    """SillyTavern/SillyTavern, public/scripts/extensions/tts/openai-compatible.js: fetchTtsGeneration. Its
    server (src/endpoints/openai.js) forwards the fields. Speed is a slider from 0.25 to 4, and the voices
    are OpenAI's first six."""
    for voice in ("alloy", "echo", "fable", "onyx", "nova", "shimmer"):
        payload = {"input": TEXT, "response_format": "mp3", "voice": voice, "speed": speed, "model": "tts-1"}
        answer = server.http.post("/v1/audio/speech", json=payload, headers={"Authorization": "Bearer none"})
        assert answer.status_code == 200 and answer.headers["content-type"] == "audio/mpeg"
        lasts("mp3", answer.content, TEXT_S / speed)


# Pipecat


def openais(server, **fields):
    """Send a request with OpenAI's asynchronous client, and return the chunks and the headers of the
    answer."""

    async def speak():
        async with (
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="sk", max_retries=0) as client,
            client.audio.speech.with_streaming_response.create(**fields) as answer,
        ):
            return [chunk async for chunk in answer.iter_bytes(960)], dict(answer.headers)

    return asyncio.run(speak())


@pytest.mark.parametrize("more", [{}, {"speed": 1.5}, {"instructions": "Cheerfully."}])
def test_pipecat_gets_pcm_at_24_khz(server, more):
    """pipecat-ai/pipecat, src/pipecat/services/openai/tts.py: OpenAITTSService.run_tts. Its defaults are
    gpt-4o-mini-tts and alloy, and it assumes 24 kHz."""
    chunks, headers = openais(
        server, input=TEXT, model="gpt-4o-mini-tts", voice="alloy", response_format="pcm", **more
    )
    assert headers["x-sample-rate"] == "24000"
    assert len(b"".join(chunks)) == 2 * round(TEXT_S / more.get("speed", 1) * 24000)


def test_requests_for_an_openai_model_get_pcm_at_openais_rate(tmp_path):
    """This also holds for a model with another rate: pcm does not carry its rate, so the speech would be
    slow and low."""
    other = msgspec.structs.replace(MODEL, sample_rate_hz=48000)
    with Server(tmp_path, models=[other]) as server:
        chunks, headers = openais(
            server, input="tone 20", model="gpt-4o-mini-tts", voice="alloy", response_format="pcm"
        )
        samples = np.frombuffer(b"".join(chunks), "<i2")
        assert headers["x-sample-rate"] == "24000" and "pcm is at 24000 Hz" in headers["x-warning"]
        assert len(samples) == 20 * 1920 // 2
        for fields in ({"model": "fake"}, {"model": "tts-1", "sample_rate": 48000}):
            answer = server.speak("tone 1", response_format="pcm", **fields)
            assert answer.headers["x-sample-rate"] == "48000"
        answer = server.speak("tone 1", response_format="wav", model="tts-1")  # a WAV file carries its rate
        assert answer.headers["x-sample-rate"] == "48000"


# LiveKit


@pytest.mark.parametrize("name", ["mp3", "pcm", "opus", "wav"])
def test_livekit_speaks(server, name):
    """livekit/agents, livekit-plugins/livekit-plugins-openai/livekit/plugins/openai/tts.py: TTS and
    ChunkedStream._run. Its defaults are gpt-4o-mini-tts, ash, speed 1.0 and mp3, and it reads the request
    ID from the answer."""
    chunks, headers = openais(
        server,
        input=TEXT,
        model="gpt-4o-mini-tts",
        voice="ash",
        response_format=name,
        speed=1.0,
        instructions=openai.NOT_GIVEN,
        timeout=httpx.Timeout(30, connect=10),
    )
    assert headers["x-request-id"].startswith("req_")
    lasts(name, b"".join(chunks), TEXT_S, int(headers["x-sample-rate"]))


def test_livekit_prewarms(server):
    """From the same file: TTS.prewarm requests the base address to open a connection, and accepts any
    answer."""
    assert server.http.get("/v1/").status_code == 404


def test_livekit_gets_status_and_code_of_an_error(server):
    """From the same file: it copies the message, the status and the body of an APIStatusError."""
    with pytest.raises(openai.APIStatusError) as refused:
        openais(server, input="full", model="gpt-4o-mini-tts", voice="ash", response_format="mp3")
    assert refused.value.status_code == 503 and refused.value.body["code"] == "engine_full"


# Any client that plays a stream while it arrives


def test_every_format_streams_before_the_speech_ends(server):
    for name in ("mp3", "opus", "aac", "flac", "wav", "pcm"):
        payload = {"model": "tts-1", "input": "tone 30", "voice": "nova", "response_format": name}
        with server.http.stream("POST", "/v1/audio/speech", json=payload) as answer:
            sizes = [len(chunk) for chunk in answer.iter_raw()]
        assert len(sizes) > 5 and max(sizes) < sum(sizes) / 2, name


def test_pcm_is_exactly_the_engines_frames(server):
    chunks, _ = openais(server, input="frames 3", model="tts-1", voice="nova", response_format="pcm")
    assert b"".join(chunks) == b"".join(map(frame, range(3)))
