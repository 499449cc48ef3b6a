"""The names by which clients ask for models and voices: real names, aliases (`zoo serve --alias`), and
OpenAI's names. OpenAI's names let a client written for OpenAI's speech API work without configuration.

    a real name       is used as it is
    an alias          means the model or voice that it stands for
    OpenAI's name     means the only model, or its first voice, with a warning; on servers with --strict or
                      several models it has no special meaning

Real names take precedence over aliases. A request that names an OpenAI model gets pcm at OpenAI's rate,
unless it sets another one. A warning is a line for the header `x-warning`: it says which name is not served
and what is used instead. voice_choice.py applies these rules to voices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serving.http.objects import Model
from serving.settings import Aliases

# developers.openai.com/api/docs/guides/text-to-speech, and dated ones as gpt-4o-mini-tts-2025-12-15
OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
OPENAI_TRANSCRIBERS = ("whisper-1", "gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-mini-transcribe")
OPENAI_PCM_HZ = 24000  # pcm does not carry its rate, and OpenAI's clients assume this one


class Names(Aliases, frozen=True):
    """The meaning of the names in a request: aliases, and OpenAI's names."""

    def model(self, asked: str, served: Mapping[str, Model]) -> tuple[str, str | None]:
        """Return the ID of a model (or the requested name if it is unknown), and a warning if the only
        model stands in for OpenAI's."""
        if asked in served:
            return asked, None
        if asked in self.models:
            return self.models[asked], None
        if self.is_strict or len(served) != 1 or not is_openai_model(asked):
            return asked, None
        [id] = served
        return id, f"model {asked!a} is not served; {id!a} is used instead"

    def means_transcriber(self, asked: str, served: Iterable[Model]) -> bool:
        """Return whether a name is OpenAI's for a model that transcribes, and nothing else."""
        is_other = asked in self.models or any(asked == model.id for model in served)
        known = any(asked == name or asked.startswith(f"{name}-20") for name in OPENAI_TRANSCRIBERS)
        return known and not is_other and not self.is_strict

    def aliases_of(self, id: str) -> list[str]:
        return [alias for alias, model in self.models.items() if model == id]


def is_openai_model(name: str) -> bool:
    return name in OPENAI_MODELS or any(name.startswith(f"{model}-20") for model in OPENAI_MODELS)
