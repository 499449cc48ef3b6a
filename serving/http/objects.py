"""The bodies of answers and events, as OpenAPI describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from serving import protocol
from serving.http.schemas import PronunciationList, ResponseFormat, SpeechBatch, SpeechRequest, VoiceUpload
from serving.settings import Limits

LOADED = protocol.ModelState("loaded", 1.0)


class Model(msgspec.Struct):
    """OpenAI's model object, with the abilities of the model."""

    id: str
    created: int  # when this server started, in seconds since 1970
    family: str
    variant: str
    sample_rate_hz: int
    frame_rate_hz: float
    max_audio_s: float
    max_text_chars: int
    voices: list[str]
    languages: list[str]
    # voice (has its own voices), instruct (follows instructions), design (a voice from instructions),
    # clone (a voice from reference audio)
    modes: list[str]
    reference_s: tuple[float, float] | None  # the shortest and the longest reference audio; null: takes none
    max_references: int
    options: list[protocol.OptionInfo]  # further fields of a request
    licence: str  # of the weights, if it limits their use
    # A text with more than about this many seconds of speech is spoken in pieces; null: never.
    piece_s: float | None
    feeds: bool  # whether it takes text token by token while it speaks (WS /v1/audio/speech/stream)
    keeps_voice: bool  # whether it draws a random voice if none is given, and can clone that voice
    mixes: bool  # whether a voice may be a mix of voices, such as anna(2)+bert(1)
    shares_turns: bool  # whether a request may continue a conversation
    answers: bool  # whether it answers conversations (POST /v1/chat/completions) instead of speaking texts
    # whether the speech routes take a model that answers, too: it performs what the text asks for
    performs: bool
    # speech, text (without audio), continuation (of a clip), transcript (POST /v1/audio/transcriptions)
    outputs: tuple[str, ...]
    takes_tools: bool  # whether a conversation may have tools
    needs_transcript: bool  # whether reference audio needs its words (ref_text)
    response_formats: list[str]
    stream_formats: list[str]
    timestamp_granularities: list[str]
    aliases: list[str] = []  # other names that a request may call it by
    state: protocol.ModelStage = "loaded"  # "cold": a request loads it (zoo serve --model-dir)
    progress: float = 1.0  # of loading or warming, 0 to 1
    object: Literal["model"] = "model"
    owned_by: str = "speechzoo"

    @property
    def option_names(self) -> list[str]:
        return [option.name for option in self.options]

    @classmethod
    def of(
        cls,
        info: protocol.ModelInfo,
        created: int,
        limits: Limits,
        aliases: Sequence[str] = (),
        *,
        has_words: bool = False,
        state: protocol.ModelState = LOADED,
    ) -> Model:
        facts = msgspec.structs.asdict(info)
        if info.reference_s is not None:
            shortest_s, longest_s = info.reference_s
            facts["reference_s"] = (shortest_s, min(longest_s, limits.reference_s))
        formats = list(get_args(ResponseFormat))
        # a model that answers says other words than it is given
        times = [] if info.answers else ["segment", *(["word"] if has_words else [])]
        return cls(
            **facts,
            created=created,
            max_text_chars=limits.text_chars,
            response_formats=formats,
            stream_formats=["audio", "sse"],
            timestamp_granularities=times,
            aliases=list(aliases),
            state=state.stage,
            progress=state.progress,
        )


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Entry(msgspec.Struct):
    """An entry of a list to choose from, in the form that Open WebUI and other clients read."""

    id: str
    name: str


class Choices(msgspec.Struct):
    """The models, under all names that a request may use."""

    models: list[Entry]
    data: list[Model]
    object: Literal["list"] = "list"


class VoiceObject(msgspec.Struct):
    """OpenAI's voice object, with more about the voice."""

    id: str
    name: str
    created_at: int  # seconds since 1970; for a model's own voice, the start of this server
    type: Literal["preset", "audio_sample"]
    models: list[str]  # the served models that can use it
    duration_s: float | None = None  # of an uploaded voice's sample
    ref_text: str | None = None
    damaged: bool = False  # its file on the server is damaged: upload it again, or remove it
    aliases: list[str] = []  # other names that a request may call it by
    object: Literal["audio.voice"] = "audio.voice"


class VoiceList(msgspec.Struct):
    """The list of voices. `voices` has all names that a request may use, as Open WebUI reads them."""

    data: list[VoiceObject]
    voices: list[Entry]
    object: Literal["list"] = "list"


class VoiceDeleted(msgspec.Struct):
    id: str
    deleted: Literal[True] = True
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"


class ModelHealth(msgspec.Struct):
    """The state of a model on demand."""

    state: protocol.ModelStage
    progress: float  # of loading or warming, 0 to 1
    problem: str  # why it could not be loaded the last time; "": it could


class Health(msgspec.Struct, omit_defaults=True):
    status: str
    models: dict[str, ModelHealth] = {}  # those on demand


class Ready(msgspec.Struct):
    state: protocol.State
    progress: float  # 0 to 1
    detail: str


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """OpenAI's error object."""

    error: Error


class Usage(msgspec.Struct):
    """The size of a request. input_tokens: tokens of the text. output_tokens: audio frames (one step of the
    model each), plus text tokens if the model writes text."""

    input_tokens: int
    output_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, finished: protocol.Finished) -> Usage:
        text = finished.usage.get("input_tokens", 0)
        made = finished.frames + finished.usage.get("text_tokens", 0)
        return cls(text, made, text + made)


class BatchResult(msgspec.Struct, kw_only=True):
    """The result of one item: a file or an error. The fields of the other are null."""

    index: int  # of the item
    error: Error | None = None
    audio: bytes | None = None  # base64 in JSON
    response_format: str | None = None
    sample_rate: int | None = None  # the rate that the file decodes to
    seed: int | None = None
    finish_reason: str | None = None  # "stop" (the model ended) or "length" (the frame limit)
    usage: Usage | None = None
    warning: str | None = None


class BatchResults(msgspec.Struct):
    """The results, in the order of the items."""

    data: list[BatchResult]
    object: Literal["audio.speech.batch"] = "audio.speech.batch"


class ModelLoading(msgspec.Struct, tag_field="type", tag="speech.model.loading"):
    """How far a model on demand is loaded, before the first audio. progress: of this state, 0 to 1."""

    model: str
    state: protocol.ModelStage
    progress: float


class AudioDelta(msgspec.Struct, tag_field="type", tag="speech.audio.delta"):
    audio: str  # base64


class TextDelta(msgspec.Struct, tag_field="type", tag="speech.text.delta"):
    delta: str  # whole characters, to be appended to the text so far


class AudioSegment(msgspec.Struct, tag_field="type", tag="speech.audio.segment"):
    """A piece of the text with its times. It follows the audio of the piece."""

    text: str  # a piece of the input that was spoken in one pass, normalized if the request asked for it
    start_s: float
    end_s: float


class AudioDone(msgspec.Struct, tag_field="type", tag="speech.audio.done"):
    usage: Usage
    token_usage: Usage  # the same, under speaches' name


class AudioError(msgspec.Struct, tag_field="type", tag="error"):
    error: Error


BODIES = (
    SpeechRequest,
    SpeechBatch,
    BatchResults,
    VoiceUpload,
    ModelList,
    Choices,
    VoiceList,
    VoiceDeleted,
    PronunciationList,
    Health,
    Ready,
    ErrorBody,
)
