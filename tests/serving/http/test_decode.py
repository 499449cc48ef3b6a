"""Decoding of reference audio from clients."""

import io
import random

import av
import numpy as np
import pytest
import soundfile

from serving.audio import encode
from serving.audio.pcm import pcm16
from serving.http.decode import Slower, decode

RATE_HZ = 24000
NOISE = np.random.default_rng(3).uniform(-0.5, 0.5, (RATE_HZ, 2)).astype(np.float32)  # [N, 2]
PCM = pcm16(0.4 * np.sin(2 * np.pi * 220 * np.arange(RATE_HZ) / RATE_HZ))


def sound(samples, kind="WAV", subtype=None, rate_hz=RATE_HZ):
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


def samples_of(clip):
    return np.frombuffer(clip.samples, "<f4")


def contained(form, codec):
    """Return one second of audio in a container that browsers and phones use."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.frombuffer(PCM, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate = RATE_HZ
        for part in av.AudioResampler(format=stream.codec_context.format, rate=48000, layout="mono").resample(
            frame
        ):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_U8", "FLOAT", "DOUBLE", "ULAW"])
def test_wav_is_read_exactly_and_averaged_to_mono(subtype, channels):
    data = sound(NOISE[:, :channels], subtype=subtype, rate_hz=44100)
    truth, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    clip = decode(data, 60)
    assert clip.sample_rate_hz == 44100 and clip.duration_s == RATE_HZ / 44100
    assert np.array_equal(samples_of(clip), truth.mean(1))


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_an_mp3_stream_may_begin_within_a_frame(cut):
    data = sound(NOISE, "MP3")
    assert 0.9 < decode(data[cut:], 60).duration_s <= decode(data, 60).duration_s + 0.1


WRITTEN = [("FLAC", None), ("AIFF", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None), ("RF64", None)]


@pytest.mark.parametrize(("kind", "subtype"), WRITTEN)
def test_files_written_by_soundfile_are_read(kind, subtype):
    clip = decode(sound(NOISE, kind, subtype), 60)
    assert clip.duration_s == pytest.approx(1, abs=0.01) and np.abs(samples_of(clip)).max() > 0.1


@pytest.mark.parametrize(
    "name", sorted({*encode.FORMATS} - {"pcm", "ulaw", "mulaw", "alaw"})
)  # with a header
def test_files_sent_by_this_server_are_read(name):
    encoder = encode.Encoder(name, RATE_HZ)
    for data in (encoder.feed(PCM) + encoder.finish(), encode.file(name, PCM, RATE_HZ)):
        clip = decode(data, 60)
        assert clip.duration_s == pytest.approx(1, abs=0.1) and samples_of(clip).std() == pytest.approx(
            0.28, abs=0.03
        )


@pytest.mark.parametrize(("form", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "libopus")])
def test_recordings_of_phones_and_browsers_are_read(form, codec):
    clip = decode(contained(form, codec), 60)
    assert clip.duration_s == pytest.approx(1, abs=0.1) and samples_of(clip).std() == pytest.approx(
        0.28, abs=0.03
    )


WAV = sound(NOISE)
BAD = {
    "nothing": (b"", "it is empty"),
    "text": (b"Good morning, this is no audio.", "format is not supported"),
    "a playlist": (b"#EXTM3U\nhttp://127.0.0.1/secret.wav\n", "format is not supported"),
    "a list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "format is not supported"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "format is not supported"),
    "a word": (b"RIFF", "cannot be read as wav"),
    "no samples": (WAV[:44], "contains no audio"),
    "zeros": (b"RIFF" + bytes(500), "cannot be read as wav"),
    "noise": (b"fLaC" + NOISE.tobytes(), "cannot be read as flac"),
    "noise in ogg": (b"OggS" + NOISE.tobytes(), "cannot be read as ogg"),
    "noise in mp4": (b"\0\0\0\x20ftypM4A " + NOISE.tobytes(), "cannot be read as mp4"),
    "half a file": (sound(NOISE, "FLAC")[:50_000], "cannot be read as flac"),
    "nine channels": (sound(np.zeros((100, 9))), "9 channels; the maximum is 8"),
    "infinite samples": (sound(np.array([[np.inf, -np.inf]] * 100), "WAV", "FLOAT"), "not finite"),
    "huge samples": (sound(np.full((100, 2), 3e38), "WAV", "FLOAT"), "not finite"),
    "1 Hz": (sound(NOISE, rate_hz=1), "sample rate is 1 Hz; use 8000 to 192000 Hz"),
    "ten seconds": (sound(np.zeros((10 * RATE_HZ, 1))), "longer than the maximum of 5 s"),
    "an endless header": (
        encode.wav_header(RATE_HZ) + bytes(2 * 6 * RATE_HZ),
        "longer than the maximum of 5 s",
    ),
}


@pytest.mark.parametrize(("data", "says"), BAD.values(), ids=BAD)
def test_unusable_files_are_refused(data, says, capfd):
    with pytest.raises(ValueError, match=says):
        decode(data, 5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("channels", [6, 8])
def test_surround_sound_is_mixed_down(channels):
    center = np.zeros((RATE_HZ, channels), np.float32)
    center[:, 2] = NOISE[:, 0]  # of 5.1 and 7.1
    clip = decode(sound(center), 60)
    assert clip.duration_s == 1
    assert np.corrcoef(samples_of(clip), NOISE[:, 0])[0, 1] > 0.99


def test_rates_above_48_khz_are_resampled():
    """A tone below both Nyquist frequencies equals one made at the lower rate."""
    at, kept_at = (np.arange(2 * rate_hz) / rate_hz for rate_hz in (192_000, 48_000))
    file = io.BytesIO()
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * 1000 * at), 192_000, format="WAV", subtype="FLOAT")
    clip = decode(file.getvalue(), 60)
    assert (clip.sample_rate_hz, clip.duration_s) == (48_000, 2.0)
    heard = np.frombuffer(clip.samples, "<f4")
    truth = 0.5 * np.sin(2 * np.pi * 1000 * kept_at)
    assert np.abs(heard - truth)[1000:-1000].max() < 1e-4


def test_decoding_stops_at_the_longest_duration(monkeypatch):
    """The file has ten minutes in a few kilobytes; after one second it is refused as too long."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(600 * 48_000, np.int16), 48_000, format="FLAC")
    fed = []
    monkeypatch.setattr(Slower, "feed", lambda self, samples, is_last=False: fed.append(len(samples)) or b"")
    with pytest.raises(ValueError, match="longer than the maximum of 1 s"):
        decode(file.getvalue(), 1)
    assert sum(fed) <= 48_000


@pytest.mark.slow
def test_randomly_changed_files_are_read_or_refused():
    """Some of these files name a codec that has no decoder."""
    mutate, seeds = random.Random(1), [in_container("matroska", "flac"), in_container("mp4", "aac")]
    refusals = []
    for _ in range(1500):
        data = bytearray(mutate.choice(seeds))
        for _ in range(mutate.randint(1, 4)):
            data[mutate.randrange(min(len(data), 400))] = mutate.randrange(256)
        try:
            decode(bytes(data), 30)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 100 and "its codec is not supported" in refusals


def in_container(form, codec):
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.full((1, 4800), 1000, np.int16), format="s16", layout="mono")
        frame.sample_rate, frame.pts = 48_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
