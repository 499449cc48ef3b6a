"""Count the samples in the bytes of an answer as they arrive. A container's header does not count as audio.

A counter's `feed` takes bytes and returns the number of samples per channel that a player can play because of
them. `sample_rate_hz` is 0 until it is known.
"""

from __future__ import annotations

import struct
from typing import Protocol

FORMATS = ("pcm", "wav", "mp3", "opus", "aac")  # not flac: the end of a frame is known only some frames later
OPUS_HZ = (
    48000  # an Ogg page's position counts at this rate, whatever was encoded. Source: RFC 7845, section 4
)
OGG_HEAD = struct.Struct("<4sBBqIIIB")  # RFC 3533, section 6


class Unreadable(ValueError):
    """The bytes are not in the requested format."""


class Counter(Protocol):
    sample_rate_hz: int

    def feed(self, data: bytes) -> int: ...


def counter(form: str, sample_rate_hz: int) -> Counter:
    """Return a counter for a format. sample_rate_hz: the rate of pcm, which has no header."""
    match form:
        case "pcm":
            return Pcm(sample_rate_hz)
        case "wav":
            return Wav()
        case "opus":
            return Opus()
    return Coded(form)


class Pcm:
    """A counter of raw samples, int16 mono by default."""

    def __init__(self, sample_rate_hz: int, bytes_a_sample: int = 2):
        self.sample_rate_hz = sample_rate_hz
        self.bytes_a_sample = bytes_a_sample
        self.num_bytes = 0

    def feed(self, data: bytes) -> int:
        before = self.num_bytes // self.bytes_a_sample
        self.num_bytes += len(data)
        return self.num_bytes // self.bytes_a_sample - before


class Wav:
    """A counter of RIFF files. All bytes after the header of `data` are samples: a stream has no length."""

    def __init__(self) -> None:
        self.sample_rate_hz = 0
        self.head = b""
        self.pcm: Pcm | None = None

    def feed(self, data: bytes) -> int:
        if self.pcm is not None:
            return self.pcm.feed(data)
        self.head += data
        if len(self.head) >= 12 and (self.head[:4], self.head[8:12]) != (b"RIFF", b"WAVE"):
            raise Unreadable(f"a WAV must begin with RIFF; this begins with {self.head[:12]!r}")
        at = 12
        frame_bytes = 0
        while len(self.head) >= at + 8:
            name, size = struct.unpack_from("<4sI", self.head, at)
            at += 8
            if name == b"data":
                if not frame_bytes:
                    raise Unreadable("the WAV has samples before their format")
                self.pcm = Pcm(self.sample_rate_hz, frame_bytes)
                return self.pcm.feed(self.head[at:])
            if len(self.head) < at + size:
                return 0
            if name == b"fmt ":
                self.sample_rate_hz, _, frame_bytes = struct.unpack_from("<IIH", self.head, at + 4)
            at += size + size % 2
        return 0


class Opus:
    """A counter of Ogg pages. A page's header has the position that it reaches. Source: RFC 3533, RFC
    7845."""

    def __init__(self) -> None:
        self.sample_rate_hz = OPUS_HZ
        self.rest = b""
        self.skip: int | None = None  # samples at the start that a player skips
        self.num_played = 0

    def feed(self, data: bytes) -> int:
        self.rest += data
        before = self.num_played
        while (page := self.take_page()) is not None:
            position, body = page
            if self.skip is None:
                if not body.startswith(b"OpusHead"):
                    raise Unreadable("the Ogg stream is not Opus")
                self.skip = int.from_bytes(body[10:12], "little")
            elif position > self.skip:  # -1: no packet ends on this page
                self.num_played = max(self.num_played, position - self.skip)
        return self.num_played - before

    def take_page(self) -> tuple[int, bytes] | None:
        """Return the position and the body of the next page once it is complete."""
        if len(self.rest) < OGG_HEAD.size:
            return None
        mark, _, _, position, _, _, _, segments = OGG_HEAD.unpack_from(self.rest)
        if mark != b"OggS":
            raise Unreadable(f"an Ogg page must begin with OggS; this begins with {self.rest[:4]!r}")
        body = OGG_HEAD.size + segments
        end = body + sum(self.rest[OGG_HEAD.size : body])
        if len(self.rest) < max(body, end):
            return None
        page = self.rest[body:end]
        self.rest = self.rest[end:]
        return position, page


class Coded:
    """A counter that decodes MP3 and AAC (ADTS) frames once they are complete; their headers have lengths."""

    def __init__(self, codec: str):
        import av  # when it is needed: raw samples are counted without FFmpeg

        self.sample_rate_hz = 0
        self.codec = codec
        context = av.CodecContext.create(codec, "r")
        assert isinstance(context, av.AudioCodecContext), f"{codec} has a {type(context).__name__}"
        self.context = context

    def feed(self, data: bytes) -> int:
        import av

        num = 0
        try:
            for packet in self.context.parse(data):
                for frame in self.context.decode(packet):
                    num += frame.samples
                    self.sample_rate_hz = frame.sample_rate
        except av.FFmpegError as error:
            raise Unreadable(f"the {self.codec} cannot be decoded: {error.strerror}") from None
        return num
