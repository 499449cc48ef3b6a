"""The messages between a client and its session (session.py): JSON in text messages, audio in binary ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.http.objects import Error, Usage
from serving.http.word_times import Word
from serving.protocol import ModelStage

MAX_MESSAGE_BYTES = 2 << 20  # 30 s of PCM at 24 kHz in base64; a larger recording must be uploaded as a voice


class ConfigFields(msgspec.Struct, kw_only=True):
    """The fields of session.config that a speech request does not have."""

    audio: Annotated[
        Literal["binary", "base64"],
        Meta(description="binary (default): audio in binary messages; base64: audio in audio.chunk events"),
    ] = "binary"
    split_granularity: Annotated[
        Literal["auto", "token", "sentence"],
        Meta(
            description="auto (default): text goes into one generation token by token if the model supports "
            "that, otherwise sentence by sentence; token or sentence: always that way, or an error"
        ),
    ] = "auto"
    barge_in: Annotated[
        Literal["queue", "cancel"],
        Meta(
            description="what happens to the current utterance when a new one begins: queue (default) lets "
            "it finish first, cancel stops it"
        ),
    ] = "queue"


class Config(msgspec.Struct, tag_field="type", tag="session.config"):
    """Settings from the next utterance on. The other fields are read from the message itself."""


class InputText(msgspec.Struct, tag_field="type", tag="input.text"):
    text: str


class InputDone(msgspec.Struct, tag_field="type", tag="input.done"):
    """The utterance is complete; the next text begins another one."""


class InputCancel(msgspec.Struct, tag_field="type", tag="input.cancel"):
    """Cancel every utterance immediately. With word times, audio.heard follows. played_s: how much of the utterance
    the client has played; default: all that was sent. utterance: default: the one that is spoken, else the
    last one."""

    played_s: Annotated[float, Meta(ge=0)] | None = None
    utterance: int | None = None


ClientEvent = Config | InputText | InputDone | InputCancel
client_event = msgspec.json.Decoder(ClientEvent)
any_object = msgspec.json.Decoder(dict[str, Any])


class Configured(msgspec.Struct, tag_field="type", tag="session.configured"):
    model: str
    sample_rate: int
    response_format: str
    split_granularity: Literal["token", "sentence"]  # the granularity in effect
    warnings: list[str]


class ModelLoading(msgspec.Struct, tag_field="type", tag="model.loading"):
    """How far the model of an utterance is loaded, before its first audio. progress: of this state, 0 to 1."""

    utterance: int
    model: str
    state: ModelStage
    progress: float


class AudioStart(msgspec.Struct, tag_field="type", tag="audio.start"):
    """Sent before the first audio of an utterance. sample_rate: the rate that the audio decodes to."""

    utterance: int  # counted from 1
    sample_rate: int
    response_format: str
    seed: int
    channels: int = 1


class AudioChunk(msgspec.Struct, tag_field="type", tag="audio.chunk"):
    utterance: int
    audio: str  # base64


class AudioSegment(msgspec.Struct, tag_field="type", tag="audio.segment"):
    """The times of a part of an utterance, once that part is spoken."""

    utterance: int
    text: str
    start_s: float
    end_s: float


class AudioWords(msgspec.Struct, tag_field="type", tag="audio.words"):
    """The words of a part of an utterance, once that part is spoken."""

    utterance: int
    words: list[Word]


class AudioHeard(msgspec.Struct, tag_field="type", tag="audio.heard"):
    """The words of an utterance that had ended when it was cancelled."""

    utterance: int
    text: str
    num_words: int


class Timings(msgspec.Struct):
    """Milliseconds since the utterance's first text arrived."""

    last_text_ms: float | None  # until its input.done
    first_audio_ms: float | None
    total_ms: float


class AudioDone(msgspec.Struct, tag_field="type", tag="audio.done"):
    """The end of an utterance that did not fail. reason: "stop" (all text was spoken), "length" (the frame
    limit was reached) or "cancelled"."""

    utterance: int
    reason: str
    audio_s: float
    usage: Usage
    timings: Timings


class Failure(msgspec.Struct, tag_field="type", tag="error"):
    """An error. With an utterance, that utterance has ended; with null, one message was wrong and was
    ignored."""

    error: Error
    utterance: int | None = None


ServerEvent = (
    Configured
    | ModelLoading
    | AudioStart
    | AudioChunk
    | AudioSegment
    | AudioWords
    | AudioDone
    | AudioHeard
    | Failure
)
