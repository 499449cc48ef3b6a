"""From a request to what the language model reads before the first patch.

Every position is a text row or the row of an audio patch. R and C are patches of references, encoded with
padding after and before them:

    plain, or a described voice             (description)text…  start
    a reference without a transcript        ref_start  R…  ref_end  (description)text…  start
    a reference with one, to go on from     transcript text…  start  C…
    both                                    ref_start  R…  ref_end  transcript text…  start  C…

There is neither a beginning- nor an end-of-sequence token. Transcript and text are one string, joined as they
are given. The first generation was made for plain texts and for references with their transcripts.
Source: OpenBMB/VoxCPM, model/voxcpm2.py, _generate_with_prompt_cache; core.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zoo.contract import Said
from zoo.nn.json_files import read_json
from zoo.request import BLANK, Option, Reference, Request, RequestError
from zoo.voxcpm2.clone import Cloner, EncodedReference
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.latent import MAX_STEPS

AUDIO_START, REFERENCE_START, REFERENCE_END = (
    101,
    103,
    104,
)  # by number: the published files disagree about the last two's spelling
AUDIO = -1  # in a script: the next patch of its reference
VOICE = "default"  # a voice of its own choice; OpenAI's clients must name one
PIECE_S = 60.0  # its makers advise less than two minutes a call, and its users hear a drift before
MIN_STEPS = 2  # one step would return the noise
GUIDANCE = 2.0
HINTS = {
    "voice": "describe one in instructions, or give a reference",
    "language": "it hears the language from the text",
    "instructions": "VoxCPM2 does",
    "temperature": "it draws no tokens",
}
OPTIONS = (
    Option("cfg_scale", float, "how far guidance goes; 1 is the model unguided", GUIDANCE, (0, 100)),
    Option("solver_steps", int, "in how many steps noise becomes a frame", MAX_STEPS, (MIN_STEPS, MAX_STEPS)),
    Option("x_vector_only_mode", bool, "take the sound of the voice alone from the reference", False),
)
POSSIBLE_TOGETHER = (
    "one without (for the voice) and one with a transcript (to go on from) are possible together"
)
_HAN = re.compile("[\u4e00-\u9fff]{2,}")


class TextTokenizer:
    """BPE with byte fallback. Chinese words are taken apart, as the model was trained: it knows characters.

    Special tokens are never read out of a user's text: `<|audio_start|>` there is ordinary text. The
    tokenizer is read as it stands in its file, which puts a space before every text. The reference reads it
    through transformers, which from release 5 on rebuilds it on the way: a text that begins with a space then
    gets no other, and so it is here.
    """

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        description = read_json(path) | {
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(description))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self._vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        if (unknown := description.get("model", {}).get("unk_token")) not in self._vocabulary:
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
    """A prompt as ids: text ids, and AUDIO where the next patch of the references stands."""

    ids: tuple[int, ...]
    text_tokens: int  # of the text that is to be said, with its description
    references: tuple[EncodedReference, ...]  # in the order in which their patches stand

    @property
    def continues(self) -> bool:
        """Whether speech goes on from the last patch of the last reference."""
        return self.ids[-1] == AUDIO


class PromptWriter:
    """Request -> Script. Raises RequestError for what a user got wrong. References are encoded last, when all
    else is known to be right."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        self.config = config
        self.tokenize = TextTokenizer(directory)
        self.cloner = cloner
        if (max_id := max(self.tokenize.max_id, REFERENCE_END)) >= config.vocab:
            rows = f"the model has {config.vocab} text rows"
            raise ValueError(f"{directory / 'tokenizer.json'} has ids up to {max_id}, but {rows}")

    def __call__(self, request: Request, values: Mapping[str, Any], voice: Said | None = None) -> Script:
        """values: of the model's options, as `zoo.request.check` gives them. voice: what stands in for a
        reference: its sound alone, where the model was made for that, as a description may be said again
        then."""
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
        """The references whose voice is taken, and those that speech goes on from; at most one of each."""
        is_sound_alone = values["x_vector_only_mode"]
        voices: list[Reference] = []
        continued: list[Reference] = []
        for reference in request.references:
            has_words = bool((reference.transcript or "").strip(BLANK))
            (continued if has_words and not is_sound_alone else voices).append(reference)
        if voices and self.config.is_first_generation:
            needed = "a transcript (what the reference says) is needed"
            raise RequestError("transcript", f"{needed}: {self.config.name} goes on from a reference")
        if is_sound_alone and len(voices) > 1:
            takes = "x_vector_only_mode takes the sound of one reference"
            raise RequestError("x_vector_only_mode", f"{takes}; {len(voices)} are given")
        for which, given in (("have no", voices), ("have a", continued)):
            if len(given) > 1:
                came = f"{len(given)} references {which} transcript"
                raise RequestError("references", f"{came}; {POSSIBLE_TOGETHER}")
        return voices, continued

    def _description(self, request: Request, continues: bool) -> str:
        """The control text: in brackets, and free of brackets itself."""
        words = re.sub("[()\uff08\uff09]", "", _one_line(request.instructions or "")).strip()
        if words and continues:
            either = "leave the transcript out, or them"
            raise RequestError(
                "instructions",
                f"instructions would be read aloud where the reference's words are given: {either}",
            )
        return f"({words})" if words else ""


def _one_line(text: str) -> str:
    """As the reference prepares a text; a transcript it leaves as it is."""
    return re.sub(r"\s+", " ", text)
