"""Decode reference audio from clients: the bytes of an audio file -> samples. A server calls this only in its
decoder processes (decoders.py), because a hostile file can take any amount of memory and time."""

from __future__ import annotations

import io

import numpy as np
import soxr

from serving.protocol import AudioClip

MAX_CHANNELS = 8
MIN_RATE_HZ, MAX_RATE_HZ = 8000, 192_000
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
# Of a file that begins like none: it may be a part of an MP3 file, and FFmpeg looks for its first frame.
CUT_OFF = "mp3"
KNOWN = "WAV, FLAC, MP3, Ogg (Opus, Vorbis), AAC, M4A/MP4, WebM or AIFF"


def decode(data: bytes, max_s: float) -> AudioClip:
    """Return the samples of an audio file, mixed down to one channel.

    The samples keep their rate up to MAX_KEPT_HZ; higher rates are resampled to it. Two channels are
    averaged the way librosa's to_mono does, because the models' own code reads references with it. FFmpeg
    mixes down surround sound. Decoding goes frame by frame and fails as soon as it exceeds max_s, because a
    file of a few kilobytes can hold minutes of audio. Raises ValueError.
    """
    import av  # not in the HTTP process, which shares this file's constants

    if not data:
        raise ValueError("it is empty")
    form = container(data[:16])
    samples = bytearray()
    num_decoded = 0
    try:
        # We name the container because FFmpeg's guess might be a playlist, which names other files.
        options = {"protocol_whitelist": ""}
        with av.open(io.BytesIO(data), "r", format=form or CUT_OFF, options=options) as file:
            if not file.streams.audio:
                raise ValueError("it contains no audio")
            stream = file.streams.audio[0]
            if stream.codec_context is None:
                raise ValueError("its codec is not supported")
            rate_hz, channels = stream.codec_context.sample_rate, stream.codec_context.channels
            if channels > MAX_CHANNELS:
                raise ValueError(f"it has {channels} channels; the maximum is {MAX_CHANNELS}")
            if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
                possible = f"{MIN_RATE_HZ} to {MAX_RATE_HZ} Hz"
                raise ValueError(f"its sample rate is {rate_hz} Hz; use {possible}")
            layout = "mono" if channels > 2 else stream.layout
            as_floats = av.AudioResampler(format="fltp", layout=layout, rate=rate_hz)
            slower = Slower(rate_hz)
            for frame in file.decode(stream):
                num_decoded += frame.samples
                if num_decoded > max_s * rate_hz:
                    raise ValueError(f"it lasts longer than the maximum of {max_s:g} s")
                for part in as_floats.resample(frame):
                    samples += slower.feed(mixed_down(part.to_ndarray()))
            samples += slower.feed(np.empty(0, np.float32), is_last=True)
    except MemoryError:  # one of FFmpeg's errors, and Python's own
        raise
    except av.FFmpegError as error:
        if form is None:
            raise ValueError(f"its audio format is not supported; use {KNOWN}") from None
        raise ValueError(f"it cannot be read as {form} audio: {error.strerror}") from None
    if not samples:
        raise ValueError("it contains no audio")
    return AudioClip(bytes(samples), slower.kept_hz)


def mixed_down(channels: np.ndarray) -> np.ndarray:
    """Average samples [C, N] -> [N]. Raises ValueError if one is not finite."""
    with np.errstate(all="ignore"):  # numpy would warn of them in the server's log
        samples: np.ndarray = channels.mean(0)
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are not finite (NaN or infinite)")
    return samples


class Slower:
    """Resamples to MAX_KEPT_HZ where the given rate is higher; no model uses more."""

    def __init__(self, rate_hz: int):
        self.kept_hz = min(rate_hz, MAX_KEPT_HZ)
        self._resampler: soxr.ResampleStream | None = None
        if self.kept_hz < rate_hz:
            self._resampler = soxr.ResampleStream(rate_hz, self.kept_hz, 1, dtype="float32")

    def feed(self, samples: np.ndarray, is_last: bool = False) -> bytes:
        """Take samples [N] float32 and return those that are ready, as little-endian bytes."""
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        return samples.astype("<f4").tobytes()


def container(head: bytes) -> str | None:
    """Return the FFmpeg demuxer for a file that begins with these bytes, or None if the format is unknown."""
    for at, mark, form in MARKS:
        if head[at:].startswith(mark):
            return form
    # The sync word of MPEG audio. AAC (ADTS) has 0 in the bits of the layer.
    if len(head) > 1 and head[0] == 0xFF and head[1] >= 0xE0:
        return "mp3" if head[1] & 0x06 else "aac"
    return None
