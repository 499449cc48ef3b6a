"""All formats are valid, have the right length, are ready early, and do not depend on the chunks."""

import io
import wave

import av
import numpy as np
import pytest
import soundfile
import soxr
from audio_files import decoded

from serving.audio import encode
from serving.audio.pcm import pcm16

RATE_HZ = 24000
FRAME = 1920
NUM_FRAMES = 30
# including the beginning
MIN_SNR_DB = {
    "mp3": 40,
    "opus": 25,
    "ogg": 25,
    "webm": 25,
    "aac": 45,
    "m4a": 45,
    "ulaw": 30,
    "mulaw": 30,
    "alaw": 30,
}
OWN_HZ = {"opus": 48000, "ogg": 48000, "webm": 48000, "ulaw": 8000, "mulaw": 8000, "alaw": 8000}
DELAYED = {"mp3", "aac", "m4a"}  # a stream cannot say how long their encoder's delay is


def speech(rate_hz=RATE_HZ, seconds=2.4):
    """Return samples [N] float32 similar to a voice: a gliding tone with overtones and changing loudness."""
    t = np.arange(int(rate_hz * seconds)) / rate_hz
    phase = 2 * np.pi * (180 * t + 20 * np.sin(3 * t))
    return ((0.4 * np.sin(phase) + 0.1 * np.sin(3 * phase)) * (0.6 + 0.4 * np.sin(8 * t))).astype(np.float32)


def streamed(name, pcm, model_hz=RATE_HZ, asked_hz=None, step=2 * FRAME):
    """Feed the samples in steps. Return the chunks, the last one from `finish`, and the rate that they
    decode to."""
    encoder = encode.Encoder(name, model_hz, asked_hz)
    chunks = [encoder.feed(pcm[at : at + step]) for at in range(0, len(pcm), step)]
    return [*chunks, encoder.finish()], encoder.sample_rate_hz


def snr_db(heard, truth):
    """Return the signal-to-noise ratio at the delay that fits best. The gain is ignored, because LAME makes
    everything 5 % quieter."""
    delays = range(len(heard) - len(truth) + 1)
    fits = [(float(heard[delay : delay + len(truth)] @ truth), delay) for delay in delays]
    heard = heard[max(fits)[1] :][: len(truth)]
    heard = heard * (truth @ truth) / (heard @ truth)
    return 10 * np.log10((truth @ truth) / ((heard - truth) @ (heard - truth)))


@pytest.mark.parametrize("speed", [0.25, 1.3, 4.0])
@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_stream_at_another_speed_is_valid_and_has_the_right_length(name, speed):
    pcm = pcm16(speech())
    encoder = encode.Encoder(name, RATE_HZ, None, speed)
    chunks = [encoder.feed(pcm[at : at + 2 * FRAME]) for at in range(0, len(pcm), 2 * FRAME)]
    assert sum(map(len, chunks[:15])) > 0 and not encoder.is_light
    chunks.append(encoder.finish())
    rate_hz = encoder.sample_rate_hz
    more = len(decoded(name, b"".join(chunks), rate_hz)) - round(2.4 * rate_hz / speed)
    most = 2304 if name in DELAYED else 2  # opus doubles the rate, so one sample becomes two
    assert -2 <= more <= most
    whole = decoded(name, encode.file(name, pcm, RATE_HZ, None, speed), rate_hz)
    assert -2 <= len(whole) - round(2.4 * rate_hz / speed) <= most


@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_stream_is_valid_and_has_the_original_samples(name):
    truth = speech()
    chunks, rate_hz = streamed(name, pcm16(truth))
    assert rate_hz == OWN_HZ.get(name, RATE_HZ)
    if rate_hz != RATE_HZ:
        truth = soxr.resample(truth, RATE_HZ, rate_hz)
    heard = decoded(name, b"".join(chunks), rate_hz)
    more = len(heard) - len(truth)
    assert 0 <= more <= 2304 if name in DELAYED else more == 0
    assert snr_db(heard, truth) > MIN_SNR_DB.get(name, 80)


@pytest.mark.parametrize("name", encode.FORMATS)
def test_bytes_are_ready_while_audio_arrives(name):
    chunks, _ = streamed(name, pcm16(speech()))
    sizes = [len(chunk) for chunk in chunks]
    assert any(sizes[:3]), "no bytes within the first three frames"
    assert all(any(sizes[at : at + 3]) for at in range(len(sizes) - 3)), "no bytes for three frames"
    assert sum(sizes[:8]) > 0.1 * sum(sizes)


@pytest.mark.parametrize("name", encode.FORMATS)
def test_the_bytes_do_not_depend_on_the_chunks(name):
    """No byte is random, so the time of encoding does not matter either."""
    pcm = pcm16(speech(seconds=1))
    cuts = [b"".join(streamed(name, pcm, step=step)[0]) for step in (2 * FRAME, 2 * 25 * FRAME, 2 * 313)]
    assert len(set(cuts)) == 1


@pytest.mark.parametrize("name", encode.FORMATS)
@pytest.mark.parametrize("frames", [0, 1])
def test_very_short_audio_is_valid(name, frames):
    pcm = pcm16(speech())[: 2 * FRAME * frames]
    chunks, rate_hz = streamed(name, pcm)
    for data in (b"".join(chunks), encode.file(name, pcm, RATE_HZ)):
        if frames:
            assert len(decoded(name, data, rate_hz)) >= frames * FRAME * rate_hz // RATE_HZ
        else:
            assert len(data) < 800  # a header, or nothing


@pytest.mark.parametrize("name", encode.FORMATS)
def test_a_file_has_its_true_length(name):
    truth = speech()
    data = encode.file(name, pcm16(truth), RATE_HZ)
    rate_hz = OWN_HZ.get(name, RATE_HZ)
    heard = decoded(name, data, rate_hz)
    if name == "m4a":
        with av.open(io.BytesIO(data)) as file:
            assert file.duration == 2_400_000  # in microseconds
    elif name != "aac":  # ADTS has no field for the length
        assert len(heard) == len(truth) * rate_hz // RATE_HZ
    if name in ("mp3", "opus", "flac", "wav"):
        info = soundfile.info(io.BytesIO(data))
        assert (info.frames / info.samplerate, info.channels) == (len(truth) / RATE_HZ, 1)
    if name == "wav":
        with wave.open(io.BytesIO(data)) as file:
            assert file.readframes(file.getnframes()) == pcm16(truth)


@pytest.mark.parametrize("asked_hz", [8000, 16000, 44100, 48000])
@pytest.mark.parametrize("model_hz", [24000, 44100])
def test_resampling_by_chunks_equals_resampling_at_once(model_hz, asked_hz):
    truth = speech(model_hz)
    chunks, rate_hz = streamed("pcm", pcm16(truth), model_hz, asked_hz)
    heard = decoded("pcm", b"".join(chunks), rate_hz)
    at_once = soxr.resample(truth, model_hz, asked_hz)
    assert rate_hz == asked_hz and abs(len(heard) - len(at_once)) <= 1
    common = min(len(heard), len(at_once))
    assert np.abs(heard[:common] - at_once[:common]).max() < 2 / 32767
    assert len(encode.file("pcm", pcm16(truth), model_hz, asked_hz)) // 2 == len(at_once)


@pytest.mark.parametrize("name", sorted({*encode.FORMATS} - {*OWN_HZ}))
def test_every_format_supports_another_rate(name):
    truth = speech()
    chunks, rate_hz = streamed(name, pcm16(truth), asked_hz=16000)
    more = len(decoded(name, b"".join(chunks), 16000)) - len(truth) * 16000 / RATE_HZ
    assert rate_hz == 16000 and -1 <= more <= (2304 if name in DELAYED else 1)


def test_a_models_rate_is_rounded_up_to_one_that_the_codec_supports():
    assert encode.Encoder("mp3", 25000).sample_rate_hz == 32000
    assert encode.Encoder("aac", 96000).sample_rate_hz == 48000
    assert encode.Encoder("flac", 25000).sample_rate_hz == 25000
    truth = speech(25000)
    chunks, _ = streamed("mp3", pcm16(truth), 25000)
    assert abs(len(decoded("mp3", b"".join(chunks), 32000)) / 32000 - 2.4) < 0.1


@pytest.mark.parametrize(
    ("name", "asked_hz", "says"),
    [
        ("mp3", 9000, "use one of 8000, 11025"),
        ("opus", 24000, "always decodes to 48000"),
        ("ulaw", 16000, "use one of 8000"),
    ],
)
def test_an_unsupported_rate_is_refused(name, asked_hz, says):
    with pytest.raises(ValueError, match=says):
        encode.Encoder(name, RATE_HZ, asked_hz)
    with pytest.raises(ValueError, match=says):
        encode.file(name, b"", RATE_HZ, asked_hz)


@pytest.mark.parametrize("name", [name for name, form in encode.FORMATS.items() if form.has_bit_rate])
def test_a_file_and_a_stream_have_the_bit_rate_that_was_asked_for(name):
    pcm = pcm16(0.5 * speech() + np.random.default_rng(0).uniform(-0.2, 0.2, 57600))
    sizes = []
    for bit_rate in (32_000, 64_000):
        encoder = encode.Encoder(name, RATE_HZ, bit_rate=bit_rate)
        stream = encoder.feed(pcm) + encoder.finish()
        whole = encode.file(name, pcm, RATE_HZ, bit_rate=bit_rate)
        assert all(len(decoded(name, data, encoder.sample_rate_hz)) for data in (stream, whole))
        sizes.append((len(stream), len(whole)))
    for slow, fast in zip(*sizes, strict=True):  # without what the containers add
        assert (fast - slow) * 8 / 2.4 == pytest.approx(32_000, rel=0.25)


def test_an_abandoned_encoder_prints_nothing(capfd):
    for name in encode.FORMATS:
        encoder = encode.Encoder(name, RATE_HZ)
        encoder.feed(pcm16(speech(seconds=0.4)))
        del encoder
    assert capfd.readouterr() == ("", "")
