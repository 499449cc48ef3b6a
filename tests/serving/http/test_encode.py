"""The six formats: valid, of the right length, ready early, and the same however the audio is cut."""

import io
import wave

import numpy as np
import pytest
import soundfile
import soxr
from audio_files import decoded

from serving.audio import pcm16
from serving.http import encode

RATE_HZ = 24000
FRAME = 1920
NUM_FRAMES = 30
MIN_SNR_DB = {"mp3": 40, "opus": 25, "aac": 45}  # the beginning included
DELAYED = {"mp3", "aac"}  # their encoders' delay cannot be told in a stream


def speech(rate_hz=RATE_HZ, seconds=2.4):
    """Something like a voice: a gliding tone with overtones that comes and goes. [N] float32"""
    t = np.arange(int(rate_hz * seconds)) / rate_hz
    phase = 2 * np.pi * (180 * t + 20 * np.sin(3 * t))
    return ((0.4 * np.sin(phase) + 0.1 * np.sin(3 * phase)) * (0.6 + 0.4 * np.sin(8 * t))).astype(np.float32)


def streamed(name, pcm, model_hz=RATE_HZ, asked_hz=None, step=2 * FRAME):
    """-> the chunks that come of feeding the samples bit by bit, the last one of `finish`; and the rate they
    are decoded to."""
    encoder = encode.Encoder(name, model_hz, asked_hz)
    chunks = [encoder.feed(pcm[at : at + step]) for at in range(0, len(pcm), step)]
    return [*chunks, encoder.finish()], encoder.sample_rate_hz


def snr_db(heard, truth):
    """How well it is what was said, at the delay that fits best. LAME makes everything 5 % quieter, which is
    no error."""
    delays = range(len(heard) - len(truth) + 1)
    fits = [(float(heard[delay : delay + len(truth)] @ truth), delay) for delay in delays]
    heard = heard[max(fits)[1] :][: len(truth)]
    heard = heard * (truth @ truth) / (heard @ truth)
    return 10 * np.log10((truth @ truth) / ((heard - truth) @ (heard - truth)))


@pytest.mark.parametrize("speed", [0.25, 1.3, 4.0])
@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_faster_stream_is_valid_and_as_long_as_it_should_be(name, speed):
    pcm = pcm16(speech())
    encoder = encode.Encoder(name, RATE_HZ, None, speed)
    chunks = [encoder.feed(pcm[at : at + 2 * FRAME]) for at in range(0, len(pcm), 2 * FRAME)]
    assert sum(map(len, chunks[:15])) > 0 and not encoder.is_light
    chunks.append(encoder.finish())
    rate_hz = encoder.sample_rate_hz
    more = len(decoded(name, b"".join(chunks), rate_hz)) - round(2.4 * rate_hz / speed)
    most = 2304 if name in DELAYED else 2  # resampled, a sample is two
    assert -2 <= more <= most
    whole = decoded(name, encode.file(name, pcm, RATE_HZ, None, speed), rate_hz)
    assert -2 <= len(whole) - round(2.4 * rate_hz / speed) <= most


@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_stream_is_valid_and_is_what_was_said(name):
    truth = speech()
    chunks, rate_hz = streamed(name, pcm16(truth))
    assert rate_hz == (48000 if name == "opus" else RATE_HZ)
    if name == "opus":
        truth = soxr.resample(truth, RATE_HZ, 48000)
    heard = decoded(name, b"".join(chunks), rate_hz)
    more = len(heard) - len(truth)
    assert 0 <= more <= 2304 if name in DELAYED else more == 0
    assert snr_db(heard, truth) > MIN_SNR_DB.get(name, 80)


@pytest.mark.parametrize("name", encode.FORMATS)
def test_bytes_leave_while_the_audio_is_made(name):
    chunks, _ = streamed(name, pcm16(speech()))
    sizes = [len(chunk) for chunk in chunks]
    assert any(sizes[:3]), "a listener waits for more than three frames"
    assert all(any(sizes[at : at + 3]) for at in range(len(sizes) - 3)), "the stream stands still"
    assert sum(sizes[:8]) > 0.1 * sum(sizes)


@pytest.mark.parametrize("name", encode.FORMATS)
def test_it_does_not_matter_how_the_audio_is_cut(name):
    """Nor when it is encoded: no byte is by chance."""
    pcm = pcm16(speech(seconds=1))
    cuts = [b"".join(streamed(name, pcm, step=step)[0]) for step in (2 * FRAME, 2 * 25 * FRAME, 2 * 313)]
    assert len(set(cuts)) == 1


@pytest.mark.parametrize("name", encode.FORMATS)
@pytest.mark.parametrize("frames", [0, 1])
def test_hardly_anything_to_say(name, frames):
    pcm = pcm16(speech())[: 2 * FRAME * frames]
    chunks, rate_hz = streamed(name, pcm)
    for data in (b"".join(chunks), encode.file(name, pcm, RATE_HZ)):
        if frames:
            assert len(decoded(name, data, rate_hz)) >= frames * FRAME
        else:
            assert len(data) < 400  # a header, or nothing


@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_file_knows_its_length(name):
    truth = speech()
    data = encode.file(name, pcm16(truth), RATE_HZ)
    rate_hz = 48000 if name == "opus" else RATE_HZ
    heard = decoded(name, data, rate_hz)
    if name != "aac":  # ADTS has nowhere to say it
        assert len(heard) == len(truth) * rate_hz // RATE_HZ
    if name not in ("aac", "pcm"):
        info = soundfile.info(io.BytesIO(data))
        assert (info.frames / info.samplerate, info.channels) == (len(truth) / RATE_HZ, 1)
    if name == "wav":
        with wave.open(io.BytesIO(data)) as file:
            assert file.readframes(file.getnframes()) == pcm16(truth)


@pytest.mark.parametrize("asked_hz", [8000, 16000, 44100, 48000])
@pytest.mark.parametrize("model_hz", [24000, 44100])
def test_resampled_chunk_by_chunk_is_as_resampled_at_once(model_hz, asked_hz):
    truth = speech(model_hz)
    chunks, rate_hz = streamed("pcm", pcm16(truth), model_hz, asked_hz)
    heard = decoded("pcm", b"".join(chunks), rate_hz)
    at_once = soxr.resample(truth, model_hz, asked_hz)
    assert rate_hz == asked_hz and abs(len(heard) - len(at_once)) <= 1
    common = min(len(heard), len(at_once))
    assert np.abs(heard[:common] - at_once[:common]).max() < 2 / 32767
    assert len(encode.file("pcm", pcm16(truth), model_hz, asked_hz)) // 2 == len(at_once)


@pytest.mark.parametrize("name", sorted({*encode.FORMATS} - {"opus"}))
def test_every_format_at_another_rate(name):
    truth = speech()
    chunks, rate_hz = streamed(name, pcm16(truth), asked_hz=16000)
    more = len(decoded(name, b"".join(chunks), 16000)) - len(truth) * 16000 / RATE_HZ
    assert rate_hz == 16000 and -1 <= more <= (2304 if name in DELAYED else 1)


def test_a_models_rate_that_a_codec_has_not_becomes_the_next_one():
    assert encode.Encoder("mp3", 25000).sample_rate_hz == 32000
    assert encode.Encoder("aac", 96000).sample_rate_hz == 48000
    assert encode.Encoder("flac", 25000).sample_rate_hz == 25000
    truth = speech(25000)
    chunks, _ = streamed("mp3", pcm16(truth), 25000)
    assert abs(len(decoded("mp3", b"".join(chunks), 32000)) / 32000 - 2.4) < 0.1


@pytest.mark.parametrize(
    ("name", "asked_hz", "says"),
    [("mp3", 9000, "it has: 8000, 11025"), ("opus", 24000, "always decoded to 48000")],
)
def test_a_rate_that_a_format_has_not(name, asked_hz, says):
    with pytest.raises(ValueError, match=says):
        encode.Encoder(name, RATE_HZ, asked_hz)
    with pytest.raises(ValueError, match=says):
        encode.file(name, b"", RATE_HZ, asked_hz)


def test_an_encoder_that_is_left_alone_leaves_nothing(capfd):
    for name in encode.FORMATS:
        encoder = encode.Encoder(name, RATE_HZ)
        encoder.feed(pcm16(speech(seconds=0.4)))
        del encoder
    assert capfd.readouterr() == ("", "")
