"""Samples as a file that is sent while it is made: six formats, chunk by chunk, at the model's own rate or at
one that was asked for.

    int16 chunk ─ stretch ─ resample ─ encode ─ bytes        (each step only where there is something to do)

WAV and FLAC headers leave the length open, and MP3 goes without its header of lengths, since nobody knows
them yet. MP3 and AAC begin with their encoder's delay and end on a whole frame, so they last up to 2,304
samples longer than the speech (64 ms at 24 kHz); the other four are exact. `file` is for speech that is over:
then every header tells the truth, and MP3 is exact too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np
import soxr

from serving.audio import pcm16, wav_header
from serving.stretch import Stretch, stretched

# mono speech, no less than good; low sample rates take 4 bits a sample, the most that their MP3 and AAC allow
MAX_BIT_RATE = 96_000
FULL_SCALE = 32767


@dataclass(frozen=True)
class Format:
    """How a format is made. rates_hz: those its codec takes, None for all; decoded_hz: what it is decoded to,
    if not the codec's rate."""

    media_type: str
    container: str = ""
    codec: str = ""
    rates_hz: tuple[int, ...] | None = None
    decoded_hz: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)  # of a stream
    codec_options: Mapping[str, str] = field(default_factory=dict)

    def codec_hz(self, model_hz: int, asked_hz: int | None) -> int:
        """The rate to encode at. Raises ValueError for a rate that the format has not."""
        if self.decoded_hz is not None:
            if asked_hz not in (None, self.decoded_hz):
                raise ValueError(f"this format is always decoded to {self.decoded_hz} Hz, not {asked_hz}")
            asked_hz = None
        if self.rates_hz is None:
            return asked_hz or model_hz
        if asked_hz is not None and asked_hz not in self.rates_hz:
            raise ValueError(
                f"this format has no {asked_hz} Hz; it has: {', '.join(map(str, self.rates_hz))}"
            )
        rate_hz = asked_hz or model_hz
        return next((known for known in self.rates_hz if known >= rate_hz), self.rates_hz[-1])


MPEG_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
FORMATS = {
    "mp3": Format(
        "audio/mpeg", "mp3", "libmp3lame", MPEG_HZ, options={"write_xing": "0", "id3v2_version": "0"}
    ),
    # A page for each packet: the muxer's own choice is a page a second, so nothing would be heard before.
    "opus": Format(
        "audio/ogg",
        "ogg",
        "libopus",
        (8000, 12000, 16000, 24000, 48000),
        48000,
        {"page_duration": "20000", "fflags": "+bitexact"},  # or every stream has a serial number by chance
        {"frame_duration": "20"},
    ),
    # The encoder's default search, twoloop, spoils the first 40 ms of a voice that begins at once.
    "aac": Format("audio/aac", "adts", "aac", MPEG_HZ, codec_options={"aac_coder": "fast"}),
    "flac": Format("audio/flac", "flac", "flac", options={"metadata_header_padding": "0"}),
    "wav": Format("audio/wav"),
    "pcm": Format("audio/pcm"),
}


class Encoder:
    """One stream. `feed` int16 little-endian mono -> what of the file is ready by now, perhaps nothing;
    `finish` -> the rest.

    `sample_rate_hz` is what the answer is decoded to. One call at a time, on any thread. Raises ValueError
    for a rate the format has not.
    """

    def __init__(self, name: str, model_hz: int, asked_hz: int | None = None, speed: float = 1.0):
        self._form = FORMATS[name]
        self._rate_hz = self._form.codec_hz(model_hz, asked_hz)
        self.sample_rate_hz = self._form.decoded_hz or self._rate_hz
        self._stretch = None if speed == 1 else Stretch(model_hz, speed)
        self.is_light = not (self._form.codec or self._stretch)  # microseconds, so not worth a thread
        self._resampler = (
            None
            if self._rate_hz == model_hz
            else soxr.ResampleStream(model_hz, self._rate_hz, 1, dtype="float32")
        )
        # opened by the first chunk: that takes a millisecond, and some answers never begin
        self._codec: _Codec | None = None
        self._head = wav_header(self._rate_hz) if name == "wav" else b""

    def feed(self, pcm: bytes) -> bytes:
        if self._stretch is not None:
            pcm = self._stretch.feed(pcm)
        return self._encode(self._resample(pcm))

    def finish(self) -> bytes:
        last = b"" if self._stretch is None else self._stretch.finish()
        rest = self._encode(self._resample(last, last=True))
        return rest + self._codec.finish() if self._codec else rest

    def _resample(self, pcm: bytes, last: bool = False) -> bytes:
        if self._resampler is None:
            return pcm
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / FULL_SCALE  # [N]
        return pcm16(self._resampler.resample_chunk(samples, last=last))

    def _encode(self, pcm: bytes) -> bytes:
        if self._form.codec:
            self._codec = self._codec or _Codec(self._form, self._rate_hz, _Sink(), self._form.options)
            return self._codec.feed(pcm)
        head, self._head = self._head, b""
        return head + pcm


def file(name: str, pcm: bytes, model_hz: int, asked_hz: int | None = None, speed: float = 1.0) -> bytes:
    """Speech that is over as a whole file, which knows its length. Raises ValueError for a rate the format
    has not."""
    form = FORMATS[name]
    pcm = stretched(pcm, model_hz, speed)
    rate_hz = form.codec_hz(model_hz, asked_hz)
    if rate_hz != model_hz:
        pcm = pcm16(
            soxr.resample(np.frombuffer(pcm, "<i2").astype(np.float32) / FULL_SCALE, model_hz, rate_hz)
        )
    if not form.codec:
        return wav_header(rate_hz, len(pcm)) + pcm if name == "wav" else pcm
    sink = io.BytesIO()
    codec = _Codec(
        form, rate_hz, sink, {name: value for name, value in form.options.items() if name != "write_xing"}
    )
    codec.feed(pcm)
    codec.finish()
    return sink.getvalue()


class _Sink(io.RawIOBase):
    """Where a muxer writes what cannot be taken back."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.bytes += data
        return len(data)


class _Codec:
    """An encoder and its muxer."""

    def __init__(self, form: Format, rate_hz: int, sink: io.IOBase, options: Mapping[str, str]):
        self.sink = sink
        self.tick = Fraction(1, rate_hz)
        self.position = 0  # samples
        self.container = av.open(
            sink, "w", format=form.container, container_options={"flush_packets": "1", **options}
        )
        stream = self.container.add_stream(
            form.codec, rate=rate_hz, options=dict(form.codec_options), layout="mono"
        )
        assert isinstance(stream, av.AudioStream), f"{form.codec} makes a {type(stream).__name__}"
        self.stream = stream
        self.stream.bit_rate = min(MAX_BIT_RATE, 4 * rate_hz)
        self.container.start_encoding()

    def feed(self, pcm: bytes) -> bytes:
        samples = np.frombuffer(pcm, "<i2")[None]  # [1, N]
        if samples.size:
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = round(1 / self.tick), self.position, self.tick
            self.position += samples.size
            self.container.mux(self.stream.encode(frame))
        return self._take()

    def finish(self) -> bytes:
        self.container.mux(self.stream.encode(None))
        self.container.close()
        return self._take()

    def _take(self) -> bytes:
        if not isinstance(self.sink, _Sink):
            return b""
        taken = bytes(self.sink.bytes)
        self.sink.bytes.clear()
        return taken
