"""Reference audio as clients send it: bytes of some container -> samples. Runs in the HTTP process, where
bytes made to break a decoder cannot reach the engine."""

from __future__ import annotations

import io

import av
import numpy as np
import soxr

from serving.protocol import AudioClip

MAX_CHANNELS = 2
MAX_RATE_HZ = 192_000
MAX_KEPT_HZ = 48_000
MARKS = (
    (0, b"RIFF", "wav"),
    (0, b"RF64", "wav"),
    (0, b"FORM", "aiff"),
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"ID3", "mp3"),
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)
KNOWN = "WAV, FLAC, MP3, Ogg (Opus, Vorbis), AAC, M4A/MP4, WebM or AIFF"


def decode(data: bytes, max_s: float) -> AudioClip:
    """A file of one or two channels -> its samples, averaged to one channel, at the rate they have, or at
    MAX_KEPT_HZ. Raises ValueError.

    Channels are averaged as librosa's to_mono does, which the models' references are read with. All of it
    happens frame by frame: a few kilobytes may be minutes, and no more is decoded than is taken.
    """
    form = container(data[:16])
    if form is None:
        raise ValueError(f"it is not audio that is known here: {KNOWN}")
    samples = bytearray()
    num_decoded = 0
    try:
        # The container is said, not guessed from the content: some that could be guessed are playlists, which
        # name other files.
        with av.open(io.BytesIO(data), "r", format=form, options={"protocol_whitelist": ""}) as file:
            if not file.streams.audio:
                raise ValueError("there is no audio in it")
            stream = file.streams.audio[0]
            if stream.codec_context is None:
                raise ValueError("it is in a codec that cannot be read here")
            rate_hz, channels = stream.codec_context.sample_rate, stream.codec_context.channels
            if channels > MAX_CHANNELS:
                raise ValueError(f"it has {channels} channels; one or two are possible")
            if not 0 < rate_hz <= MAX_RATE_HZ:
                raise ValueError(f"it has {rate_hz} Hz; up to {MAX_RATE_HZ} are possible")
            as_floats = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate_hz)
            slower = Slower(rate_hz)
            for frame in file.decode(stream):
                num_decoded += frame.samples
                if num_decoded > max_s * rate_hz:
                    raise ValueError(f"it lasts longer than {max_s:g} s, the most that is possible here")
                for part in as_floats.resample(frame):
                    samples += slower.feed(part.to_ndarray().mean(0))
            samples += slower.feed(np.empty(0, np.float32), is_last=True)
    except av.FFmpegError as error:
        raise ValueError(f"it is no {form} audio that can be read: {error.strerror}") from None
    if not samples:
        raise ValueError("there is no audio in it")
    return AudioClip(bytes(samples), slower.kept_hz)


class Slower:
    """Samples at a rate -> the same at MAX_KEPT_HZ, if that is less: no model hears more."""

    def __init__(self, rate_hz: int):
        self.kept_hz = min(rate_hz, MAX_KEPT_HZ)
        self._resampler: soxr.ResampleStream | None = None
        if self.kept_hz < rate_hz:
            self._resampler = soxr.ResampleStream(rate_hz, self.kept_hz, 1, dtype="float32")

    def feed(self, samples: np.ndarray, is_last: bool = False) -> bytes:
        """[N] float32 -> little-endian bytes of what is ready by now."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        return samples.astype("<f4").tobytes()


def container(head: bytes) -> str | None:
    """The demuxer for a file that begins with these bytes."""
    for at, mark, form in MARKS:
        if head[at:].startswith(mark):
            return form
    # a frame of MPEG audio; AAC is what calls itself layer 0
    if len(head) > 1 and head[0] == 0xFF and head[1] >= 0xE0:
        return "mp3" if head[1] & 0x06 else "aac"
    return None
