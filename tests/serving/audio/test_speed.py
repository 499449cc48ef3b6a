"""Faster and slower speech has the right length and its original pitch, however it is cut into chunks."""

import numpy as np
import pytest

from serving.audio.pcm import pcm16
from serving.audio.speed import MAX_SPEED, MIN_SPEED, Stretch, stretched, tempos

RATE_HZ = 24000
SPEEDS = (0.25, 0.4, 0.5, 0.9, 1.1, 1.5, 2.0, 3.0, 4.0)
TONE_HZ = 220.0


def tone(seconds, rate_hz=RATE_HZ):
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * TONE_HZ * at)).astype(np.float32)


def pitch_hz(pcm, rate_hz=RATE_HZ):
    samples = np.frombuffer(pcm, "<i2") * np.hanning(len(pcm) // 2)
    return float(np.argmax(np.abs(np.fft.rfft(samples, 8 * len(samples)))) * rate_hz / (8 * len(samples)))


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("rate_hz", [8000, 24000, 44100, 48000])
def test_the_length_follows_the_speed_and_the_pitch_stays(speed, rate_hz):
    heard = stretched(pcm16(tone(3, rate_hz)), rate_hz, speed)
    assert len(heard) // 2 == round(3 * rate_hz / speed)
    assert abs(pitch_hz(heard, rate_hz) - TONE_HZ) < 1
    loudest = np.abs(np.frombuffer(heard, "<i2")).reshape(-1)[: len(heard) // 4].max()
    assert 0.4 < loudest / 32767 < 0.6


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_output_does_not_depend_on_the_chunks(speed):
    pcm, whole = pcm16(tone(1)), stretched(pcm16(tone(1)), RATE_HZ, speed)
    for step in (2, 3840, 7770):
        stretch = Stretch(RATE_HZ, speed)
        cut = b"".join(stretch.feed(pcm[at : at + step]) for at in range(0, len(pcm), step))
        assert cut + stretch.finish() == whole


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("num_samples", [0, 1, 7, 100, 480, 2000])
def test_very_short_speech_is_not_lost(speed, num_samples):
    heard = stretched(bytes(2 * num_samples), RATE_HZ, speed)
    assert len(heard) == 2 * round(num_samples / speed)


def test_words_stay_in_their_place():
    """A loud part between quiet ones starts at its time divided by the speed."""
    loud = np.zeros(4 * RATE_HZ, np.float32)
    loud[RATE_HZ : 2 * RATE_HZ] = tone(1)
    for speed in (0.5, 1.5, 4.0):
        heard = np.abs(np.frombuffer(stretched(pcm16(loud), RATE_HZ, speed), "<i2")) > 3000
        first, last = np.flatnonzero(heard)[[0, -1]] / RATE_HZ
        assert abs(first - 1 / speed) < 0.05 and abs(last - 2 / speed) < 0.06


def test_the_output_streams():
    """Each tenth of a second is returned before the next one is fed."""
    stretch = Stretch(RATE_HZ, 1.5)
    tenth = pcm16(tone(0.1))
    given = [len(stretch.feed(tenth)) for _ in range(10)]
    assert sum(given[:3]) > 0 and all(given[2:])
    assert sum(given) > 0.8 * 10 * len(tenth) / 1.5


def test_speed_1_changes_nothing():
    pcm = np.random.default_rng(0).integers(-(2**15), 2**15, 1001, np.int16).tobytes()
    assert stretched(pcm, RATE_HZ, 1) is pcm


@pytest.mark.parametrize("speed", [MIN_SPEED - 0.01, MAX_SPEED + 0.01, 0.0, -1.0, float("nan"), float("inf")])
def test_other_speeds_are_refused(speed):
    with pytest.raises(ValueError, match=r"from 0\.25 to 4 is possible"):
        stretched(b"\0\0", RATE_HZ, speed)


def test_no_filter_is_so_fast_that_it_drops_sound():
    assert all(0.5 <= tempo <= 2 for speed in SPEEDS for tempo in tempos(speed))
    assert all(np.prod(tempos(speed)) == pytest.approx(speed) for speed in SPEEDS)
