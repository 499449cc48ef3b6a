"""Builds the prompt: the phonemes and the conditions that the model reads, then the audio that the speech
continues.

    begin phonemes… end  speaker emotion fmax pitch_std speaking_rate language  column 0  column 1 … P
    └─ both lanes ────┘  └─ the second lane reads learned vectors instead ───┘  └─ both lanes ───────┘

Column 0 is all masks; the columns behind it are a recording of P frames. Both lanes are equally long. The
phonemes of a recording's words stand before those of the text. Source: Zyphra/Zonos at bc40d98, model.py and
conditioning.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.contract import Said
from zoo.nn.keys import prefix_key
from zoo.request import BLANK, SOUND_ONLY, Option, Request, RequestError, sampling_options
from zoo.zonos.clone import Cloner
from zoo.zonos.config import BOOKS, EMOTIONS, ESPEAK, LANGUAGE, SPEAKER, Condition, Config
from zoo.zonos.phonemes import LANGUAGES, Phonemizer, espeak_name

VOICE = "default"  # the model chooses a voice; OpenAI's clients must name one
# The model was trained on 30 s, and a random voice of a long text is continued behind its first piece.
PIECE_S = 12.0
MAX_FRAMES = 86 * 30  # the reference's limit
MAX_POSITIONS = 4096  # of prompt and speech together
TEMPERATURE, TOP_K, TOP_P, PENALTY, MIN_P, GUIDANCE = 1.0, 0, 1.0, 3.0, 0.1, 2.0
MAX_GUIDANCE = 10.0
EMOTION = (0.3077, 0.0256, 0.0256, 0.0256, 0.0256, 0.0256, 0.2564, 0.3077)
DEFAULTS = {"fmax": 22050.0, "pitch_std": 20.0, "speaking_rate": 15.0}
HELP = {
    "fmax": "the highest frequency of the recording, in Hz: 22050 for clones, 24000 for the best quality",
    "pitch_std": "how far the pitch moves, in Hz: 20 to 45 is normal, 60 to 150 expressive",
    "speaking_rate": "phonemes per second: 10 is slow, 30 very fast",
}
SILENCE_FIRST = "silence_first"
# conditions that a request may leave to the model
LEFT = {
    "emotion": "the emotions; try it if the speech is unstable",
    "fmax": "the highest frequency",
    "pitch_std": "how far the pitch moves",
    "speaking_rate": "its speed",
}
HINTS = {
    "repetition_penalty": "set recent_penalty",
    "voice": "or give a reference",
    "instructions": "set emotion_happiness and the other emotions, speaking_rate and pitch_std",
}


def options(config: Config) -> tuple[Option, ...]:
    """Return everything that a request may set, the conditions with the ranges of the checkpoint."""
    return (
        *(_emotion(name, default) for name, default in zip(EMOTIONS, EMOTION, strict=True)),
        *(_number(condition) for condition in config.conditions if condition.name in DEFAULTS),
        *(Option(f"unconditional_{name}", bool, f"the model chooses {what}", False) for name, what in LEFT.items()),
        Option("cfg_scale", float, "strength of guidance; 1 turns it off", GUIDANCE, (1, MAX_GUIDANCE)),
        *sampling_options(TEMPERATURE, TOP_K, TOP_P),
        Option("min_p", float, "drop codes less likely than this share of the likeliest; 0 keeps all", MIN_P, (0, 1)),
        Option("linear", float, "unified sampler: high values make the speech less random; 0 turns the sampler off", 0.0, (0, 2)),
        Option("conf", float, "unified sampler: low values make random codes more random", 0.0, (-2, 2)),
        Option("quad", float, "unified sampler: high values make unlikely codes much less likely", 0.0, (-2, 2)),
        Option("recent_penalty", float, "how strongly to penalize the codes of the last two steps; 1 is off", PENALTY, (1, 10)),
        Option(SOUND_ONLY, bool, "clone only the voice of the reference, without continuing it", False),
        Option(SILENCE_FIRST, bool, "continue 0.1 s of silence, or a recording; try it if the first word is cut off", False),
    )  # fmt: skip


def _emotion(name: str, default: float) -> Option:
    what = {"other": "emotions without a name", "neutral": "no emotion"}.get(name, name)
    return Option(f"emotion_{name}", float, f"weight of {what} among the eight emotions", default, (0, 1))


def _number(condition: Condition) -> Option:
    name, low, high = condition.name, condition.low, condition.high
    return Option(name, float, HELP[name], min(max(DEFAULTS[name], low), high), (low, high))


@dataclass(frozen=True, eq=False)
class Script:
    """A prompt as data: ids of phonemes, the value of each condition (None: unknown), and the codes of the
    audio to continue [P, 9]."""

    ids: tuple[int, ...]
    conditions: dict[str, tuple[float, ...] | None]
    codes: Tensor
    num_text: int  # ids of the text to speak

    def keys(self, is_conditional: bool) -> tuple[int, ...]:
        """Return a key for each position of the prefix: of the phonemes, which both lanes share, and of the
        conditions."""
        known = self.conditions if is_conditional else dict.fromkeys(self.conditions)
        return (*self.ids, *(prefix_key(name, values) for name, values in known.items()))


class PromptWriter:
    """Request -> Script. Raises RequestError. A reference is encoded last, when all else is known to be
    right."""

    def __init__(self, config: Config, phonemize: Phonemizer, cloner: Cloner):
        self.config, self.phonemize, self.cloner = config, phonemize, cloner

    def __call__(self, request: Request, values: Mapping[str, Any], said: Said | None = None) -> Script:
        """values: the options, from `zoo.check.check`. said: what was spoken before in a voice that this text
        goes on in."""
        language = espeak_name(request)
        given: dict[str, tuple[float, ...]] = {LANGUAGE: (float(LANGUAGES.index(language)),)}
        given |= {name: _values_of(name, values) for name in LEFT if not values[f"unconditional_{name}"]}
        alone = self.phonemize(request.text, language)
        if len(alone) > MAX_POSITIONS:
            raise RequestError(
                "text", f"text has {len(alone)} phonemes; the model reads {MAX_POSITIONS} positions in all"
            )
        before, codes = "", torch.empty(0, BOOKS, dtype=torch.int64)
        if request.references:
            [reference] = request.references
            encoded = self.cloner(reference.clip)
            given[SPEAKER] = tuple(encoded.voice.tolist())
            if not values[SOUND_ONLY] and (reference.transcript or "").strip(BLANK):
                before, codes = reference.transcript or "", encoded.codes
        elif said is not None:
            before, codes = said.text, said.frames
        if values[SILENCE_FIRST] and len(codes) == 0:
            codes = self.cloner.silence()
        ids = self.phonemize(f"{before.strip(BLANK)} {request.text}", language) if before else alone
        names = (condition.name for condition in self.config.conditions if condition.name != ESPEAK)
        return Script(ids, {name: given.get(name) for name in names}, codes, len(alone))


def _values_of(name: str, values: Mapping[str, Any]) -> tuple[float, ...]:
    """Return a condition's values: of "emotion", the weights of the emotions with a sum of 1. Raises
    RequestError if all of them are zero."""
    if name != "emotion":
        return (values[name],)
    weights = torch.tensor([values[f"emotion_{name}"] for name in EMOTIONS])
    if not weights.sum() > 0:
        raise RequestError("emotion_neutral", "all emotions are 0; set one above 0, or unconditional_emotion")
    return tuple((weights / weights.sum()).tolist())
