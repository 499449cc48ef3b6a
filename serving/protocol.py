"""What the HTTP process and the engine process say to each other: msgpack structs, each behind its length,
over a Unix socket.

    HTTP -> engine   Speak, Feed of more text for it, Cancel, and Heard of what was passed on
    engine -> HTTP   Status and Models to every connection, and Stats once a second; to each Speak either one Rejected, or Audio, Text and
                     Spoken as they come, then Finished or Failed

A Cancel is answered by silence: whoever sent it listens no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from serving.histogram import Histogram

MAX_CLIP_BYTES = 48 << 20  # of all clips of a request: a minute of mono float32 at 192 kHz
MAX_FRAME_BYTES = MAX_CLIP_BYTES + (16 << 20)  # more than any message needs; a longer one is not ours

State = Literal["away", "loading", "warming", "ready"]


class Message(msgspec.Struct, tag=True):
    """One frame of the protocol; the class name is its tag."""


class AudioClip(msgspec.Struct):
    """Reference audio, decoded."""

    samples: bytes  # float32, little-endian, mono
    sample_rate_hz: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / 4 / self.sample_rate_hz


class Reference(msgspec.Struct):
    """As zoo.request.Reference."""

    clip: AudioClip
    transcript: str | None = None
    speaker: str | None = None
    name: str | None = None  # by which the request's voice mixes it with others
    kept_in: str | None = None  # the directory of an uploaded voice, where what encoders make of it is kept


class Speak(Message):
    id: str
    model: str  # its id
    request: dict[str, Any]  # the fields of zoo.request.Request, but its references
    references: list[Reference] = []
    is_pinned: bool = False  # equal requests give equal bytes
    is_flex: bool = False  # served while nobody else is in need
    speed: float = 1.0  # at which the listener plays what comes of it
    is_timed: bool = False  # whether Spoken comes of it


class Feed(Message):
    """More text for a request that `is_open`, in whatever portions; is_last: no more follows."""

    id: str
    text: str
    is_last: bool = False


class Cancel(Message):
    id: str


class Heard(Message):
    """So many frames of Audio were taken by the client. The engine goes no further ahead than so many seconds."""

    id: str
    frames: int


class Status(Message):
    state: State
    progress: float = 0.0  # 0 to 1
    detail: str = ""


class OptionInfo(msgspec.Struct):
    """What a model takes with a request, as zoo.request.Option."""

    name: str
    type: str  # "bool", "int", "float" or "str"
    help: str
    possible: str  # in words
    default: bool | int | float | str | None = None  # None: the model decides
    range: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()


class ModelInfo(msgspec.Struct):
    """What a served model can do."""

    id: str
    family: str
    variant: str
    sample_rate_hz: int
    frame_rate_hz: float
    max_audio_s: float
    voices: list[str]
    languages: list[str]
    modes: list[str]
    # the shortest and the longest reference, where references are taken
    reference_s: tuple[float, float] | None = None
    max_references: int = 1
    options: list[OptionInfo] = []
    licence: str = ""  # of the weights, where it limits their use
    piece_s: float | None = None  # seconds of speech from which on a text is spoken in pieces, where it is
    feeds: bool = False  # whether it takes text while it speaks
    keeps_voice: bool = False  # whether its voice comes by chance where none is given, and can be cloned
    mixes: bool = False  # whether voices may be mixed


class Models(Message):
    models: list[ModelInfo]


class ModelStats(msgspec.Struct):
    slots: int
    running: int
    waiting: int
    underruns: int  # counted
    graph_misses: int  # counted
    admitted: int = 0  # counted
    queue_s: float = 0.0  # that they waited for it, added up
    held: int = 0  # whose listeners do not take what there is
    paused: int = 0  # without pages for now
    preparing: int = 0  # accepted, and their prompts are not made yet
    refused: int = 0  # counted: for want of room
    places: int = 0  # how many may speak now, so that each is made faster than it is heard
    predicted_turn_s: float = 0.0  # of those who speak now
    left_early: int = 0  # counted: those who left before their prompt was made
    short_passes: int = 0  # counted: speech much too short for its text
    long_passes: int = 0  # counted: and much too long
    audio_s: float = 0.0  # counted: that was delivered
    first_audio_s: float | None = None  # from when the last one that was first heard was accepted
    queue_times: Histogram = msgspec.field(default_factory=Histogram)


class Stats(Message):
    """What the engine holds now, and what it has counted since it started."""

    pages: int
    pages_free: int
    pages_shared: int  # counted
    pages_evicted: int  # counted
    compiles_after_warmup: int  # counted
    models: dict[str, ModelStats]  # by id
    pauses: int = 0  # counted: of streams whose pages others needed more
    turns: int = 0  # counted: a launch of every model that has work
    turn_s: float = 0.0  # that they took, added up
    turn_times: Histogram = msgspec.field(default_factory=Histogram)
    resident_bytes: int = 0  # of the process; 0 where the system does not tell
    reference_bytes: int = 0  # of recordings that are being encoded, or wait for it


class Rejected(Message):
    """The request never ran: what came, what is possible. `param` is a field or an option of
    zoo.request.Request, or `transcript`, a field of its references."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    retry_after_s: float | None = None


class Audio(Message):
    id: str
    pcm: bytes  # int16, little-endian, mono
    frames: int


class Text(Message):
    """What the model wrote beside its audio, from where the last one ended."""

    id: str
    text: str


class Spoken(Message):
    """A piece of the text, all of whose Audio came before this: the answer's samples start .. stop."""

    id: str
    text: str
    start: int
    stop: int


class Finished(Message):
    id: str
    reason: str  # "stop" (the model ended), "length" (a cap) or "cancelled"
    frames: int
    usage: dict[str, int] = {}


class Failed(Message):
    """The request ran and broke. Whatever audio was sent is not the whole of it."""

    id: str
    message: str
    status: int = 500
    code: str = "engine_failed"


ToEngine = Speak | Feed | Cancel | Heard
ToHTTP = Status | Models | Stats | Rejected | Audio | Text | Spoken | Finished | Failed
Outcome = Rejected | Audio | Text | Spoken | Finished | Failed  # what a Speak is answered by

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
to_http = msgspec.msgpack.Decoder(ToHTTP)


class ProtocolError(Exception):
    """The other side does not speak this protocol."""


def pack(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES, (
        f"a {type(message).__name__} of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}"
    )
    return len(body).to_bytes(4, "big") + body


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> AsyncIterator[Any]:
    """Yields messages until the other side is gone, in whatever manner. Raises ProtocolError for bytes that
    are no message."""
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
            body = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        try:
            yield decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a frame of {size} bytes that is no message: {error}") from error
