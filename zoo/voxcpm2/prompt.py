"""Build the prompt: everything that the language model reads before the first patch.

Every position is a text row or the row of an audio patch. R and C are patches of references. R is padded at
its end, C at its start:

    plain, or a described voice             (description)text…  start
    a reference without a transcript        ref_start  R…  ref_end  (description)text…  start
    a reference with one, to continue       transcript text…  start  C…
    both                                    ref_start  R…  ref_end  transcript text…  start  C…

There is neither a beginning- nor an end-of-sequence token. Transcript and text are one string, concatenated
as given. The first generation supports plain texts and references with transcripts only. Source:
OpenBMB/VoxCPM, model/voxcpm2.py, _generate_with_prompt_cache; core.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.models import BPE

from zoo.contract import Said
from zoo.nn import plain_tokenizer
from zoo.request import BLANK, Option, Reference, Request, RequestError
from zoo.voxcpm2.clone import Cloner, EncodedReference
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.latent import MAX_STEPS

# by number, because the published files spell the last two differently
AUDIO_START, REFERENCE_START, REFERENCE_END = 101, 103, 104
AUDIO = -1  # in a script: the next patch of its references
VOICE = "default"  # the model chooses a voice; OpenAI clients must name one
# OpenBMB advises less than two minutes per call, and users report that the voice drifts earlier
PIECE_S = 60.0
MIN_STEPS = 2  # a single step would return the noise
GUIDANCE = 2.0
HINTS = {
    "voice": "describe one in instructions, or give a reference",
    "language": "the model infers the language from the text",
    "instructions": "use VoxCPM2 for a described voice",
    "temperature": "it samples no tokens",
}
OPTIONS = (
    Option("cfg_scale", float, "guidance strength; 1 turns guidance off", GUIDANCE, (0, 100)),
    Option("solver_steps", int, "solver steps from noise to a frame", MAX_STEPS, (MIN_STEPS, MAX_STEPS)),
    Option("x_vector_only_mode", bool, "use only the reference's voice and ignore its transcript", False),
)
POSSIBLE_TOGETHER = "give at most one without (for the voice) and one with a transcript (to continue)"
_HAN = re.compile("[\u4e00-\u9fff]{2,}")


class TextTokenizer:
    """BPE with byte fallback. Chinese words are split into characters, as in the model's training.

    A user's text never yields special tokens: `<|audio_start|>` there is ordinary text. The tokenizer is
    loaded unchanged from its file, which prepends a space to every text. The reference loads it through
    transformers, whose releases from 5 on rebuild it and prepend no space to a text that begins with one.
    This class does the same.
    """

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        self._tokenizer, _ = plain_tokenizer.read(path)
        self._vocabulary = self._tokenizer.get_vocab()
        model = self._tokenizer.model
        unknown = model.unk_token if isinstance(model, BPE) else None
        if unknown not in self._vocabulary:
            raise ValueError(f"{path} has unk_token {unknown!r}, which is not in its vocabulary")
        self._unknown = self._vocabulary[unknown]
        self.max_id = max(self._vocabulary.values())

    def __call__(self, text: str) -> list[int]:
        encoded = self._tokenizer.encode(text.removeprefix(" "), add_special_tokens=False)
        ids = []
        for token, index in zip(encoded.tokens, encoded.ids, strict=True):
            word = token.replace("▁", "")
            if _HAN.fullmatch(word) and word in self._vocabulary:
                ids += [self._vocabulary.get(character, self._unknown) for character in word]
            else:
                ids.append(index)
        return ids


@dataclass(frozen=True)
class Script:
    """A prompt as ids: text ids, and AUDIO at the position of each reference patch."""

    ids: tuple[int, ...]
    text_tokens: int  # of the text to speak, with its description
    references: tuple[EncodedReference, ...]  # in the order of their patches

    @property
    def continues(self) -> bool:
        """Whether speech continues the last patch of the last reference."""
        return self.ids[-1] == AUDIO


class PromptWriter:
    """Turns a Request into a Script. Raises RequestError for an invalid request.

    References are encoded last, after everything else has been checked.
    """

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        self.config = config
        self.tokenize = TextTokenizer(directory)
        self.cloner = cloner
        if (max_id := max(self.tokenize.max_id, REFERENCE_END)) >= config.vocab:
            rows = f"the model has {config.vocab} text rows"
            raise ValueError(f"{directory / 'tokenizer.json'} has ids up to {max_id}, but {rows}")

    def __call__(self, request: Request, values: Mapping[str, Any], voice: Said | None = None) -> Script:
        """Write the script of a request. values: of the model's options, from `zoo.check.check`.

        voice: earlier speech of the same request, used as the reference. VoxCPM2 takes only its voice, so
        that the description can be given again; the first generation continues it.
        """
        voices, continued = self._roles(request, values)
        goes_on = voice is not None and self.config.is_first_generation
        said = self._description(request, bool(continued)) + _one_line(request.text)
        transcript = "".join(reference.transcript or "" for reference in continued)
        if voice is not None and goes_on:
            transcript = _one_line(voice.text) + " "
        text = [*self.tokenize(transcript + said), AUDIO_START]
        before = [self.cloner(reference.clip, continues=False) for reference in voices]
        after = [self.cloner(reference.clip, continues=True) for reference in continued]
        if voice is not None:
            (after if goes_on else before).append(self.cloner.spoken(voice.frames, goes_on))
        ids: list[int] = []
        for reference in before:
            ids += [REFERENCE_START, *[AUDIO] * len(reference.patches), REFERENCE_END]
        ids += text
        for reference in after:
            ids += [AUDIO] * len(reference.patches)
        return Script(tuple(ids), len(self.tokenize(said)), (*before, *after))

    def _roles(self, request: Request, values: Mapping[str, Any]) -> tuple[list[Reference], list[Reference]]:
        """Return the references that give only their voice and those to continue, at most one of each."""
        is_sound_alone = values["x_vector_only_mode"]
        voices: list[Reference] = []
        continued: list[Reference] = []
        for reference in request.references:
            has_words = bool((reference.transcript or "").strip(BLANK))
            (continued if has_words and not is_sound_alone else voices).append(reference)
        if voices and self.config.is_first_generation:
            needed = "a transcript (what the reference says) is needed"
            raise RequestError("transcript", f"{needed}: {self.config.name} can only continue a reference")
        if is_sound_alone and len(voices) > 1:
            takes = "x_vector_only_mode takes the sound of one reference"
            raise RequestError("x_vector_only_mode", f"{takes}; {len(voices)} are given")
        for which, given in (("have no", voices), ("have a", continued)):
            if len(given) > 1:
                came = f"{len(given)} references {which} transcript"
                raise RequestError("references", f"{came}; {POSSIBLE_TOGETHER}")
        return voices, continued

    def _description(self, request: Request, continues: bool) -> str:
        """Return the instructions in parentheses, with their own parentheses removed, or an empty string."""
        words = re.sub("[()\uff08\uff09]", "", _one_line(request.instructions or "")).strip()
        if words and continues:
            raise RequestError(
                "instructions",
                "the model would read instructions aloud after a transcript; omit one of the two",
            )
        return f"({words})" if words else ""


def _one_line(text: str) -> str:
    """Collapse white space, as the reference does in a text but not in a transcript."""
    return re.sub(r"\s+", " ", text)
