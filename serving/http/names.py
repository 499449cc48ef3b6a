"""By which names models and voices are asked for: their own, those that `zoo serve --alias` gives them, and OpenAI's, so that
a client written for OpenAI's speech API finds a voice here without being told of ours.

    named here        as it is
    an alias          what it stands for
    OpenAI's name     on a server of one model, unless it is strict: that model, its first voice; and a warning

Who asks for a model by OpenAI's name hears pcm at OpenAI's rate, unless it asks for another one. A warning is a line for the
header `x-warning`: what was asked for is not here, and what is taken in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from serving.http.schemas import Model

# developers.openai.com/api/docs/guides/text-to-speech, and dated ones as gpt-4o-mini-tts-2025-12-15
OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
OPENAI_PCM_HZ = 24000  # which its clients take for granted, since pcm does not say
OPENAI_VOICES = frozenset(
    (
        *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
        *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
    )
)


class Names(msgspec.Struct, frozen=True):
    """models: the id of a served model, by alias; voices: a voice, by alias. is_strict: OpenAI's names are names like
    any other."""

    models: dict[str, str] = {}
    voices: dict[str, str] = {}
    is_strict: bool = False

    def model(self, asked: str, served: Mapping[str, Model]) -> tuple[str, str | None]:
        """-> the id of a model, or what was asked for where nothing is known of it; and a warning, where OpenAI's name
        is not one of ours."""
        if asked in served:
            return asked, None
        if asked in self.models:
            return self.models[asked], None
        if self.is_strict or len(served) != 1 or not is_openai_model(asked):
            return asked, None
        [id] = served
        return id, f"model {asked!a} is not here; {id!a} speaks in its place"

    def voice(
        self, asked: str, model: Model, is_known: bool, num_served: int
    ) -> tuple[str | None, str | None]:
        """-> the voice to speak in, None for the model's own choice, and a warning, likewise. is_known: whether
        the model, or an upload, has the name already."""
        if is_known:
            return asked, None
        if asked in self.voices:
            return self.voices[asked], None
        if self.is_strict or num_served != 1 or asked.lower() not in OPENAI_VOICES:
            return asked, None
        first = next(iter(model.voices), None)
        instead = f"{first!a} speaks in its place" if first is not None else "it is left out"
        return first, f"voice {asked!a} is not here; {instead}"

    def aliases_of(self, id: str) -> list[str]:
        return [alias for alias, model in self.models.items() if model == id]


def is_mix(voice: str) -> bool:
    """Whether it has the form of several voices, as `anna(2)+bert(1)`: no name of an upload has it. The engine reads it."""
    return "+" in voice


def names_in(mix: str) -> list[str]:
    return [part.partition("(")[0].strip() for part in mix.split("+")]


def with_own_names(mix: str, aliases: Mapping[str, str]) -> str:
    """A mix of aliases -> of what they stand for."""
    parts = []
    for part, name in zip(mix.split("+"), names_in(mix), strict=True):
        parts.append(part.replace(name, aliases.get(name, name), 1) if name else part)
    return "+".join(parts)


def is_openai_model(name: str) -> bool:
    return name in OPENAI_MODELS or any(name.startswith(f"{model}-20") for model in OPENAI_MODELS)
