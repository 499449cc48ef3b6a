"""Speech gets the loudness that was asked for, by EBU R128, and its peaks stay below the ceiling."""

import numpy as np
import pytest

from serving.audio import encode
from serving.audio.loudness import (
    BLOCK_HOPS,
    CEILING_DBFS,
    HOP_S,
    MAX_GAIN_DB,
    Leveler,
    leveled,
    loudness_of,
)
from serving.audio.pcm import pcm16

RATE_HZ = 24000
CEILING = round(32767 * 10 ** (CEILING_DBFS / 20))


def sine(seconds, dbfs, rate_hz=RATE_HZ):
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    return (10 ** (dbfs / 20) * np.sin(2 * np.pi * 997 * at)).astype(np.float32)


def speech(seconds=12.0, dbfs=-20.0, rate_hz=RATE_HZ):
    """Return noise in syllables, with a pause of 0.6 s after every two seconds, as loud as speech is uneven."""
    rng = np.random.default_rng(0)
    count = round(seconds * rate_hz)
    noise = rng.standard_normal(count).astype(np.float32)
    at = np.arange(count) / rate_hz
    syllables = 0.2 + np.abs(np.sin(2 * np.pi * 2.2 * at)) * (1 + 0.5 * np.sin(2 * np.pi * 0.31 * at))
    return (10 ** (dbfs / 20) * 0.5 * noise * syllables * (at % 2.6 < 2)).astype(np.float32)


def streamed(pcm, lufs, sizes=(1920,), rate_hz=RATE_HZ):
    leveler, parts, at, turn = Leveler(rate_hz, lufs), [], 0, 0
    while at < len(pcm) // 2:
        size = sizes[turn % len(sizes)]
        parts.append(leveler.feed(pcm[2 * at : 2 * (at + size)]))
        at, turn = at + size, turn + 1
    return b"".join([*parts, leveler.finish()])


def samples(pcm):
    return np.frombuffer(pcm, "<i2").astype(int)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 22050, 24000, 44100, 48000])
def test_the_measure_is_that_of_the_standard(rate_hz):
    """A sine of 997 Hz at -20 dBFS has -23.01 LUFS in one channel (ITU-R BS.1770-4, annex 1)."""
    assert loudness_of(pcm16(sine(3, -20, rate_hz)), rate_hz) == pytest.approx(-23.01, abs=0.05)


@pytest.mark.parametrize("lufs", [-36.0, -23.0, -16.0])
@pytest.mark.parametrize("dbfs", [-35.0, -20.0, -3.0])
def test_a_file_has_the_loudness_that_was_asked_for(lufs, dbfs):
    heard = leveled(pcm16(speech(dbfs=dbfs)), RATE_HZ, lufs)
    assert loudness_of(heard, RATE_HZ) == pytest.approx(lufs, abs=0.15)
    assert np.abs(samples(heard)).max() <= CEILING


@pytest.mark.parametrize("lufs", [-36.0, -23.0, -16.0])
@pytest.mark.parametrize("dbfs", [-35.0, -20.0, -3.0])
@pytest.mark.parametrize(("seconds", "within_db"), [(3.0, 2.0), (12.0, 1.5)])
def test_a_stream_comes_close_to_it(lufs, dbfs, seconds, within_db):
    heard = streamed(pcm16(speech(seconds, dbfs)), lufs)
    assert loudness_of(heard, RATE_HZ) == pytest.approx(lufs, abs=within_db)
    assert np.abs(samples(heard)).max() <= CEILING


def test_a_steady_sound_gets_its_gain_from_the_first_sample():
    heard = samples(streamed(pcm16(sine(3, -20)), -16.0)) / 32767
    expected = 10 ** ((-20 + 23.01 - 16) / 20)
    first = np.abs(heard[: RATE_HZ // 20]).max()
    assert first == pytest.approx(expected, rel=0.15) and np.abs(heard).max() < expected * 1.02


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.39, 0.4, 1.234])
@pytest.mark.parametrize("sizes", [(1,), (7, 333, 5000), (100_000,)])
def test_the_length_stays_and_the_chunks_make_no_difference(seconds, sizes):
    pcm = pcm16(speech(seconds))
    heard = streamed(pcm, -16.0, sizes)
    assert len(heard) == len(pcm) and heard == streamed(pcm, -16.0)


def test_a_stream_is_held_back_no_longer_than_stated():
    leveler, pcm, num_given = Leveler(RATE_HZ, -16.0), pcm16(speech(3)), 0
    longest_s = BLOCK_HOPS * HOP_S + 0.005 + 0.001
    for at in range(0, len(pcm), 480):
        num_given += len(leveler.feed(pcm[at : at + 480])) // 2
        behind_s = (at + 480) / 2 / RATE_HZ - num_given / RATE_HZ
        assert behind_s <= longest_s, f"{behind_s} s are held back after {at / 2 / RATE_HZ} s"


def test_what_is_held_back_can_be_flushed_without_a_jump():
    pcm = pcm16(sine(4, -20))
    leveler, parts = Leveler(RATE_HZ, -16.0), []
    for at in range(0, len(pcm), 48000):
        parts += [leveler.feed(pcm[at : at + 48000]), leveler.flush()]
        held = at + 48000 - sum(map(len, parts))
        assert held <= 2 * 0.006 * RATE_HZ
    heard = samples(b"".join([*parts, leveler.finish()]))
    assert len(heard) == 4 * RATE_HZ
    steps = np.abs(np.diff(heard / np.abs(heard).max()))
    assert steps.max() < 1.02 * 2 * np.pi * 997 / RATE_HZ


def test_sudden_loud_speech_is_limited_and_quiet_speech_is_not_made_noise():
    quiet = np.concatenate([sine(2, -45), sine(2, 0)])
    for heard in (streamed(pcm16(quiet), -10.0), leveled(pcm16(quiet), RATE_HZ, -10.0)):
        assert np.abs(samples(heard)).max() <= CEILING
    assert loudness_of(leveled(pcm16(sine(2, -60)), RATE_HZ, -10.0), RATE_HZ) == pytest.approx(
        -63 + MAX_GAIN_DB, abs=0.5
    )


def test_silence_stays_silence():
    pcm = bytes(2 * RATE_HZ)
    assert leveled(pcm, RATE_HZ, -16.0) == pcm == streamed(pcm, -16.0)
    assert loudness_of(pcm, RATE_HZ) is None


def test_a_level_that_is_right_changes_nothing_in_a_file():
    pcm = pcm16(speech())
    heard = leveled(pcm, RATE_HZ, loudness_of(pcm, RATE_HZ))
    assert np.abs(samples(heard) - samples(pcm)).max() <= 1


@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_an_encoder_levels_after_the_speed_and_before_the_format(speed):
    pcm = pcm16(speech())
    encoder = encode.Encoder("pcm", RATE_HZ, 48000, speed, loudness=-20.0)
    assert not encoder.is_light
    heard = encoder.feed(pcm) + encoder.finish()
    plain = encode.Encoder("pcm", RATE_HZ, 48000, speed)
    assert len(heard) == len(plain.feed(pcm) + plain.finish())
    assert loudness_of(heard, 48000) == pytest.approx(-20.0, abs=1.5)
    whole = encode.file("wav", pcm, RATE_HZ, 48000, speed, loudness=-20.0)[44:]
    # White noise has more above 10 kHz than speech, where the measure differs a little from rate to rate.
    assert loudness_of(whole, 48000) == pytest.approx(-20.0, abs=0.4)
