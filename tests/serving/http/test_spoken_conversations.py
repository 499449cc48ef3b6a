"""Spoken conversations of three turns with OpenAI's own clients, unchanged, with a whole server and a demo checkpoint
of GLM-4-Voice. Chat completions by the Python client are in test_chat.py."""

import base64
import itertools
import json
import shutil
import subprocess

import numpy as np
import pytest
from served import KEY, connected, serving
from shell import ROOT

from zoo.glm4_voice import write_demo

pytestmark = pytest.mark.slow

THERE = ROOT / "tests" / "javascript"
PAGE = 16
SECONDS = (1.0, 2.0, 0.5)
CODES = (13, 25, 7)  # of each clip, 12.5 a second
HZ = 24_000
SETTINGS = {
    "type": "realtime",
    "instructions": "Be brief.",
    "max_output_tokens": 60,
    "temperature": 0,  # so that each run has the same answers
    "audio": {"input": {"turn_detection": None}, "output": {"voice": "marin"}},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = tmp_path_factory.mktemp("conversations")
    with serving(directory, models=[f"glm={write_demo(directory / 'model')}"]) as url:
        yield url


def tone(seconds):
    t = np.arange(int(seconds * HZ)) / HZ
    return (9000 * np.sin(2 * np.pi * 200 * t)).astype("<i2").tobytes()


def say(connection, seconds):
    pcm = tone(seconds)
    for at in range(0, len(pcm), 9600):
        connection.input_audio_buffer.append(audio=base64.b64encode(pcm[at : at + 9600]).decode())
    connection.input_audio_buffer.commit()
    connection.response.create()


def answer(connection):
    """Return the text, the audio and the last event of an answer."""
    text, audio = "", b""
    for event in connection:
        match event.type:
            case "response.output_audio_transcript.delta":
                text += event.delta
            case "response.output_audio.delta":
                audio += base64.b64decode(event.delta)
            case "response.done":
                return text, audio, event.response
            case "error":
                raise AssertionError(event.error)


def prefills_only_what_is_new(usages):
    """Whether each turn found all but the last page of the turns before in the KV cache."""
    for before, usage in itertools.pairwise(usages):
        cached = usage.input_token_details.cached_tokens
        assert before.total_tokens - PAGE - 1 <= cached <= before.total_tokens and cached % PAGE == 0
        assert usage.input_tokens > before.total_tokens
    return True


def test_the_python_client_speaks_three_turns_by_realtime(url):
    usages, spoken = [], 0
    with connected(url).realtime.connect(model="glm") as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session=SETTINGS)
        assert connection.recv().type == "session.updated"
        for seconds in SECONDS:
            say(connection, seconds)
            text, audio, done = answer(connection)
            made = done.usage.output_token_details
            assert done.status in ("completed", "incomplete") and text and audio
            assert done.output[0].content[0].transcript == text
            expected = 256 * (441 * made.audio_tokens // 64) * HZ / 22_050
            assert abs(len(audio) / 2 - expected) <= 2
            usages.append(done.usage)
    assert prefills_only_what_is_new(usages)
    for usage, codes in zip(usages, itertools.accumulate(CODES), strict=True):
        assert usage.input_token_details.audio_tokens == codes + spoken
        spoken += usage.output_token_details.audio_tokens


def test_an_interrupted_conversation_goes_on_from_what_was_heard(url):
    """The next prompt has the tokens of five whole frames, and all before them is in the KV cache."""
    with connected(url).realtime.connect(model="glm") as connection:
        connection.session.update(session=SETTINGS | {"max_output_tokens": 2000})
        say(connection, 1.0)
        for event in connection:
            if event.type == "response.output_audio.delta":
                break
        connection.response.cancel()
        _, _, done = answer(connection)
        assert done.status == "cancelled" and done.status_details.reason == "client_cancelled"
        connection.conversation.item.truncate(
            item_id=done.output[0].id, content_index=0, audio_end_ms=5 * 80 + 30
        )
        connection.session.update(session=SETTINGS)
        say(connection, 0.5)
        _, _, second = answer(connection)
    heard = second.usage.input_token_details
    assert heard.audio_tokens == CODES[0] + 5 + CODES[2]
    assert heard.cached_tokens >= done.usage.input_tokens - PAGE


@pytest.mark.node
@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js: apt install nodejs npm")
@pytest.mark.skipif(
    not all((THERE / "node_modules" / name).is_dir() for name in ("openai", "ws")),
    reason="needs OpenAI's JavaScript client: npm ci --prefix tests/javascript",
)
def test_the_javascript_client_speaks_three_turns_by_both_routes(url):
    command = ["node", THERE / "converse.mjs", url + "/v1", KEY, "glm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout)
    for turns in heard.values():
        assert len(turns) == 3 and all(turn["text"] and turn["bytes"] for turn in turns)
    chat = [turn["usage"]["prompt_tokens_details"] for turn in heard["chat"]]
    realtime = [turn["usage"]["input_token_details"] for turn in heard["realtime"]]
    assert chat[0]["audio_tokens"] == realtime[0]["audio_tokens"] == CODES[0]
    assert 0 < chat[1]["cached_tokens"] < chat[2]["cached_tokens"]
    assert 0 < realtime[1]["cached_tokens"] < realtime[2]["cached_tokens"]
