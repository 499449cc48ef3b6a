"""Transcripts: text of a clip, next to requests that speak."""

from __future__ import annotations

import numpy as np
import pytest
from models import Clock, alone, family, serve
from toy_transcribe import MAX_LETTERS

from serving.engine.engine import Engine, Finished
from serving.engine.wire import describe, request_of
from serving.protocol import AudioClip as SentClip
from serving.protocol import Request as SentRequest
from serving.protocol import Speak
from serving.protocol import Turn as SentTurn
from zoo.request import AudioClip, Request, RequestError, Turn

NAME = "toy_transcribing"
RATE_HZ = 16_000


def clip(seed: int, seconds: float = 0.2) -> AudioClip:
    random = np.random.default_rng(seed)
    return AudioClip(random.uniform(-1, 1, int(seconds * RATE_HZ)).astype(np.float32), RATE_HZ)


def transcript_of(given: AudioClip, **fields) -> Request:
    return Request(text="", turns=(Turn("user", clip=given),), output="transcript", **fields)


@pytest.mark.parametrize("report_lag", [0, 1])
def test_a_transcript_next_to_speech_equals_the_plain_loops(report_lag):
    engine = Engine(family(NAME), max_slots=3, compile=False, report_lag=report_lag, clock=Clock())
    speech = Request(text="Good morning.", seed=3, max_frames=9)
    clips = [clip(seed) for seed in range(4)]
    listeners = serve(engine, {0: [transcript_of(clips[0]), speech], 2: [*map(transcript_of, clips[1:])]})
    spoken, written = listeners.pop(1), listeners
    assert np.allclose(spoken.samples, alone(NAME, speech).samples, atol=5e-5)
    for listener, given in zip(written, clips, strict=True):
        assert isinstance(listener.end, Finished) and listener.end.frames == 0 and not listener.chunks
        text = "".join(listener.texts)
        assert text == alone(NAME, transcript_of(given)).text
        assert listener.end.usage.get("text_tokens", 0) == len(text)
        assert listener.end.reason == ("length" if len(text) == MAX_LETTERS else "stop")
    assert len({"".join(listener.texts) for listener in written}) > 1


def test_the_output_of_a_request_reaches_the_family():
    sent = SentRequest("", output="transcript")
    turn = SentTurn("user", clip=SentClip(bytes(4 * 320), RATE_HZ))
    request = request_of(Speak("a", "m", sent, turns=[turn]))
    assert request.output == "transcript" and request.turns[0].clip.sample_rate_hz == RATE_HZ
    assert describe("m", family(NAME).spec).outputs == ("speech", "transcript")


@pytest.mark.parametrize(
    ("name", "request_", "param", "message"),
    [
        ("toy", transcript_of(clip(0)), "output", "toy hum cannot give 'transcript'; possible: speech"),
        (NAME, Request(text="", output="transcript"), "turns", "one turn with a clip"),
        (NAME, Request(text="a", turns=(Turn("user", clip=clip(0)),), output="transcript"), "turns", "one turn"),
        (NAME, Request(text="", turns=(Turn("user", "a"),), output="transcript"), "turns", "one turn"),
        (NAME, Request(text="a", output="text"), "output", "possible: speech, transcript"),
    ],
)  # fmt: skip
def test_a_transcript_that_cannot_be_made_is_refused(name, request_, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        family(name).prompt(request_)
    assert caught.value.param == param
