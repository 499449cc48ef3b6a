"""The voice of a request: the one place that decides it.

    what the client gives          what the request speaks in
    recordings                     their voice
    a voice of the model           that voice; the engine knows it by its name
    an uploaded voice              its recording
    a mix such as anna(2)+bert     the mix, with the recordings of the uploaded voices in it
    an alias                       the voice that it stands for
    a name of OpenAI's             the model's first voice, with a warning, if the server has one model and is
                                   not strict; recordings take precedence over it
    nothing, "" or "default"       the alias "default" if there is one, otherwise the model chooses

Real names take precedence over aliases, and aliases over OpenAI's names. `References` finds the recordings of
a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from litestar.exceptions import HTTPException

from serving.http.errors import cut, refusal
from serving.http.names import Names
from serving.http.objects import Model
from serving.http.schemas import CLIENT_FIELD, SpeechRequest
from serving.http.voices import DEFAULT, Voices
from zoo.request import MAX_SHARES, is_mix, names_in, with_own_names

MAX_NAMES = 20  # in a message
MAX_MIXED = MAX_SHARES + 1  # so that the engine refuses larger mixes
# developers.openai.com/api/docs/guides/text-to-speech
OPENAI_VOICES = frozenset(
    (
        *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
        *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
    )
)


@dataclass(frozen=True)
class VoiceChoice:
    """The voice of a request, after every name was resolved and checked.

    name: a voice of the model, an uploaded voice or a mix; None if the request has recordings, or if the
    model chooses. uploaded: the uploaded voices that the name needs. field: the client's field that gives the
    voice: voice, ref_audio or references. label: the name or the source of the voice, for the log. warning:
    what is used instead of a name of OpenAI's.
    """

    name: str | None
    is_mix: bool
    uploaded: tuple[str, ...]
    field: str
    label: str | None
    warning: str | None

    @property
    def warnings(self) -> tuple[str, ...]:
        return () if self.warning is None else (self.warning,)

    def client_field(self, param: str) -> str:
        """Return the client's name for a field of zoo.request.Request."""
        match param:
            case "references":
                return self.field
            case "transcript":
                return "ref_text" if self.field == "ref_audio" else self.field
        return CLIENT_FIELD.get(param, param)


@dataclass(frozen=True)
class VoiceChooser:
    """Chooses the voices of requests from the models' voices, the uploaded ones and the names of both."""

    voices: Voices
    names: Names

    def choose(self, request: SpeechRequest, model: Model, *, is_only_model: bool) -> VoiceChoice:
        """Return the voice of a request, without reading a recording. Raises the refusal."""
        num_recordings = number_of_recordings(request)
        has_recordings = num_recordings > 0
        has_description = request.instructions is not None and list(model.modes) == ["design"]
        name, warning = self._resolved(
            request.voice_name, model, is_only_model, has_recordings, has_description
        )
        uploaded: tuple[str, ...] = ()
        if num_recordings:
            check_recordings(num_recordings, request, name, model)
        elif request.ref_text is not None and name is not None and not self.names.is_strict:
            uploaded = self._uploaded_of(name, model)
            warning = "; ".join(
                filter(None, (warning, "ref_text has no meaning without ref_audio; it is ignored"))
            )
        elif request.ref_text is not None:
            raise refusal(400, "ref_text is the text of ref_audio, but ref_audio is missing", "ref_text")
        elif name is not None:
            uploaded = self._uploaded_of(name, model)
        return VoiceChoice(
            name=name,
            is_mix=name is not None and not is_own(model.voices, name) and is_mix(name),
            uploaded=uploaded,
            field="voice" if name is not None else recording_field(request),
            label=label(name, request, model),
            warning=warning,
        )

    def no_voice(self, voice: str, model: Model) -> HTTPException:
        uploaded = self.voices.names() if model.reference_s is not None else []
        return refusal(400, f"there is no voice {voice!r}; {possible_voices(model, uploaded)}", "voice")

    def _resolved(
        self,
        asked: str | None,
        model: Model,
        is_only_model: bool,
        has_recordings: bool,
        has_description: bool,
    ) -> tuple[str | None, str | None]:
        """Return the voice that a name means (None: the model chooses), and a warning if it stands in for
        OpenAI's."""
        if not asked:
            return None if has_recordings else self.names.voices.get(DEFAULT), None
        if has_recordings and asked == DEFAULT:  # vLLM-Omni's clients always name it
            return None, None
        if is_own(model.voices, asked) or self.voices.has(asked):
            return asked, None
        if asked in self.names.voices:
            return self.names.voices[asked], None
        if is_mix(asked):
            return with_own_names(asked, self.names.voices), None
        if (
            asked == DEFAULT and not self.names.is_strict
        ):  # SGLang-Omni's clients name it if the user chose none
            return None, None
        if self.names.is_strict:
            return asked, None
        # vLLM-Omni's clients name their default voice next to a recording or a description, too.
        is_given_otherwise = has_recordings or has_description
        if not is_given_otherwise and (not is_only_model or asked.lower() not in OPENAI_VOICES):
            return asked, None
        first = None if has_recordings else next(iter(model.voices), None)
        instead = "the recording" if has_recordings else ascii(first)
        replaced = f"{instead} is used instead" if has_recordings or first else "the field is ignored"
        return first, f"voice {asked!a} does not exist; {replaced}"

    def _uploaded_of(self, name: str, model: Model) -> tuple[str, ...]:
        """Return the uploaded voices that a name needs. Raises the refusal."""
        if is_own(model.voices, name):
            return ()
        if not is_mix(name):
            self._check_uploaded(name, model)
            return (name,)
        if not model.mixes:
            message = f"model {model.id!r} cannot mix voices, and {name[:80]!r} is a mix"
            raise refusal(400, f"{message}; {possible_voices(model)}", "voice")
        parts = [part for part in names_in(name) if not is_own(model.voices, part)]
        for part in parts:
            self._check_uploaded(part, model)
        return tuple(dict.fromkeys(map(str.lower, parts)))[:MAX_MIXED]

    def _check_uploaded(self, voice: str, model: Model) -> None:
        if not self.voices.has(voice):
            raise self.no_voice(voice, model)
        if model.reference_s is None:
            message = f"{voice!r} is an uploaded voice, and model {model.id!r} takes none"
            raise refusal(400, f"{message}; {possible_voices(model)}", "voice")


def number_of_recordings(request: SpeechRequest) -> int:
    """Raises the refusal."""
    try:
        return len(request.given_references)
    except ValueError as error:
        raise refusal(400, str(error), "references") from None


def recording_field(request: SpeechRequest) -> str:
    """Return the field that holds the recordings, or would hold one."""
    return "references" if request.references else "ref_audio"


def check_recordings(num: int, request: SpeechRequest, voice: str | None, model: Model) -> None:
    """Check that a model takes `num` recordings, and that the request names no voice next to them. Raises the
    refusal."""
    param = recording_field(request)
    if model.reference_s is None:
        message = f"model {model.id!r} takes no reference audio; {possible_voices(model)}"
        raise refusal(400, message, param)
    if num > model.max_references:
        message = f"{num} references are given; model {model.id!r} takes up to {model.max_references}"
        raise refusal(400, message, param)
    if voice is not None:
        message = "voice and reference audio are both given, but a request has one voice; leave one out"
        raise refusal(400, message, "voice")


def label(name: str | None, request: SpeechRequest, model: Model) -> str | None:
    """Return the name of a voice, or its source in parentheses, for the log."""
    if name is not None:
        return cut(name)
    if request.ref_audio is not None or request.references:
        return "(recording)"
    return "(description)" if "design" in model.modes and request.instructions else None


def is_own(voices: Iterable[str], voice: str) -> bool:
    """Whether a voice is one of the model's own; upper and lower case are the same."""
    return voice.lower() in map(str.lower, voices)


def possible_voices(model: Model, uploaded: list[str] | None = None) -> str:
    """Return the choices of a voice for this model, for an error message."""
    names = [*model.voices, *(uploaded or ())]
    more = f" and {len(names) - MAX_NAMES} more (GET /v1/audio/voices)" if len(names) > MAX_NAMES else ""
    possible = [f"available voices: {', '.join(names[:MAX_NAMES])}{more}"] if names else []
    if "design" in model.modes:
        possible.append("describe a voice in instructions")
    if model.reference_s is not None:
        possible.append("upload a voice (POST /v1/audio/voices) or send ref_audio")
    return "; ".join(possible) or f"the model has no named voices: leave voice out, or send {DEFAULT!r}"
