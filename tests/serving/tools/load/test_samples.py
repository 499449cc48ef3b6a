"""Samples are counted when they can be played, however the bytes are cut."""

import io
import struct

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.audio.encode import Encoder
from serving.audio.pcm import pcm16, wav_header
from serving.tools.load.samples import FORMATS, Unreadable, counter

RATE_HZ = 24000
SOUND = pcm16(np.sin(np.arange(RATE_HZ) / 20).astype(np.float32) / 3)
WINDOW_BYTES = 2 * 1920


def streamed(form):
    """Return a second of sound in the chunks that this server sends."""
    encoder = Encoder(form, RATE_HZ)
    chunks = [encoder.feed(SOUND[at : at + WINDOW_BYTES]) for at in range(0, len(SOUND), WINDOW_BYTES)]
    return [*chunks, encoder.finish()]


def decoded(form, data):
    """Decode complete data. Returns the number of samples and their rate."""
    name = {"opus": "ogg", "aac": "aac"}.get(form, form)
    with av.open(io.BytesIO(data), "r", format=name) as file:
        return sum(frame.samples for frame in file.decode(audio=0)), file.streams.audio[0].sample_rate


@pytest.mark.parametrize("form", FORMATS)
def test_the_count_equals_the_decoded_samples_in_every_format(form):
    chunks = streamed(form)
    counting = counter(form, RATE_HZ)
    got = [counting.feed(chunk) if chunk else 0 for chunk in chunks]
    if form == "pcm":
        expected, rate_hz = len(SOUND) // 2, RATE_HZ
    else:
        expected, rate_hz = decoded(form, b"".join(chunks))
    assert counting.sample_rate_hz == rate_hz
    assert abs(sum(got) - expected) <= (960 if form == "opus" else 0)  # Ogg's last page trims the end
    # Samples count with the chunk that they arrive in, and no format holds back more than a window.
    heard = np.cumsum(got) / rate_hz
    given = np.minimum(np.arange(1, len(got) + 1) * 0.08, 1.0)
    assert np.all(heard >= given - 0.16)


@pytest.mark.parametrize("form", FORMATS)
def test_the_count_does_not_depend_on_how_the_bytes_are_cut(form):
    data = b"".join(streamed(form))
    whole = counter(form, RATE_HZ).feed(data)
    for size in (1, 7, 1000):
        if size > 1 or form in ("pcm", "wav", "opus"):  # a byte at a time is slow to decode
            cut = counter(form, RATE_HZ)
            assert sum(cut.feed(data[at : at + size]) for at in range(0, len(data), size)) == whole


@given(st.lists(st.integers(0, 200), max_size=20), st.integers(1, 2), st.booleans())
def test_a_header_does_not_count_as_audio(cuts, channels, has_more):
    extra = b"LIST" + struct.pack("<I", 5) + b"hello\0" if has_more else b""
    head = bytearray(wav_header(RATE_HZ))
    struct.pack_into("<HIIH", head, 22, channels, RATE_HZ, 2 * channels * RATE_HZ, 2 * channels)
    data = bytes(head[:36]) + extra + bytes(head[36:]) + bytes(2 * channels * 30)
    counting, total, at = counter("wav", 0), 0, 0
    for size in [*cuts, len(data)]:
        got = counting.feed(data[at : at + size])
        at += size
        assert not (got and at <= 44 + len(extra))
        total += got
    assert total == 30 and counting.sample_rate_hz == RATE_HZ


@pytest.mark.parametrize("form", ["wav", "opus"])
def test_bytes_of_another_format_are_an_error(form):
    with pytest.raises(Unreadable, match="must begin with"):
        counter(form, 0).feed(b'{"error": {"message": "no such thing as a format"}}')
    if form == "opus":
        vorbis = struct.pack("<4sBBqIIIB", b"OggS", 0, 2, 0, 1, 0, 0, 1) + b"\x07" + b"\x01vorbis"
        with pytest.raises(Unreadable, match="not Opus"):
            counter(form, 0).feed(vorbis)
