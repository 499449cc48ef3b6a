"""The prompt of a request: the positions that the backbone reads before the first frame.

    segment     <begin> "[speaker]text" <end>  frames of its audio...  one frame of zeros
    new text    <begin> "[speaker]text" <end>                          the next position gives the first frame

A request's context is its segments, in order: first those of its conversation, or else its references or the
recording of its voice; then its turns. Nothing separates them. The label and the text are tokenized as one
string, and nothing is stripped. Source: SesameAILabs/csm at 2d72082, generator.py; transformers 5.23,
models/csm/processing_csm.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.contract import Said
from zoo.csm.clone import Cloner
from zoo.csm.config import Config
from zoo.csm.voices import RANDOM
from zoo.nn.keys import prefix_key
from zoo.nn.llama_vocabulary import BEGIN, END
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.request import BLANK, Option, Reference, Request, RequestError, Turn, sampling_options

PIECE_S = 20.0
MAX_SPEAKER = 999
TEMPERATURE, TOP_K, TOP_P = 0.9, 50, 1.0  # for all codebooks; the defaults of both implementations
OPTIONS = (
    *sampling_options(TEMPERATURE, TOP_K, TOP_P),
    Option("speaker", int, "which speaker of the conversation says the text", 0, (0, MAX_SPEAKER)),
    Option(
        "stops_early",
        bool,
        "stop as transformers does, at a frame whose codes are zero except perhaps the last one",
        False,
    ),
)
HINTS = {
    "voice": "for another voice, give a reference; without a voice it speaks in a random one",
    "language": "it was trained on English",
    "instructions": "the voice and its mood follow from the references",
}
DIGITS = re.compile(r"[0-9]{1,3}")


@dataclass(frozen=True)
class Script:
    """A prompt in parts: text ids [T], and codes [F, K] of a segment with its frame of zeros."""

    parts: tuple[Tensor, ...]
    text_tokens: int

    @property
    def keys(self) -> tuple[int, ...]:
        """Return the Prompt.prefix_keys: a text's ids, and a hash of each frame's codes."""
        return tuple(key for part in self.parts for key in keys(part))


def keys(part: Tensor) -> list[int]:
    return part.tolist() if part.dim() == 1 else [prefix_key(*frame) for frame in part.tolist()]


class PromptWriter:
    """Turns a Request into a Script. Raises RequestError. Clips are encoded last, after everything else has
    been checked."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner, voices: Mapping[str, Reference]):
        path = directory / "tokenizer.json"
        self.tokenize = PlainTokenizer(path, (BEGIN, END), config.text_vocab, "Llama 3")
        self.max_tokens = config.max_positions
        self.codebooks = config.codebooks
        self.cloner, self.voices = cloner, voices

    def __call__(
        self,
        request: Request,
        values: Mapping[str, Any],
        said: Said | None = None,
        has_context: bool = False,
    ) -> Script:
        """Return the request's prompt. values: the model's options, from `zoo.check.check`. said: earlier
        speech of the same voice, which takes the place of a reference. has_context: the conversation's
        earlier segments come first, so the references are among them."""
        speaker = values["speaker"]
        text = self._text(speaker, request.text, "text")
        references = () if has_context else self._references(request, speaker)
        told = [(_speaker(reference.speaker), reference.transcript or "") for reference in references]
        told += [_told(turn, speaker) for turn in request.turns]
        texts = [self._text(*who_and_what, "transcript") for who_and_what in told]
        clips = [*(reference.clip for reference in references), *(turn.clip for turn in request.turns)]
        parts: list[Tensor] = []
        if said is not None and not references:
            parts += [self._text(speaker, said.text, "text"), self.closed(said.frames)]
        for before, clip in zip(texts, clips, strict=True):
            assert clip is not None, "_told refuses a turn without a clip"
            parts += [before, self.closed(self.cloner(clip))]
        return Script((*parts, text), len(text) - 2)  # without its begin and end

    def _references(self, request: Request, speaker: int) -> tuple[Reference, ...]:
        """Return the request's references, or the recording of its voice as a segment of its speaker."""
        voice = self.voices.get((request.voice or RANDOM).lower())
        return request.references if voice is None else (replace(voice, speaker=str(speaker)),)

    def closed(self, codes: Tensor) -> Tensor:
        """Return a segment's codes [F, K] with the frame of zeros that ends it."""
        return torch.cat((codes.long(), torch.zeros(1, self.codebooks, dtype=torch.int64)))

    def _text(self, speaker: int, text: str, param: str) -> Tensor:
        """Return the ids [T] of a segment's text."""
        tokens = self.tokenize(f"[{speaker}]{text}")
        if len(tokens) > self.max_tokens:
            has = f"{param} has {len(tokens)} tokens"
            raise RequestError(param, f"{has}; the model has {self.max_tokens} positions in all")
        return torch.tensor([self.tokenize.special[BEGIN], *tokens, self.tokenize.special[END]])


def _speaker(name: str | None) -> int:
    """Return a reference's speaker. Raises RequestError for a name that is not a number."""
    if name is None:
        return 0
    if not DIGITS.fullmatch(name):
        possible = f"speakers are numbers from 0 to {MAX_SPEAKER}"
        raise RequestError("references", f"a reference has the speaker {name!r}; {possible}")
    return int(name)


def _told(turn: Turn, speaker: int) -> tuple[int, str]:
    """Return a turn's speaker and text. The assistant is the speaker of the request, and the user another
    one. A role can also be a speaker's number. Raises RequestError."""
    if turn.clip is None or not (turn.text or "").strip(BLANK):
        raise RequestError("turns", "a turn of CSM needs a text and a clip: it reads both")
    roles = {"assistant": speaker, "user": 1 if speaker == 0 else 0}
    if turn.role in roles:
        return roles[turn.role], turn.text or ""
    if not DIGITS.fullmatch(turn.role):
        possible = f"user, assistant, or a speaker's number from 0 to {MAX_SPEAKER}"
        raise RequestError("turns", f"a turn has the role {turn.role!r}; possible: {possible}")
    return int(turn.role), turn.text or ""
