"""The bodies of HTTP requests and answers. The description of a field appears in /schema and in error
messages ("FIELD takes DESCRIPTION")."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
from litestar.datastructures import UploadFile
from msgspec import Meta

from serving import protocol
from serving.audio.loudness import MAX_LUFS, MIN_LUFS
from serving.audio.speed import MAX_SPEED, MIN_SPEED
from zoo.request import MAX_GAP_S
from zoo.text.pronunciations import MAX_ENTRIES, Pronunciation

Words = Annotated[str, Meta(max_length=4096)]  # bounded, since it is tokenized before the model checks it
Name = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_OPTION_CHARS = 1000
MAX_BATCH = 32  # requests
MAX_EXPIRES_S = 7 * 86400  # of a signed URL
MAX_PRONUNCIATIONS = 1000  # of one request
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=0, le=1_000_000)]
TopP = Annotated[float, Meta(gt=0, le=1)]
ResponseFormat = Literal[
    "mp3", "opus", "ogg", "webm", "aac", "m4a", "flac", "wav", "pcm", "ulaw", "mulaw", "alaw"
]


class Voice(msgspec.Struct, forbid_unknown_fields=True):
    id: Name


class ReferenceItem(msgspec.Struct, forbid_unknown_fields=True):
    """One reference. audio, ref_audio and audio_path are names for the same field."""

    audio: str | None = None
    ref_audio: str | None = None
    audio_path: str | None = None
    text: Words | None = None
    speaker: Name | Annotated[int, Meta(ge=0, le=1_000_000)] | None = None


class GivenReference(NamedTuple):
    """Reference audio as the client sent it: a data URL, base64 or a URL."""

    audio: str
    text: str | None
    speaker: str | None = None


class SpeechRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/audio/speech. These fields are the same for all models. Other fields are options
    of the model (GET /v1/models). A field that is missing or null has its default."""

    input: Annotated[
        str,
        Meta(
            description='the text to speak; [pause:1.5s] or <break time="1.5s"/> in it is that much silence'
        ),
    ]
    model: Annotated[
        Name | None,
        Meta(description="the ID of a served model (GET /v1/models); required if several speak texts"),
    ] = None
    voice: Annotated[
        Name | Voice | None,
        Meta(
            description="the name of a voice of the model or of an uploaded voice (GET /v1/audio/voices), "
            'or {"id": name}; models with `mixes` also take a weighted mix such as anna(2)+bert(1); default: '
            "the model's first voice"
        ),
    ] = None
    instructions: Annotated[
        Words | None,
        Meta(description="how to speak, in up to 4096 characters, for models that follow instructions"),
    ] = None
    language: Annotated[
        Name | None,
        Meta(description="one of the model's languages (GET /v1/models), by name or by code (en, zh-CN)"),
    ] = None
    task_type: Annotated[
        Literal["CustomVoice", "VoiceDesign", "Base"] | None,
        Meta(
            description="CustomVoice (a voice of the model), VoiceDesign (a voice described in instructions) "
            "or Base (a voice from reference audio); optional: the request fails if the model does not "
            "support it"
        ),
    ] = None
    ref_audio: Annotated[
        str | None,
        Meta(
            description="a recording of the voice to use: a data URL or base64, or a URL if the server "
            "allows it"
        ),
    ] = None
    ref_text: Annotated[
        Words | None, Meta(description="the exact words of ref_audio, in up to 4096 characters")
    ] = None
    references: Annotated[
        Annotated[list[ReferenceItem], Meta(max_length=16)] | None,
        Meta(
            description="the alternative to ref_audio and ref_text, also for models that speak in several "
            "voices: "
            'a list of up to 16 of {"audio": ..., "text": its exact words, "speaker": the speaker\'s '
            "name or number in the input}"
        ),
    ] = None
    response_format: Annotated[
        ResponseFormat,
        Meta(
            description="mp3 (default), opus (in Ogg; also named ogg), webm (Opus), aac (ADTS), m4a (AAC), flac, "
            "wav, pcm (16-bit little-endian mono without a header), ulaw (also named mulaw) or alaw (G.711 at "
            "8 kHz without a header)"
        ),
    ] = "mp3"
    sample_rate: Annotated[
        Annotated[int, Meta(ge=8000, le=48000)] | None,
        Meta(
            description="the answer's samples per second, an integer from 8000 to 48000 that the format "
            "supports; default: the model's own rate (opus is always 48000)"
        ),
    ] = None
    bit_rate: Annotated[
        Annotated[int, Meta(ge=8000, le=192_000)] | None,
        Meta(
            description="the bits per second of mp3, opus, webm, aac or m4a, an integer from 8000 to 192000; the "
            "codec takes the nearest that it has; default: 96000, or less at low sample rates"
        ),
    ] = None
    loudness: Annotated[
        Annotated[float, Meta(ge=MIN_LUFS, le=MAX_LUFS)] | None,
        Meta(
            description="the loudness of the speech in LUFS (EBU R128), a number from -36 to -8, such as -16; a file "
            "has exactly that, and a stream follows it; default: the loudness of the model's own speech"
        ),
    ] = None
    speed: Annotated[
        Annotated[float, Meta(ge=MIN_SPEED, le=MAX_SPEED)],
        Meta(
            description="the speed of the speech at unchanged pitch: a number from 0.25 to 4; 1 (default) is "
            "the model's own speed"
        ),
    ] = 1.0
    stream_format: Annotated[
        Literal["audio", "sse"],
        Meta(
            description="audio (default) or sse: speech.audio.delta events, whose decoded audio joined is "
            "the file, with speech.text.delta events if the model writes text, and speech.audio.done at the "
            "end"
        ),
    ] = "audio"
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None,
        Meta(
            description='a list of "segment" and "word", with stream_format sse: speech.audio.segment events give '
            "the start and end of each piece of text in the audio, and speech.audio.words events those of each "
            "word, on a server with an aligner"
        ),
    ] = None
    stream: Annotated[
        bool,
        Meta(
            description="true (default): audio is sent as it is generated; false: the whole file is sent at "
            "the end, with its length"
        ),
    ] = True
    service_tier: Annotated[
        Literal["auto", "default", "flex"],
        Meta(
            description="auto or default: for listeners; flex: for batches, served only while no other "
            "request waits for first audio or is at risk of an underrun; 503 if that takes too long"
        ),
    ] = "auto"
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(
            description="an integer from 0 to 2^63 - 1; the same seed gives the same speech; default: a "
            "random seed (see x-seed)"
        ),
    ] = None
    split_text: Annotated[
        bool | None,
        Meta(
            description="true (default): a text that is too long for one pass of the model is spoken in "
            "pieces, cut at sentences and clauses; false: the text is spoken in one pass, which may end "
            "before the text does"
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        Meta(
            description="true: numbers, dates, times and amounts are first written out in words, in Chinese, "
            "English or Japanese; false (default): the model reads them as they are"
        ),
    ] = None
    sentence_gap_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_GAP_S)] | None,
        Meta(
            description="a number from 0 to 10: seconds of silence between sentences, each of which is then spoken in "
            "a pass of its own; default: the server's, else 0, which leaves sentences as the model speaks them"
        ),
    ] = None
    text_format: Annotated[
        Literal["plain", "markdown"],
        Meta(
            description="plain (default), or markdown: marks, addresses of links, images, emoji and blocks of code "
            "are left unspoken"
        ),
    ] = "plain"
    pronunciations: Annotated[
        Annotated[list[Pronunciation], Meta(max_length=MAX_PRONUNCIATIONS)] | None,
        Meta(
            description='how words are spoken: a list of up to 1000 of {"term": "nginx", "say": "engine x"}, each '
            "with `language` and `voice` if it is for these alone; it wins over the server's own list"
        ),
    ] = None
    conversation: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(
            description="the name of a conversation, 1 to 256 characters, for models with `shares_turns`: the next "
            "request with this name continues behind the speech of this one; every client with the same API key that "
            "knows the name can continue it"
        ),
    ] = None
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="the maximum number of frames to generate, an integer from 1 to 1000000"),
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
        """Return the reference audio in the request. Raises ValueError."""
        if self.ref_audio is not None and self.references:
            raise ValueError("ref_audio and references are both given; leave one out")
        if self.ref_audio is not None:
            return [GivenReference(self.ref_audio, self.ref_text)]
        if len(self.references or ()) > 1 and self.ref_text is not None:
            raise ValueError(
                "ref_text is the text of one reference, but references has several; give each item its own "
                "text"
            )
        return [self._given(item) for item in self.references or ()]

    def _given(self, item: ReferenceItem) -> GivenReference:
        named = [audio for audio in (item.audio, item.ref_audio, item.audio_path) if audio is not None]
        if len(named) != 1:
            raise ValueError(
                "every item of references needs exactly one of audio, ref_audio and audio_path (names for the "
                "same field); "
                f"one item has {len(named)}"
            )
        if item.text is not None and self.ref_text is not None:
            raise ValueError("ref_text and a text in references are both given; leave one out")
        speaker = None if item.speaker is None else str(item.speaker)
        return GivenReference(named[0], item.text if item.text is not None else self.ref_text, speaker)

    def forget_audio(self) -> None:
        """Empty the audio after it was read. Otherwise it stays in memory until the answer ends."""
        if self.ref_audio is not None:
            self.ref_audio = ""
        for item in self.references or ():
            item.audio, item.ref_audio, item.audio_path = "", None, None

    def for_engine(self) -> protocol.Request:
        """Return the request with a seed. The voice and the references are missing: voice_choice.py chooses
        them."""
        given = {name: value for name in SAME_NAME if (value := getattr(self, name)) is not None}
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return protocol.Request(self.input, seed=seed, max_frames=self.max_new_tokens, **given)

    @property
    def encoding(self) -> tuple[int | None, float, int | None, float | None]:
        """Return the arguments of `encode.Encoder` and `encode.file` that come after the model's rate."""
        return self.sample_rate, self.speed, self.bit_rate, self.loudness

    @property
    def listener(self) -> protocol.Listener:
        """Return the listener. A whole file has reproducible bytes; for a stream, early audio matters
        more."""
        return protocol.Listener(
            speed=self.speed,
            is_flexible=self.service_tier == "flex",
            is_reproducible=not self.stream,
            is_metered=True,
            wants_timestamps=bool(self.timestamp_granularities),
        )


class SpeechBatch(SpeechRequest, kw_only=True):
    """The body of POST /v1/audio/speech/batch: several requests in one. Fields next to `items` are defaults
    for all items. Every answer is a whole file."""

    input: Annotated[str, Meta(description="the text of items without their own input; optional")] = ""
    items: Annotated[
        Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_BATCH)],
        Meta(
            description=f"a list of 1 to {MAX_BATCH} requests with the fields of POST /v1/audio/speech "
            "and options of the model; stream and stream_format are ignored"
        ),
    ]


class URLRequest(SpeechRequest, kw_only=True):
    """The body of POST /v1/audio/speech/url: a speech request, without recordings and lists, and how long its URL
    shall work."""

    expires_in_s: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_EXPIRES_S)],
        Meta(description="how many seconds the URL works, an integer from 1 to 604800; default: 3600"),
    ] = 3600


SAME_NAME = (
    *("language", "instructions", "split_text", "normalize", "sentence_gap_s", "conversation"),
    *("temperature", "top_k", "top_p", "repetition_penalty"),
)
CLIENT_FIELD = {"text": "input", "max_frames": "max_new_tokens"}  # zoo.request.Request -> SpeechRequest
# task_type -> zoo.contract.Spec.modes
TASK_MODE = {"CustomVoice": "voice", "VoiceDesign": "design", "Base": "clone"}


class VoiceName(msgspec.Struct, forbid_unknown_fields=True):
    """The body of PATCH /v1/audio/voices/{voice_id}."""

    name: Annotated[Name, Meta(description="the new name of the voice, with the same rules as for an upload")]


class VoiceUpload(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The multipart form of POST /v1/audio/voices."""

    name: Annotated[
        Name,
        Meta(
            description="the name of the voice: letters, digits, '_', '-' and '.'; upper and lower case are "
            "the same"
        ),
    ]
    audio_sample: Annotated[
        UploadFile,
        Meta(description="a file with a recording of the voice: WAV, FLAC, MP3, Ogg, AAC, M4A or WebM"),
    ]
    ref_text: Annotated[
        Words | None,
        Meta(
            description="the exact words of the sample, in up to 4096 characters; without them, models use "
            "only the sound of the voice"
        ),
    ] = None
    consent: Annotated[
        Words | None,
        Meta(description="a proof of the speaker's consent, in up to 4096 characters; stored with the voice"),
    ] = None
    type: Annotated[Literal["audio_sample"], Meta(description="audio_sample")] = "audio_sample"
    speaker_description: Annotated[
        Words | None,
        Meta(description="a description of the voice, in up to 4096 characters; accepted and not stored"),
    ] = None


class TranscriptionRequest(
    msgspec.Struct,
    kw_only=True,
    rename={"timestamp_granularities": "timestamp_granularities[]", "include": "include[]"},
):
    """The multipart form of POST /v1/audio/transcriptions, for models with `transcript` in their `outputs`."""

    file: Annotated[
        UploadFile, Meta(description="a file with the recording: WAV, FLAC, MP3, Ogg, AAC, M4A or WebM")
    ]
    model: Annotated[
        Name | None, Meta(description="the ID of a served model; required if several can transcribe")
    ] = None
    language: Annotated[
        Name | None, Meta(description="the language of the recording, one of the model's, by name or by code")
    ] = None
    prompt: Annotated[Words | None, Meta(description="accepted and ignored, with a warning")] = None
    response_format: Annotated[
        Literal["json", "text", "verbose_json", "srt", "vtt", "diarized_json"],
        Meta(
            description="json (default), text or verbose_json, which adds language and duration; formats with "
            "times are refused"
        ),
    ] = "json"
    stream: Annotated[
        bool | None, Meta(description="true: the text as server-sent events while it is written")
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="a number from 0 (greedy) to 2")] = None
    timestamp_granularities: Annotated[
        list[str] | str | None, Meta(description="nothing: no model gives times")
    ] = None
    include: Annotated[list[str] | str | None, Meta(description="nothing: no model gives probabilities")] = (
        None
    )


class PronunciationList(msgspec.Struct, forbid_unknown_fields=True):
    """The body of PUT /v1/audio/pronunciations."""

    pronunciations: Annotated[
        Annotated[list[Pronunciation], Meta(max_length=MAX_ENTRIES)],
        Meta(
            description='a list of up to 10000 of {"term": "nginx", "say": "engine x"}, each with `language` and '
            "`voice` if it is for these alone"
        ),
    ]


def fields_of(body: type[msgspec.Struct]) -> dict[str, str]:
    """Return the description of every field, by name."""
    hints = get_type_hints(body, include_extras=True)
    return {name: hint.__metadata__[-1].description for name, hint in hints.items()}


class InputAudio(msgspec.Struct):
    data: str
    format: Literal["wav", "mp3"] = "wav"


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    input_audio: InputAudio


class AudioId(msgspec.Struct):
    id: str


class CalledFunction(msgspec.Struct):
    name: ToolName
    arguments: str


class ToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: dict[str, Any]


class ChatMessage(msgspec.Struct):
    """A turn of a conversation. developer is another name for system. tool: the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | AudioPart], Meta(max_length=16)] | None = None
    audio: AudioId | None = None  # of an earlier answer, in place of its content
    tool_calls: Annotated[list[ToolCall], Meta(max_length=16)] | None = None  # of an earlier answer
    tool_call_id: str | None = None


class ChatAudio(msgspec.Struct):
    """How the answer's audio comes. voice: the name of a voice; a model with one voice speaks in that one."""

    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
    voice: Name | Voice | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class ChatRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions, for models that answer (`answers` in GET /v1/models), and for those that
    continue a text or a clip (text or continuation in `outputs`)."""

    messages: Annotated[
        Annotated[list[ChatMessage], Meta(min_length=1, max_length=256)],
        Meta(
            description="the conversation: at most one system message, then user and assistant in turn, the user's "
            "last; content is a text, or a list of text and input_audio parts, base64 in data; for a model that does "
            "not answer, one assistant message, which it continues"
        ),
    ]
    model: Annotated[
        Name | None, Meta(description="the ID of a served model; required if several answer")
    ] = None
    modalities: Annotated[
        list[Literal["text", "audio"]] | None,
        Meta(description='["text"] (default), or ["text", "audio"], which needs audio'),
    ] = None
    audio: Annotated[
        ChatAudio | None,
        Meta(description="the voice, and the format: wav, mp3, flac, opus, aac, or pcm16, at 24 kHz"),
    ] = None
    stream: Annotated[
        bool | None,
        Meta(
            description="true: chunks as server-sent events, with audio in pcm16; false (default): one object"
        ),
    ] = None
    stream_options: Annotated[
        StreamOptions | None, Meta(description="include_usage true: a last chunk has the usage")
    ] = None
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="the most tokens of the answer, of text and audio together"),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="the older name of max_completion_tokens"),
    ] = None
    n: Annotated[Literal[1] | None, Meta(description="1: there is one answer")] = None
    user: Annotated[Words | None, Meta(description="accepted and ignored")] = None
    safety_identifier: Annotated[Words | None, Meta(description="accepted and ignored")] = None
    prompt_cache_key: Annotated[Words | None, Meta(description="accepted and ignored")] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="accepted and ignored")] = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Meta(max_length=4)] | None,
        Meta(description="up to 4 strings of 1 to 256 characters; the answer ends before the first of them"),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="an integer from 0 to 2^63 - 1; the same seed gives the same answer"),
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="a number from 0 (greedy) to 2")] = None
    top_p: Annotated[TopP | None, Meta(description="a number above 0, up to 1 (off)")] = None
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=128)] | None,
        Meta(description="functions that the model may call, for models with `takes_tools`"),
    ] = None
    tool_choice: Annotated[
        Literal["auto", "none"] | None, Meta(description="auto (default): the model decides; none: no tools")
    ] = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


# Descriptions of fields, by route.
FIELDS = {
    "/v1/audio/speech": fields_of(SpeechRequest),
    "/v1/chat/completions": fields_of(ChatRequest),
    "/v1/audio/transcriptions": fields_of(TranscriptionRequest),
    "/v1/audio/speech/batch": fields_of(SpeechBatch),
    "/v1/audio/speech/url": fields_of(URLRequest),
    "/v1/audio/voices": fields_of(VoiceUpload),
    "/v1/audio/voices/{voice_id}": fields_of(VoiceName),
    "/v1/audio/pronunciations": fields_of(PronunciationList),
}
