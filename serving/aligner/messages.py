"""The messages between the aligner process and its client: msgpack structs, each behind its length."""

from __future__ import annotations

from typing import Protocol

import msgspec

from zoo.align.words import WordTime


class Piece(msgspec.Struct):
    """A piece of speech and the text that it says. is_open: it was cut off, perhaps within the text."""

    pcm: bytes  # int16, little-endian, mono
    sample_rate_hz: int
    text: str
    is_open: bool = False

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / 2 / self.sample_rate_hz


class Answer(msgspec.Struct):
    """The words of each piece. fault: why the aligner cannot be used at all; the process then ends."""

    words: list[list[WordTime]] = []
    fault: str = ""


_encoder = msgspec.msgpack.Encoder()
pieces = msgspec.msgpack.Decoder(list[Piece])
answer = msgspec.msgpack.Decoder(Answer)


def pack(message: list[Piece] | Answer) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read(file: Readable) -> bytes | None:
    """Return the body of the next message; None at the end."""
    head = file.read(4)
    return file.read(int.from_bytes(head, "big")) if len(head) == 4 else None
