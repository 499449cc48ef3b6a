"""The messages between the HTTP and engine processes: length-prefixed msgpack structs over a Unix socket.

    HTTP -> engine   Speak; Feed (more text for it); Cancel, Interrupt; Heard (frames that the client consumed)
    engine -> HTTP   to every connection: Status, Models, and Stats once a second
                     to each Speak: one Rejected; or Audio, Text and Spoken as they are made, then Finished or Failed

The engine does not answer a Cancel. After an Interrupt it sends the request's last message. With models on demand,
ModelStates follows Models, and Loading goes before the answer to a Speak whose model is not loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from serving.histogram import Histogram
from zoo.request import Value

MAX_CLIP_BYTES = 48 << 20  # for all clips of a request together: a minute of mono float32 at 192 kHz
MAX_FRAME_BYTES = MAX_CLIP_BYTES + (16 << 20)  # no valid message is longer

State = Literal["away", "loading", "warming", "ready"]
# Of one model. waiting: for memory that other models have.
ModelStage = Literal["cold", "waiting", "loading", "warming", "loaded", "unloading"]


class Message(msgspec.Struct, tag=True):
    """One frame of the protocol; the class name is its tag."""


class AudioClip(msgspec.Struct, weakref=True, tag="clip"):
    """Decoded reference audio."""

    samples: bytes  # float32, little-endian, mono
    sample_rate_hz: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / 4 / self.sample_rate_hz

    @property
    def num_bytes(self) -> int:
        return len(self.samples)


class StoredClip(msgspec.Struct, tag="stored"):
    """The recording of an uploaded voice. The engine reads it from the voice's directory, and only if it has
    no encoding of it there or in memory."""

    name: bytes  # zoo.request.recording_name
    num_samples: int
    sample_rate_hz: int
    directory: str

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.sample_rate_hz

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_samples


class Reference(msgspec.Struct):
    """A zoo.request.Reference in transit."""

    clip: AudioClip | StoredClip
    transcript: str | None = None
    speaker: str | None = None
    name: str | None = None  # the name that a mix of voices uses for it


class Turn(msgspec.Struct):
    """A zoo.request.Turn in transit."""

    role: str
    text: str | None = None
    clip: AudioClip | None = None
    tokens: tuple[int, ...] | None = None


class Request(msgspec.Struct, omit_defaults=True):
    """A zoo.request.Request in transit, without its references and turns."""

    text: str
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_frames: int | None = None
    options: dict[str, Value] = {}
    conversation: str | None = None
    is_open: bool = False
    split_text: bool = True
    normalize: bool = False
    sentence_gap_s: float | None = None
    stop: tuple[str, ...] = ()
    output: str = "speech"


@dataclass(frozen=True)
class Listener:
    """The listener of a request, from HTTP to the scheduler.

    speed: the speed at which the listener plays, so a fast one needs its audio sooner. is_flexible: the audio
    is made while no other listener waits for first audio or is at risk. is_reproducible: windows follow from
    frame numbers alone, so equal requests give equal bytes. is_metered: the client reports the frames that it
    consumed. wants_timestamps: the client is told which samples each piece of the text took.
    """

    speed: float = 1.0
    is_flexible: bool = False
    is_reproducible: bool = False
    is_metered: bool = False
    wants_timestamps: bool = False


class Speak(Message):
    """A request for speech."""

    id: str
    model: str  # the model's id
    request: Request
    references: list[Reference] = []
    listener: Listener = Listener()
    turns: list[Turn] = []

    @property
    def recordings(self) -> list[AudioClip]:
        """The samples in the message: not those of stored voices."""
        clips = [reference.clip for reference in self.references] + [turn.clip for turn in self.turns]
        return [clip for clip in clips if isinstance(clip, AudioClip)]


class Feed(Message):
    """More text for a request that `is_open`, in portions of any size; `is_last` ends the text."""

    id: str
    text: str
    is_last: bool = False


class Cancel(Message):
    id: str


class Interrupt(Message):
    """End a request now, wherever it is. Its last message follows, with what was made."""

    id: str


class Heard(Message):
    """The client consumed this many more frames. The engine pauses a stream that is too far ahead."""

    id: str
    frames: int


class Status(Message):
    state: State
    progress: float = 0.0  # 0 to 1
    detail: str = ""


class OptionInfo(msgspec.Struct):
    """A request option of a model (zoo.request.Option)."""

    name: str
    type: str  # "bool", "int", "float" or "str"
    help: str
    possible: str  # the possible values, in words
    default: Value | None = None  # None: the model decides
    range: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()


class ModelInfo(msgspec.Struct):
    """The capabilities of a served model."""

    id: str
    family: str
    variant: str
    sample_rate_hz: int
    frame_rate_hz: float
    max_audio_s: float
    voices: list[str]
    languages: list[str]
    modes: list[str]
    reference_s: tuple[float, float] | None = None  # shortest and longest reference; None: takes none
    max_references: int = 1
    options: list[OptionInfo] = []
    licence: str = ""  # licence of the weights, if it limits their use
    piece_s: float | None = None  # text is split into pieces of up to this much speech; None: never
    feeds: bool = False  # whether it accepts text while it speaks
    keeps_voice: bool = False  # whether it speaks in a random voice by default, and can clone that voice
    mixes: bool = False  # whether it can mix voices
    shares_turns: bool = False  # whether a request can continue a conversation
    answers: bool = False  # whether it answers conversations instead of speaking texts
    performs: bool = False  # whether an answer performs what a text asks for, so that it speaks texts, too
    outputs: tuple[str, ...] = ("speech",)  # what a request may ask for
    takes_tools: bool = False  # whether a conversation may have tools
    needs_transcript: bool = False  # whether a reference needs its words


class Models(Message):
    """The models that the engine serves."""

    models: list[ModelInfo]


class ModelState(msgspec.Struct, frozen=True):
    """Whether a model on demand is loaded, and its counters since the gateway started."""

    stage: ModelStage = "cold"
    progress: float = 0.0  # of loading or warming, 0 to 1
    problem: str = ""  # why it could not be loaded the last time
    loads: int = 0  # counter
    failures: int = 0  # counter: loads that failed
    load_s: float = 0.0  # counter: seconds that the loads took
    planned_bytes: int = 0  # of the device's memory, by the memory plan

    def __str__(self) -> str:
        is_measured = self.stage in ("loading", "warming")
        return f"{self.stage} {100 * self.progress:.0f} %" if is_measured else self.stage


class ModelStates(Message):
    """The states of models on demand, by model id. Without this message, all models are loaded."""

    models: dict[str, ModelState]


class ModelStats(msgspec.Struct):
    """The current state of a model, and its counters since the engine started."""

    slots: int
    running: int
    waiting: int
    underruns: int  # counter
    graph_misses: int  # counter
    held: int = 0  # streams paused by backpressure
    paused: int = 0  # streams that wait for pages
    preparing: int = 0  # accepted requests whose prompt is not built yet
    refused: int = 0  # counter: requests refused for lack of capacity
    places: int = 0  # how many streams the model can generate in real time now
    predicted_turn_s: float = 0.0  # predicted step time for the running requests
    left_early: int = 0  # counter: requests whose client disconnected before the prompt was built
    short_passes: int = 0  # counter: speech much too short for its text
    long_passes: int = 0  # counter: speech much too long for its text
    not_finite: int = 0  # counter: requests that failed because of NaN or infinity
    audio_s: float = 0.0  # counter: seconds of audio delivered
    first_audio_s: float | None = None  # latest time to first audio, counted from acceptance
    # Predicted time to first audio of a request that finds 0, places - 1 and 2 * places - 1 others. Empty:
    # not known.
    expected_first_audio_s: list[float] = []
    # counter: seconds that each admitted request waited in the queue
    queue_times: Histogram = msgspec.field(default_factory=Histogram)

    @property
    def admitted(self) -> int:
        return self.queue_times.num

    @property
    def queue_s(self) -> float:
        return self.queue_times.sum_s


class Stats(Message):
    """The current state of the engine, and its counters since it started."""

    pages: int
    pages_free: int
    pages_shared: int  # counter
    pages_evicted: int  # counter
    compiles_after_warmup: int  # counter
    models: dict[str, ModelStats]  # by model id
    pauses: int = 0  # counter: streams paused because others needed their pages more
    # counter: seconds that each step took, which launches every model that has work
    turn_times: Histogram = msgspec.field(default_factory=Histogram)
    resident_bytes: int = 0  # resident memory of the engine process; 0 if the system does not report it
    reference_bytes: int = 0  # reference audio that is being encoded or waits to be
    engine_restarts: int = 0  # counter: engines of replicas that were lost
    replicas: dict[str, Stats] = {}  # those of each replica, if this is their sum

    @property
    def turns(self) -> int:
        return self.turn_times.num

    @property
    def turn_s(self) -> float:
        return self.turn_times.sum_s


class Loading(Message):
    """The request waits until its model is loaded."""

    id: str
    state: ModelState


class Rejected(Message):
    """The engine refused the request: `message` says what was wrong and what is possible. `param` names a
    field or an option of zoo.request.Request, or `transcript`, a field of its references."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    retry_after_s: float | None = None


class Audio(Message):
    """The next samples of an answer."""

    id: str
    pcm: bytes  # int16, little-endian, mono
    frames: int


class Text(Message):
    """Text that the model wrote along with its audio, continuing the previous Text."""

    id: str
    text: str


class Spoken(Message):
    """A piece of the text and its samples start .. stop in the answer, sent after all of its Audio."""

    id: str
    text: str
    start: int
    stop: int


class Answer(msgspec.Struct):
    """An answer of a model that keeps answers, for a later `Turn`. tokens: in order. ends: the number of
    tokens up to the end of each frame."""

    tokens: list[int] = []
    ends: list[int] = []


class Finished(Message):
    """The answer is complete."""

    id: str
    reason: str  # "stop" (the model ended), "length" (a cap) or "cancelled"
    frames: int
    usage: dict[str, int] = {}
    replicas: list[str] = []  # a gateway's: which it offered the request to; the last one answered
    answer: Answer = msgspec.field(default_factory=Answer)


class Failed(Message):
    """The request failed while it ran; the audio sent so far is incomplete."""

    id: str
    message: str
    status: int = 500
    code: str = "engine_failed"
    retry_after_s: float | None = None
    replicas: list[str] = []  # as in Finished


ToEngine = Speak | Feed | Cancel | Interrupt | Heard
ToHTTP = (
    Status | Models | ModelStates | Stats | Loading | Rejected | Audio | Text | Spoken | Finished | Failed
)
Outcome = Loading | Rejected | Audio | Text | Spoken | Finished | Failed  # the answers to a Speak

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
to_http = msgspec.msgpack.Decoder(ToHTTP)


class ProtocolError(Exception):
    """The peer sent bytes that are not a message of this protocol."""


def pack(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES, (
        f"a {type(message).__name__} message has {len(body)} bytes; the limit is {MAX_FRAME_BYTES}"
    )
    return len(body).to_bytes(4, "big") + body


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> AsyncIterator[Any]:
    """Yield messages until the connection ends. Raises ProtocolError for bytes that are not a message."""
    while True:
        try:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a message has {size} bytes; the limit is {MAX_FRAME_BYTES}")
            body = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        try:
            yield decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{size} bytes are not a valid message: {error}") from error
