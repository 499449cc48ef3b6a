"""OpenAI's JavaScript client, used as in its documentation, with every family."""

import base64
import json
import shutil
import subprocess
from functools import cache

import numpy as np
import pytest
from audio_files import decoded
from models import directory
from served import KEY, serving
from shell import ROOT

import zoo

THERE = ROOT / "tests" / "javascript"
FAMILIES = [*zoo.families(), "the small voice"]

pytestmark = [
    pytest.mark.node,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js: apt install nodejs npm"),
    pytest.mark.skipif(
        not (THERE / "node_modules" / "openai").is_dir(),
        reason="needs OpenAI's JavaScript client: npm ci --prefix tests/javascript",
    ),
]


@cache
def heard(name, where):
    """Run the program with the client against a server of one family, and return its results."""
    models = [] if name == "the small voice" else [directory(name, "tiny")]
    with serving(where, models=models) as url:
        command = ["node", THERE / "speak.mjs", url + "/v1", KEY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return heard(request.param, tmp_path_factory.mktemp("served"))


def audio(answer):
    return base64.b64decode(answer["audio"])


def values(pcm):
    return np.frombuffer(pcm, "<i2").astype(int)


def same(one, other):
    """Whether two answers are equal up to the last bits: timing decides which frames share a window."""
    return len(one) == len(other) > 0 and np.abs(values(one) - values(other)).max() <= 2


def test_the_javascript_client_streams(family):
    pcm = family["pcm"]
    assert pcm["length"] is None and pcm["num_chunks"] > 0 and pcm["requestId"]
    # OpenAI's rate, whatever the model's own rate is.
    assert pcm["rate"] == 24000 and values(audio(pcm)).any()
    assert "is used instead" in pcm["warning"]
    assert len(family["models"]) == 1


def test_the_javascript_client_gets_mp3_by_default(family):
    mp3 = family["mp3"]
    assert mp3["type"] == "audio/mpeg" and mp3["num_chunks"] >= 1
    seconds = len(decoded("mp3", audio(mp3), mp3["rate"])) / mp3["rate"]
    assert 0 <= seconds - len(audio(family["pcm"])) / 2 / 24000 < 0.12


def test_a_whole_answer_equals_the_stream(family):
    whole = audio(family["whole"])
    assert int(family["whole"]["length"]) == len(whole)
    assert same(whole, audio(family["pcm"]))
    wav = audio(family["wav"])
    assert wav[:4] == b"RIFF" and int.from_bytes(wav[4:8], "little") == len(wav) - 8


def test_the_events_join_to_the_answer(family):
    *deltas, last = family["events"]
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and last[
        "type"
    ] == "speech.audio.done"
    assert same(b"".join(base64.b64decode(event["audio"]) for event in deltas), audio(family["pcm"]))
    assert last["usage"]["output_tokens"] > 0


def test_the_javascript_client_cancels_and_asks_again(family):
    assert family["left"]["heard"] > 0 and family["left"]["error"] in (None, "AbortError")
    assert same(audio(family["afterwards"]), audio(family["pcm"]))


def test_errors_become_the_javascript_clients_exceptions(family):
    empty = family["empty"]
    assert (empty["class"], empty["status"], empty["param"]) == ("BadRequestError", 400, "input")
    assert empty["requestID"] and empty["type"] == "invalid_request_error"
    assert family["format"]["param"] == "response_format" and "mp3" in family["format"]["message"]
    assert family["key"] == "AuthenticationError"
