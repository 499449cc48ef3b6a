"""The names by which clients ask for models and voices: real names, aliases (`zoo serve --alias`), and
OpenAI's names. OpenAI's names let a client written for OpenAI's speech API work without configuration.

    a real name       is used as it is
    an alias          means the model or voice that it stands for
    OpenAI's name     means the only model that does the same work (speak, answer or transcribe), or its first
                      voice, with a warning; if several do, or with --strict, it has no special meaning

Real names take precedence over aliases. A request that names an OpenAI model gets pcm at OpenAI's rate,
unless it sets another one. A warning is a line for the header `x-warning`: it says which name is not served
and what is used instead. voice_choice.py applies these rules to voices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from serving.http.objects import Model
from serving.settings import Aliases

Work = Literal["speak", "answer", "transcribe"]
# developers.openai.com/api/docs/models, and dated ones as gpt-4o-mini-tts-2025-12-15
OPENAI_MODELS: dict[Work, re.Pattern[str]] = {
    "speak": re.compile(r"(tts-1|tts-1-hd|gpt-4o-mini-tts)(-20.*)?"),
    "answer": re.compile(r"gpt-(4o-|4o-mini-)?(realtime|audio)(?!-(whisper|translate))(-.*)?"),
    "transcribe": re.compile(r"(whisper-1|gpt-realtime-whisper|gpt-(4o-|4o-mini-|live-)?transcribe)(-20.*)?"),
}
OPENAI_PCM_HZ = 24000  # pcm does not carry its rate, and OpenAI's clients assume this one


class Names(Aliases, frozen=True):
    """The meaning of the names in a request: aliases, and OpenAI's names."""

    def means(self, asked: str, work: Work, served: Iterable[Model]) -> bool:
        """Return whether a name is OpenAI's for a model that does a kind of work, and nothing else."""
        is_other = asked in self.models or any(asked == model.id for model in served)
        return is_openais(asked, work) and not is_other and not self.is_strict

    def aliases_of(self, id: str) -> list[str]:
        return [alias for alias, model in self.models.items() if model == id]


def is_openais(name: str, work: Work) -> bool:
    return OPENAI_MODELS[work].fullmatch(name) is not None
