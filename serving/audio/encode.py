"""Encode samples as a file that is sent while it is made: ten formats, chunk by chunk, at the model's own
rate or at a requested one.

    int16 chunk ─ stretch ─ level ─ resample ─ encode ─ bytes        (each step only if needed)

The length of a stream is not known when it begins, so WAV and FLAC headers leave it open and MP3 has no
header with lengths. MP3 and AAC begin with their encoder's delay and end on a whole frame, so they last up
to 2,304 samples longer than the speech (64 ms at 24 kHz). The other formats are exact. `file` encodes
speech that is complete: every header then has the true length, and MP3 is exact too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import soxr

from serving.audio.loudness import Leveler, leveled
from serving.audio.pcm import pcm16, wav_header
from serving.audio.speed import Stretch, stretched

# The default. Good quality for mono speech. Low sample rates get 4 bits a sample, the maximum of MP3 and AAC
# there.
MAX_BIT_RATE = 96_000
FULL_SCALE = 32767


@dataclass(frozen=True)
class Format:
    """How a format is encoded. rates_hz: the sample rates of its codec, None for any. decoded_hz: the rate
    that it decodes to, if that is not the codec's rate."""

    media_type: str
    container: str = ""
    codec: str = ""
    rates_hz: tuple[int, ...] | None = None
    decoded_hz: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)  # of the muxer, for a stream
    codec_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_bit_rate(self) -> bool:
        return self.codec in ("libmp3lame", "libopus", "aac")

    def codec_hz(self, model_hz: int, asked_hz: int | None) -> int:
        """Return the rate to encode at. Raises ValueError for a rate that the format does not support."""
        if self.decoded_hz is not None:
            if asked_hz not in (None, self.decoded_hz):
                raise ValueError(f"this format always decodes to {self.decoded_hz} Hz, not {asked_hz} Hz")
            asked_hz = None
        if self.rates_hz is None:
            return asked_hz or model_hz
        if asked_hz is not None and asked_hz not in self.rates_hz:
            raise ValueError(
                f"this format does not support {asked_hz} Hz; use one of {', '.join(map(str, self.rates_hz))}"
            )
        rate_hz = asked_hz or model_hz
        return next((known for known in self.rates_hz if known >= rate_hz), self.rates_hz[-1])


MPEG_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
FORMATS = {
    "mp3": Format(
        "audio/mpeg", "mp3", "libmp3lame", MPEG_HZ, options={"write_xing": "0", "id3v2_version": "0"}
    ),
    # One page per packet. The muxer's default is one page a second, so first audio would be a second late.
    "opus": Format(
        "audio/ogg",
        "ogg",
        "libopus",
        (8000, 12000, 16000, 24000, 48000),
        48000,
        {"page_duration": "20000", "fflags": "+bitexact"},  # without bitexact, serial numbers are random
        {"frame_duration": "20"},
    ),
    # The same packets in a container that browsers' MediaSource plays, one cluster each.
    "webm": Format(
        "audio/webm",
        "webm",
        "libopus",
        (8000, 12000, 16000, 24000, 48000),
        48000,
        {"live": "1", "cluster_time_limit": "20", "fflags": "+bitexact"},
        {"frame_duration": "20"},
    ),
    # The encoder's default search, twoloop, distorts the first 40 ms of speech that begins without silence.
    "aac": Format("audio/aac", "adts", "aac", MPEG_HZ, codec_options={"aac_coder": "fast"}),
    # AAC in fragments of MP4, one for each packet
    "m4a": Format(
        "audio/mp4",
        "mp4",
        "aac",
        MPEG_HZ,
        options={"movflags": "empty_moov+default_base_moof+frag_every_frame", "fflags": "+bitexact"},
        codec_options={"aac_coder": "fast"},
    ),
    "flac": Format("audio/flac", "flac", "flac", options={"metadata_header_padding": "0"}),
    "wav": Format("audio/wav"),
    "pcm": Format("audio/pcm"),
    # ITU-T G.711, as telephones have it: 8 bits a sample at 8 kHz, without a header
    "ulaw": Format("audio/basic", "mulaw", "pcm_mulaw", (8000,)),
    "alaw": Format("audio/x-alaw-basic", "alaw", "pcm_alaw", (8000,)),
}
FORMATS |= {"ogg": FORMATS["opus"], "mulaw": FORMATS["ulaw"]}  # by other names
STREAMED = ("write_xing", "live", "cluster_time_limit", "movflags")  # options of the muxer for a stream alone


class Encoder:
    """The encoder of one stream. `feed` takes int16 little-endian mono and returns the bytes of the file that
    are ready, perhaps none. `finish` returns the rest.

    `sample_rate_hz` is the rate that the file decodes to. Calls may come from any thread, one at a time.
    bit_rate: in bits a second, of a format that `has_bit_rate`. loudness: in LUFS; None leaves it as it is.
    Raises ValueError for a rate that the format does not support.
    """

    def __init__(
        self,
        name: str,
        model_hz: int,
        asked_hz: int | None = None,
        speed: float = 1.0,
        bit_rate: int | None = None,
        loudness: float | None = None,
    ):
        self._form = FORMATS[name]
        self._rate_hz = self._form.codec_hz(model_hz, asked_hz)
        self._bit_rate = bit_rate
        self.sample_rate_hz = self._form.decoded_hz or self._rate_hz
        self._stretch = None if speed == 1 else Stretch(model_hz, speed)
        self._leveler = None if loudness is None else Leveler(model_hz, loudness)
        # takes microseconds, so needs no thread
        self.is_light = not (self._form.codec or self._stretch or self._leveler)
        self._resampler = (
            None
            if self._rate_hz == model_hz
            else soxr.ResampleStream(model_hz, self._rate_hz, 1, dtype="float32")
        )
        # The first chunk opens it. Opening takes a millisecond, and some answers never begin.
        self._codec: _Codec | None = None
        self._head = wav_header(self._rate_hz) if name == "wav" else b""

    def feed(self, pcm: bytes) -> bytes:
        if self._stretch is not None:
            pcm = self._stretch.feed(pcm)
        if self._leveler is not None:
            pcm = self._leveler.feed(pcm)
        return self._encode(self._resample(pcm))

    def flush(self) -> bytes:
        """Return what was held back to measure the loudness, because more speech may not come for a while."""
        return b"" if self._leveler is None else self._encode(self._resample(self._leveler.flush()))

    def finish(self) -> bytes:
        last = b"" if self._stretch is None else self._stretch.finish()
        if self._leveler is not None:
            last = self._leveler.feed(last) + self._leveler.finish()
        rest = self._encode(self._resample(last, last=True))
        return rest + self._codec.finish() if self._codec else rest

    def _resample(self, pcm: bytes, last: bool = False) -> bytes:
        if self._resampler is None:
            return pcm
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / FULL_SCALE  # [N]
        return pcm16(self._resampler.resample_chunk(samples, last=last))

    def _encode(self, pcm: bytes) -> bytes:
        if self._form.codec:
            if self._codec is None:
                self._codec = _Codec(self._form, self._rate_hz, _Sink(), self._form.options, self._bit_rate)
            return self._codec.feed(pcm)
        head = self._head
        self._head = b""
        return head + pcm


def file(
    name: str,
    pcm: bytes,
    model_hz: int,
    asked_hz: int | None = None,
    speed: float = 1.0,
    bit_rate: int | None = None,
    loudness: float | None = None,
) -> bytes:
    """Return complete speech as a whole file, whose header has the true length. Raises ValueError for a rate
    that the format does not support."""
    form = FORMATS[name]
    pcm = leveled(stretched(pcm, model_hz, speed), model_hz, loudness)
    rate_hz = form.codec_hz(model_hz, asked_hz)
    if rate_hz != model_hz:
        pcm = pcm16(
            soxr.resample(np.frombuffer(pcm, "<i2").astype(np.float32) / FULL_SCALE, model_hz, rate_hz)
        )
    if not form.codec:
        return wav_header(rate_hz, len(pcm)) + pcm if name == "wav" else pcm
    sink = io.BytesIO()
    options = {name: value for name, value in form.options.items() if name not in STREAMED}
    codec = _Codec(form, rate_hz, sink, options, bit_rate)
    codec.feed(pcm)
    codec.finish()
    return sink.getvalue()


class _Sink(io.RawIOBase):
    """The output of a muxer that cannot seek back."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.bytes += data
        return len(data)


class _Codec:
    """A codec and its muxer."""

    def __init__(
        self,
        form: Format,
        rate_hz: int,
        sink: io.IOBase,
        options: Mapping[str, str],
        bit_rate: int | None = None,
    ):
        import av  # when it is needed: see speed.py

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
        self.stream.bit_rate = bit_rate or min(MAX_BIT_RATE, 4 * rate_hz)
        self.container.start_encoding()

    def feed(self, pcm: bytes) -> bytes:
        import av

        samples = np.frombuffer(pcm, "<i2")[None]  # [1, N]
        if samples.size:
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = round(1 / self.tick)
            frame.pts = self.position
            frame.time_base = self.tick
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
