"""The bodies of requests and answers in the form of ElevenLabs' clients (elevenlabs 2.78 for Python).

routes/elevenlabs.py turns them into speech requests.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.http.schemas import Name, fields_of

# Templates of their paths.
SPEAK = "/v1/text-to-speech/{voice_id}"
STREAM = f"{SPEAK}/stream"
SPEAK_TIMED, STREAM_TIMED = f"{SPEAK}/with-timestamps", f"{STREAM}/with-timestamps"
PATHS = (SPEAK, STREAM, SPEAK_TIMED, STREAM_TIMED)
ONE_INPUT, MANY_INPUTS = f"{SPEAK}/stream-input", f"{SPEAK}/multi-stream-input"
DEFAULT_FORMAT = "mp3_44100_128"
# Fields of their requests, and of voice_settings, that have no meaning here.
MEANINGLESS = (
    *("pronunciation_dictionary_locators", "previous_text", "next_text"),
    *("previous_request_ids", "next_request_ids", "use_pvc_as_ivc"),
    *("apply_language_text_normalization", "audio_effects"),
)


class VoiceSettings(msgspec.Struct):
    """Only the speed has a meaning here. The others are accepted."""

    speed: float | None = None
    stability: float | None = None
    similarity_boost: float | None = None
    style: float | None = None
    use_speaker_boost: bool | None = None
    clone_strength: float | None = None


class ElevenLabsRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/text-to-speech/{voice_id}, in ElevenLabs' form. Other fields of a speech request, and
    options of the model, may stand next to these."""

    text: Annotated[str, Meta(description="the text to speak")]
    model_id: Annotated[
        Name | None,
        Meta(
            description="the ID of a served model; required if several speak texts; a name of ElevenLabs' stands for "
            "the only one that does"
        ),
    ] = None
    language_code: Annotated[
        Name | None, Meta(description="one of the model's languages, by code (en) or by name")
    ] = None
    voice_settings: Annotated[
        VoiceSettings | None, Meta(description="an object; only its speed, 0.25 to 4, has a meaning here")
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)] | None,
        Meta(description="an integer from 0 to 2^63 - 1; the same seed gives the same speech"),
    ] = None
    apply_text_normalization: Annotated[
        Literal["auto", "on", "off"] | None,
        Meta(description="on: numbers, dates and amounts are first written out in words; auto is off"),
    ] = None
    pronunciation_dictionary_locators: Annotated[
        list[dict[str, Any]] | None, Meta(description="a list of objects, which is ignored")
    ] = None
    previous_text: Annotated[str | None, Meta(description="a text, which is ignored")] = None
    next_text: Annotated[str | None, Meta(description="a text, which is ignored")] = None
    previous_request_ids: Annotated[
        list[str] | None, Meta(description="a list of texts, which is ignored")
    ] = None
    next_request_ids: Annotated[list[str] | None, Meta(description="a list of texts, which is ignored")] = (
        None
    )
    use_pvc_as_ivc: Annotated[bool | None, Meta(description="true or false, which is ignored")] = None
    apply_language_text_normalization: Annotated[
        bool | None, Meta(description="true or false, which is ignored")
    ] = None
    audio_effects: Annotated[dict[str, Any] | None, Meta(description="an object, which is ignored")] = None


class ElevenLabsVoice(msgspec.Struct):
    """A voice in ElevenLabs' form. category: "premade" for a voice of the model, "cloned" for an uploaded one."""

    voice_id: str
    name: str
    category: Literal["premade", "cloned"]
    labels: dict[str, str] = {}
    description: str | None = None
    preview_url: str | None = None


class ElevenLabsVoices(msgspec.Struct):
    """All voices, in one page."""

    voices: list[ElevenLabsVoice]
    total_count: int
    has_more: bool = False
    next_page_token: str | None = None


class CharacterAlignment(msgspec.Struct):
    """Each character, and the seconds of the audio at which it begins and ends."""

    characters: list[str] = []
    character_start_times_seconds: list[float] = []
    character_end_times_seconds: list[float] = []

    def add(self, text: str, start_s: float, end_s: float) -> None:
        """Add a text whose characters share a time evenly."""
        share_s = (end_s - start_s) / max(len(text), 1)
        self.characters += text
        self.character_start_times_seconds += [round(start_s + i * share_s, 6) for i in range(len(text))]
        self.character_end_times_seconds += [round(start_s + (i + 1) * share_s, 6) for i in range(len(text))]


class TimedAudio(msgspec.Struct):
    """Audio with the times of its characters: a whole answer, or a line of a stream. alignment: of the text that was
    sent; null if the model read other words, and in lines of audio. normalized_alignment: of the words that it
    read."""

    audio_base64: str
    alignment: CharacterAlignment | None
    normalized_alignment: CharacterAlignment | None


FIELDS = dict.fromkeys(PATHS, fields_of(ElevenLabsRequest))
BODIES = (ElevenLabsRequest, ElevenLabsVoices, TimedAudio)
