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
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from zoo.contract import Request, refuse
from zoo.nn.checkpoint import read_json
from zoo.voxcpm2.clone import Cloner, Reference
from zoo.voxcpm2.config import Config
from zoo.voxcpm2.latent import MOST_STEPS

AUDIO_START, REFERENCE_START, REFERENCE_END = 101, 103, 104  # by number: the published files disagree about the last two's spelling
AUDIO = -1  # in a script: the next patch of its reference
VOICE = "default"  # a voice of its own choice; OpenAI's clients must name one
LEAST_STEPS = 2  # one step would return the noise
UNUSED = ("temperature", "top_k", "top_p", "repetition_penalty", "depth_temperature", "depth_top_k", "depth_top_p")
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
    reference: Reference | None

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

    def __call__(self, request: Request) -> Script:
        self._refuse_unused(request)
        text = _one_line(request.text)
        if not text.strip():
            raise refuse("text", "text is empty")
        transcript = self._transcript(request)
        description = self._description(request, transcript)
        said = (description + text).lstrip()
        num_said = len(self.tokenize(said))
        ids = [*self.tokenize((transcript + text).lstrip() if transcript else said), AUDIO_START]
        if request.reference is None:
            return Script(tuple(ids), num_said, None)
        reference = self.cloner(request.reference, continues=bool(transcript))
        patches = [AUDIO] * len(reference.patches)
        ids = [*ids, *patches] if transcript else [REFERENCE_START, *patches, REFERENCE_END, *ids]
        return Script(tuple(ids), num_said, reference)

    def _refuse_unused(self, request: Request) -> None:
        for param in UNUSED:
            if getattr(request, param) is not None:
                raise refuse(param, f"{self.config.name} takes no {param}: it draws no tokens; guidance and solver_steps are what it takes")
        if (request.voice or VOICE).lower() != VOICE:
            raise refuse("voice", f"voice {request.voice!r} is not in this checkpoint; it has: {VOICE} (describe one, or give a reference)")
        if (request.language or "auto").lower() != "auto":
            raise refuse("language", f"{self.config.name} takes no language ({request.language!r}): it hears it from the text")
        if request.layout not in (None, "whole"):
            raise refuse("layout", f"layout {request.layout!r} is not possible; possible: whole")
        if request.solver_steps is not None and not LEAST_STEPS <= request.solver_steps <= MOST_STEPS:
            raise refuse("solver_steps", f"solver_steps is {request.solver_steps}; from {LEAST_STEPS} to {MOST_STEPS} is possible")

    def _transcript(self, request: Request) -> str:
        """What the reference says, where speech is to go on from it; else empty."""
        if request.reference is None:
            for param in ("reference_text", "x_vector_only"):
                if getattr(request, param):
                    raise refuse(param, f"{param} is about a reference, and there is none")
        transcript = "" if request.x_vector_only else _one_line(request.reference_text or "").strip()
        if request.reference is not None and not transcript and self.config.adds:
            raise refuse(
                "reference_text", f"reference_text (what the reference says) is needed: {self.config.name} goes on from a reference"
            )
        return transcript

    def _description(self, request: Request, transcript: str) -> str:
        """The control text: in brackets, and free of brackets itself."""
        words = re.sub("[()\uff08\uff09]", "", _one_line(request.instructions or "")).strip()
        if words and self.config.adds:
            raise refuse("instructions", f"{self.config.name} takes no instructions; VoxCPM2 does")
        if words and transcript:
            raise refuse(
                "instructions", "instructions would be read aloud where the reference's words are given: leave reference_text out, or them"
            )
        return f"({words})" if words else ""


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
