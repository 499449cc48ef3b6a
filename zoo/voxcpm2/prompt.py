"""From a request to what the language model reads before the first patch.

Every position is a text row or the row of an audio patch. R and C are the reference's patches, encoded with padding after and before it:

    plain, or a described voice    (description)text…  start
    reference alone                ref_start  R…  ref_end  (description)text…  start
    reference with its transcript  transcript text…  start  C…

There is neither a beginning- nor an end-of-sequence token. Transcript and text are one string, as if said in one breath. The first
generation was made for plain texts and for references with their transcripts.
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

from zoo.nn.json_files import read_json
from zoo.request import Option, Request, RequestError
from zoo.voxcpm2.clone import Cloner, EncodedReference
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.latent import MAX_STEPS

AUDIO_START, REFERENCE_START, REFERENCE_END = 101, 103, 104  # by number: the published files disagree about the last two's spelling
AUDIO = -1  # in a script: the next patch of its reference
VOICE = "default"  # a voice of its own choice; OpenAI's clients must name one
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
_HAN = re.compile("[\u4e00-\u9fff]{2,}")


class TextTokenizer:
    """BPE with byte fallback. Chinese words are taken apart, as the model was trained: it knows characters.

    Special tokens are never read out of a user's text: `<|audio_start|>` there is ordinary text. The tokenizer is read as it stands in its
    file: from release 5 on, transformers rebuilds it on the way, and then spaces at the start and after special tokens count otherwise.
    """

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        description = read_json(path) | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
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
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
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
    """A prompt as ids: text ids, and AUDIO where the next patch of the reference stands."""

    ids: tuple[int, ...]
    text_tokens: int  # of the text that is to be said, with its description
    reference: EncodedReference | None

    @property
    def continues(self) -> bool:
        """Whether speech goes on from the reference's last patch."""
        return self.ids[-1] == AUDIO


class PromptWriter:
    """Request -> Script. Raises ValueError for what a user got wrong. A reference is encoded last, when all else is known to be right."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        self.config = config
        self.tokenize = TextTokenizer(directory)
        self.cloner = cloner
        if (max_id := max(self.tokenize.max_id, REFERENCE_END)) >= config.vocab:
            rows = f"the model has {config.vocab} text rows"
            raise ValueError(f"{directory / 'tokenizer.json'} has ids up to {max_id}, but {rows}")

    def __call__(self, request: Request, values: Mapping[str, Any]) -> Script:
        """values: of the model's options, as `zoo.request.check` gives them."""
        text = _one_line(request.text)
        transcript = self._transcript(request, values)
        description = self._description(request, transcript)
        said = (description + text).lstrip()
        num_said = len(self.tokenize(said))
        ids = [*self.tokenize((transcript + text).lstrip() if transcript else said), AUDIO_START]
        if not request.references:
            return Script(tuple(ids), num_said, None)
        reference = self.cloner(request.references[0].clip, continues=bool(transcript))
        patches = [AUDIO] * len(reference.patches)
        ids = [*ids, *patches] if transcript else [REFERENCE_START, *patches, REFERENCE_END, *ids]
        return Script(tuple(ids), num_said, reference)

    def _transcript(self, request: Request, values: Mapping[str, Any]) -> str:
        """What the reference says, where speech is to go on from it; else empty."""
        if not request.references:
            return ""
        transcript = "" if values["x_vector_only_mode"] else _one_line(request.references[0].transcript or "").strip()
        if not transcript and self.config.is_first_generation:
            needed = f"a transcript (what the reference says) is needed: {self.config.name} goes on from a reference"
            raise RequestError("transcript", needed)
        return transcript

    def _description(self, request: Request, transcript: str) -> str:
        """The control text: in brackets, and free of brackets itself."""
        words = re.sub("[()\uff08\uff09]", "", _one_line(request.instructions or "")).strip()
        if words and transcript:
            either = "leave the transcript out, or them"
            raise RequestError("instructions", f"instructions would be read aloud where the reference's words are given: {either}")
        return f"({words})" if words else ""


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
