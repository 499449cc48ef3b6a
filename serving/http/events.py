"""What a client and a session (session.py) say to each other: JSON in text messages, and audio in binary ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.http.schemas import Error, Usage

MAX_MESSAGE_BYTES = 1 << 20  # a longer recording is uploaded as a voice


class ConfigFields(msgspec.Struct, kw_only=True):
    """Of session.config, beside those of a speech request."""

    audio: Annotated[
        Literal["binary", "base64"],
        Meta(description="binary (default): binary messages; base64: audio.chunk events"),
    ] = "binary"
    split_granularity: Annotated[
        Literal["auto", "token", "sentence"],
        Meta(
            description="auto (default): token by token into one generation where the model can, else sentence by sentence; "
            "token or sentence: so, or refused"
        ),
    ] = "auto"
    barge_in: Annotated[
        Literal["queue", "cancel"],
        Meta(description="what a new utterance does while another one speaks: queue (default) or cancel it"),
    ] = "queue"


class Config(msgspec.Struct, tag_field="type", tag="session.config"):
    """Holds from the next utterance on. The other fields are in the message itself."""


class InputText(msgspec.Struct, tag_field="type", tag="input.text"):
    text: str


class InputDone(msgspec.Struct, tag_field="type", tag="input.done"):
    """The utterance is complete; the next text begins another one."""


class InputCancel(msgspec.Struct, tag_field="type", tag="input.cancel"):
    """Every utterance there is, at once."""


ClientEvent = Config | InputText | InputDone | InputCancel
client_event = msgspec.json.Decoder(ClientEvent)
any_object = msgspec.json.Decoder(dict[str, Any])


class Configured(msgspec.Struct, tag_field="type", tag="session.configured"):
    model: str
    sample_rate: int
    response_format: str
    split_granularity: Literal["token", "sentence"]  # as it will be
    warnings: list[str]


class AudioStart(msgspec.Struct, tag_field="type", tag="audio.start"):
    """Before the first audio of an utterance. sample_rate: what it decodes to."""

    utterance: int  # counted from 1
    sample_rate: int
    response_format: str
    seed: int
    channels: int = 1


class AudioChunk(msgspec.Struct, tag_field="type", tag="audio.chunk"):
    utterance: int
    audio: str  # base64


class Timings(msgspec.Struct):
    """Since the utterance's first text came."""

    last_text_ms: float | None  # its input.done
    first_audio_ms: float | None
    total_ms: float


class AudioDone(msgspec.Struct, tag_field="type", tag="audio.done"):
    """The end of an utterance that did not fail. reason: "stop" (all is spoken), "length" (a cap) or "cancelled"."""

    utterance: int
    reason: str
    audio_s: float
    usage: Usage
    timings: Timings


class Failure(msgspec.Struct, tag_field="type", tag="error"):
    """Of an utterance, which ends with it, or of a message, which is as if it had not come (utterance: null)."""

    error: Error
    utterance: int | None = None


ServerEvent = Configured | AudioStart | AudioChunk | AudioDone | Failure
