"""The bodies of HTTP requests and answers. A field's description says what it takes: it is documentation and
error message both."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from litestar.datastructures import UploadFile
from msgspec import Meta

from serving import protocol
from serving.stretch import MAX_SPEED, MIN_SPEED

Words = Annotated[str, Meta(max_length=4096)]  # bounded: a text is tokenized before the model looks at it
Name = Annotated[str, Meta(max_length=256)]
MAX_OPTION_CHARS = 1000
MAX_BATCH = 32  # requests
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=0, le=1_000_000)]
TopP = Annotated[float, Meta(gt=0, le=1)]
ResponseFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class Limits(msgspec.Struct, frozen=True):
    """How much a client may ask for."""

    text_chars: int = 8000
    reference_bytes: int = 10 << 20
    reference_s: float = 60.0
    reference_urls: bool = False  # whether ref_audio may be a URL, which this server then fetches
    voices: int = 1000
    num_reading: int = 16  # requests whose body, or whose recording, is being read
    sessions: int = 256  # WebSockets
    text_idle_s: float = 30.0  # for which an utterance that speaks may wait for its text
    session_idle_s: float = 600.0  # for which a WebSocket may say nothing, and hear nothing

    @property
    def speech_body_bytes(self) -> int:
        """Reference audio as base64, of all references together, and all the rest."""
        return (1 << 20) + self.reference_bytes * 4 // 3

    @property
    def upload_body_bytes(self) -> int:
        return (1 << 20) + self.reference_bytes


class Voice(msgspec.Struct, forbid_unknown_fields=True):
    id: Name


class ReferenceItem(msgspec.Struct, forbid_unknown_fields=True):
    """Either of the two names of the audio."""

    audio: str | None = None
    ref_audio: str | None = None
    text: Words | None = None
    speaker: Name | None = None


class GivenReference(NamedTuple):
    """Reference audio as it came: a data URL, base64 or a URL."""

    audio: str
    text: str | None
    speaker: str | None = None


class SpeechRequest(msgspec.Struct, kw_only=True):
    """POST /v1/audio/speech: what all models share; any other field is an option of the model (GET
    /v1/models). What is left out, or null, is the model's own default."""

    input: Annotated[str, Meta(description="the text to speak")]
    model: Annotated[
        Name | None,
        Meta(description="the id of a served model (GET /v1/models); needed where there are several"),
    ] = None
    voice: Annotated[
        Name | Voice | None,
        Meta(
            description="the name of a voice, the model's or an uploaded one (GET /v1/audio/voices), "
            'or {"id": name}; or a mix of several by weight, as anna(2)+bert(1), of models whose `mixes` is true'
        ),
    ] = None
    instructions: Annotated[
        Words | None,
        Meta(description="how to speak, in up to 4096 characters, for models that follow instructions"),
    ] = None
    language: Annotated[Name | None, Meta(description="one of the model's languages (GET /v1/models)")] = None
    task_type: Annotated[
        Literal["CustomVoice", "VoiceDesign", "Base"] | None,
        Meta(
            description="CustomVoice (a voice of the model), VoiceDesign (one described in instructions) or Base (one from reference "
            "audio): what the model must be for; may be left out"
        ),
    ] = None
    ref_audio: Annotated[
        str | None,
        Meta(
            description="a recording of the voice to speak in: a data URL or base64; a URL where the server allows it"
        ),
    ] = None
    ref_text: Annotated[
        Words | None, Meta(description="what ref_audio says, word for word, in up to 4096 characters")
    ] = None
    references: Annotated[
        Annotated[list[ReferenceItem], Meta(max_length=16)] | None,
        Meta(
            description="ref_audio and ref_text in another form, also for models that speak in several voices: "
            'a list of up to 16 of {"audio": ..., "text": what it says, "speaker": who of the text speaks so}'
        ),
    ] = None
    response_format: Annotated[
        ResponseFormat,
        Meta(
            description="mp3 (default), opus (in Ogg), aac, flac, wav or pcm (16-bit little-endian mono without a header)"
        ),
    ] = "mp3"
    sample_rate: Annotated[
        Annotated[int, Meta(ge=8000, le=48000)] | None,
        Meta(
            description="the answer's samples per second, an integer from 8000 to 48000 that the format has; the model's own when left out "
            "(opus is always 48000)"
        ),
    ] = None
    speed: Annotated[
        Annotated[float, Meta(ge=MIN_SPEED, le=MAX_SPEED)],
        Meta(
            description="how fast, at the same pitch: a number from 0.25 to 4; 1 (default) is as the model speaks"
        ),
    ] = 1.0
    stream_format: Annotated[
        Literal["audio", "sse"],
        Meta(
            description="audio (default) or sse: speech.audio.delta events, whose base64 joined is the file, among them speech.text.delta "
            "where the model writes text, then speech.audio.done"
        ),
    ] = "audio"
    timestamp_granularities: Annotated[
        list[Literal["segment"]] | None,
        Meta(
            description='["segment"], with stream_format sse: speech.audio.segment events say which seconds of the answer a piece of its '
            "text took; no model here tells where its words lie"
        ),
    ] = None
    stream: Annotated[
        bool,
        Meta(
            description="true (default): audio is sent as it is made; false: a file in one piece at the end, which knows its length"
        ),
    ] = True
    service_tier: Annotated[
        Literal["auto", "default", "flex"],
        Meta(
            description="auto or default: a listener waits; flex: for batches, served while nobody else waits for first audio or is "
            "about to run dry, whenever that is"
        ),
    ] = "auto"
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(
            description="an integer from 0 to 2^63 - 1; the same seed speaks the same way; drawn at random when left out (see x-seed)"
        ),
    ] = None
    split_text: Annotated[
        bool | None,
        Meta(
            description="true (default): a text that is too long for one pass of the model is spoken in pieces, cut at sentences and "
            "clauses; false: in one pass, as far as that reaches"
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        Meta(
            description="true: numbers, dates, times and amounts are put into words first, in Chinese, English or Japanese; "
            "false (default): the model reads them as they are"
        ),
    ] = None
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="the most frames to speak, an integer from 1 to 1000000"),
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="a number from 0 (greedy) to 2")] = None
    top_k: Annotated[TopK | None, Meta(description="an integer from 0 (off) to 1000000")] = None
    top_p: Annotated[TopP | None, Meta(description="a number above 0, up to 1 (off)")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0.5, le=2)] | None, Meta(description="a number above 0.5, up to 2; 1 is off")
    ] = None

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, Voice) else self.voice

    @property
    def given_references(self) -> list[GivenReference]:
        """Reference audio that came with the request. Raises ValueError."""
        if self.ref_audio is not None and self.references:
            raise ValueError("ref_audio and references are both given, and one of them is possible")
        if self.ref_audio is not None:
            return [GivenReference(self.ref_audio, self.ref_text)]
        if len(self.references or ()) > 1 and self.ref_text is not None:
            raise ValueError(
                "ref_text is the text of one reference, and references has several: give each its text"
            )
        return [self._given(item) for item in self.references or ()]

    def _given(self, item: ReferenceItem) -> GivenReference:
        named = [audio for audio in (item.audio, item.ref_audio) if audio is not None]
        if len(named) != 1:
            raise ValueError(
                f"references has {len(named)} of audio and ref_audio, which are two names for one thing; give one"
            )
        if item.text is not None and self.ref_text is not None:
            raise ValueError("references has a text, and there is ref_text; give one")
        return GivenReference(named[0], item.text if item.text is not None else self.ref_text, item.speaker)

    def forget_audio(self) -> None:
        """It was read, and would otherwise be kept until the answer ends."""
        if self.ref_audio is not None:
            self.ref_audio = ""
        for item in self.references or ():
            item.audio = item.ref_audio = None

    @property
    def reference_field(self) -> str:
        """Where a recording of the voice comes from, or could."""
        if self.references:
            return "references"
        return "ref_audio" if self.ref_audio is not None or self.voice_name is None else "voice"

    def client_field(self, param: str) -> str:
        """The client's name for a field of zoo.request.Request."""
        match param:
            case "references":
                return self.reference_field
            case "transcript":
                return "ref_text" if self.reference_field == "ref_audio" else self.reference_field
        return CLIENT_FIELD.get(param, param)

    def for_engine(self) -> dict[str, Any]:
        """The fields of zoo.request.Request that were given, and a seed; `References` finds voice and
        references."""
        given = {
            "text": self.input,
            "seed": secrets.randbits(63) if self.seed is None else self.seed,
            "max_frames": self.max_new_tokens,
            **{name: getattr(self, name) for name in SAME_NAME},
        }
        return {name: value for name, value in given.items() if value is not None}


class SpeechBatch(SpeechRequest, kw_only=True):
    """POST /v1/audio/speech/batch: several requests in one. What stands beside `items` holds for each that does not say
    otherwise; every answer is a whole file."""

    input: Annotated[
        str, Meta(description="the text of items that have none of their own; usually left out")
    ] = ""
    items: Annotated[
        Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_BATCH)],
        Meta(
            description=f"a list of 1 to {MAX_BATCH} requests: of each what POST /v1/audio/speech takes, options of the model "
            "among it; stream and stream_format say nothing here"
        ),
    ]


SAME_NAME = (
    *("language", "instructions", "split_text", "normalize"),
    *("temperature", "top_k", "top_p", "repetition_penalty"),
)
CLIENT_FIELD = {"text": "input", "max_frames": "max_new_tokens"}  # zoo.request.Request -> SpeechRequest
# task_type -> zoo.contract.Spec.modes
TASK_MODE = {"CustomVoice": "voice", "VoiceDesign": "design", "Base": "clone"}
SOUND_ONLY = "x_vector_only_mode"  # an option of models that can do without what a reference says


class VoiceName(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/audio/voices/{voice_id}."""

    name: Annotated[Name, Meta(description="the voice's new name, of the same form as an upload's")]


class VoiceUpload(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/audio/voices, a multipart form."""

    name: Annotated[
        Name,
        Meta(
            description="the voice's name: letters, digits, '_', '-' and '.'; upper and lower case are the same"
        ),
    ]
    audio_sample: Annotated[
        UploadFile,
        Meta(description="a file with a recording of the voice: WAV, FLAC, MP3, Ogg, AAC, M4A or WebM"),
    ]
    ref_text: Annotated[
        Words | None,
        Meta(
            description="what the sample says, word for word, in up to 4096 characters; without it only the sound "
            "of the voice is taken from it"
        ),
    ] = None
    consent: Annotated[
        Words | None,
        Meta(
            description="whatever proves the speaker's consent, in up to 4096 characters; kept with the voice"
        ),
    ] = None
    type: Annotated[Literal["audio_sample"], Meta(description="audio_sample")] = "audio_sample"


def fields_of(body: type[msgspec.Struct]) -> dict[str, str]:
    """Every field, and what it takes."""
    hints = get_type_hints(body, include_extras=True)
    return {name: hint.__metadata__[-1].description for name, hint in hints.items()}


# by route
FIELDS = {
    "/v1/audio/speech": fields_of(SpeechRequest),
    "/v1/audio/speech/batch": fields_of(SpeechBatch),
    "/v1/audio/voices": fields_of(VoiceUpload),
    "/v1/audio/voices/{voice_id}": fields_of(VoiceName),
}


class Model(msgspec.Struct):
    """OpenAI's model object, and what the model can do."""

    id: str
    created: int  # seconds since 1970, when this server started
    family: str
    variant: str
    sample_rate_hz: int
    frame_rate_hz: float
    max_audio_s: float
    max_text_chars: int
    voices: list[str]
    languages: list[str]
    modes: list[str]  # voice (of its own), instruct, design (from instructions), clone (of reference audio)
    reference_s: tuple[float, float] | None  # the shortest and the longest reference audio, where it is taken
    max_references: int
    options: list[protocol.OptionInfo]  # what else a request may set
    licence: str  # of the weights, where it limits their use
    piece_s: (
        float | None
    )  # about the seconds of speech beyond which a text is spoken in pieces; null: it never is
    feeds: bool  # whether it takes text while it speaks, token by token (WS /v1/audio/speech/stream)
    keeps_voice: bool  # whether its voice comes by chance where none is given, and can be cloned
    mixes: bool  # whether a voice may be a mix of voices, as anna(2)+bert(1)
    response_formats: list[str]
    stream_formats: list[str]
    aliases: list[str] = []  # other names that a request may call it by
    object: Literal["model"] = "model"
    owned_by: str = "speechzoo"

    @property
    def option_names(self) -> list[str]:
        return [option.name for option in self.options]

    @classmethod
    def of(cls, info: protocol.ModelInfo, created: int, limits: Limits, aliases: Sequence[str] = ()) -> Model:
        facts = msgspec.structs.asdict(info)
        if info.reference_s is not None:
            shortest_s, longest_s = info.reference_s
            facts["reference_s"] = (shortest_s, min(longest_s, limits.reference_s))
        formats = list(get_args(ResponseFormat))
        return cls(
            **facts,
            created=created,
            max_text_chars=limits.text_chars,
            response_formats=formats,
            stream_formats=["audio", "sse"],
            aliases=list(aliases),
        )


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Entry(msgspec.Struct):
    """Of a list to choose from, as Open WebUI and others read it."""

    id: str
    name: str


class Choices(msgspec.Struct):
    """All names that a request may call a model by."""

    models: list[Entry]
    data: list[Model]
    object: Literal["list"] = "list"


class VoiceObject(msgspec.Struct):
    """OpenAI's voice object, and what is known of the voice."""

    id: str
    name: str
    created_at: int  # seconds since 1970; of a model's own voice, when this server started
    type: Literal["preset", "audio_sample"]
    models: list[str]  # the served models that can speak in it
    duration_s: float | None = None  # of an uploaded voice's sample
    ref_text: str | None = None
    damaged: bool = False  # on the server's disk: upload it again, or remove it
    aliases: list[str] = []  # other names that a request may call it by
    object: Literal["audio.voice"] = "audio.voice"


class VoiceList(msgspec.Struct):
    """voices: all names that a request may call a voice by."""

    data: list[VoiceObject]
    voices: list[Entry]
    object: Literal["list"] = "list"


class VoiceDeleted(msgspec.Struct):
    id: str
    deleted: Literal[True] = True
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"


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
    """input_tokens: of the text. output_tokens: frames of audio, one step of the model each, and tokens of
    text where it writes any."""

    input_tokens: int
    output_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, finished: protocol.Finished) -> Usage:
        text, made = (
            finished.usage.get("input_tokens", 0),
            finished.frames + finished.usage.get("text_tokens", 0),
        )
        return cls(text, made, text + made)


class BatchResult(msgspec.Struct, kw_only=True):
    """Of one item: a file, or what is wrong; the fields of the other are null."""

    index: int  # of the item
    error: Error | None = None
    audio: str | None = None  # base64
    response_format: str | None = None
    sample_rate: int | None = None  # that the file decodes to
    seed: int | None = None
    finish_reason: str | None = None  # "stop" (the model ended) or "length" (a cap)
    usage: Usage | None = None
    warning: str | None = None


class BatchResults(msgspec.Struct):
    """In the order of the items."""

    data: list[BatchResult]
    object: Literal["audio.speech.batch"] = "audio.speech.batch"


class AudioDelta(msgspec.Struct, tag_field="type", tag="speech.audio.delta"):
    audio: str  # base64


class TextDelta(msgspec.Struct, tag_field="type", tag="speech.text.delta"):
    delta: str  # whole characters, to be joined to those before


class AudioSegment(msgspec.Struct, tag_field="type", tag="speech.audio.segment"):
    """Behind the audio that it is of."""

    text: str  # a piece of the input that was spoken in one pass, normalised where that was asked for
    start_s: float
    end_s: float


class AudioDone(msgspec.Struct, tag_field="type", tag="speech.audio.done"):
    usage: Usage


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
    Ready,
    ErrorBody,
)
