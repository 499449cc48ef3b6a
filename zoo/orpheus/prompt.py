"""From a request to the ids that the LM reads before the first token.

    voice    <human> <begin> "tara: text"  <end of text> <end of human> <AI> <speech>
    pair     <human> <begin> "transcript"  <end of text> <end of human> <AI> <speech> codes... <end of speech> <end of AI>

A request with references begins with a pair for each; only pretrained checkpoints know how to go on from
them. A text without a voice is the same without "tara: ". Nothing is stripped from the text. Source:
canopyai/Orpheus-TTS at 835ac7c, orpheus_tts/engine_class.py; mlx-audio 0.6.2, tts/models/llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zoo.contract import Said
from zoo.hub import published_name
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.orpheus.clone import Cloner
from zoo.orpheus.config import NO_VOICE, Config
from zoo.orpheus.tokens import (
    BEGIN_AI,
    BEGIN_HUMAN,
    BEGIN_SPEECH,
    BEGIN_TEXT,
    CUSTOM,
    END_AI,
    END_HUMAN,
    END_SPEECH,
    END_TEXT,
    PLACES,
    code_id,
)
from zoo.request import Option, Request, RequestError, sampling_options

PIECE_S = 20.0  # longer texts degrade (the original's issues): they are split by sentence
# By what the directory's or the repository's name holds; nothing inside a checkpoint says its language.
VOICES = {
    "fr": ("pierre", "amelie", "marie"),
    "de": ("jana", "thomas", "max"),
    "es_it": ("javi", "sergio", "maria", "pietro", "giulia", "carlo"),
    "ko": ("유나", "준서"),
    "hi": ("ऋतिका",),
    "zh": ("长乐", "白芷"),
    "en": ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe"),
}
TEMPERATURE, TOP_K, TOP_P, PENALTY = 0.6, 0, 0.8, 1.3  # orpheus-speech 0.1.0
OPTIONS = (
    *sampling_options(TEMPERATURE, TOP_K, TOP_P, PENALTY),
    Option(
        "valid_only",
        bool,
        "draw only tokens that are valid at their place in the frame: the model cannot slip; changes the distribution",
        False,
    ),
)
HINTS = {
    "language": "each checkpoint speaks the language that it was trained on",
    "instructions": "tags in the text, such as <laugh> or <sigh>, say how to speak",
    "references": "only the pretrained checkpoints clone; their directory has 'pretrain' in its name",
}


@dataclass(frozen=True)
class Script:
    """A prompt as ids, and how many of them are the request's text."""

    ids: tuple[int, ...]
    text_tokens: int


class PromptWriter:
    """Request -> Script. Raises RequestError. References are encoded last, when all else is known to be
    right."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        self.max_tokens = config.max_positions
        self.num_words = config.num_words
        path = directory / "tokenizer.json"
        self.tokenize = PlainTokenizer(path, ("<custom_token_0>",), config.vocabulary, "Orpheus")
        expected = config.num_words + CUSTOM
        if (found := self.tokenize.special["<custom_token_0>"]) != expected:
            raise ValueError(
                f"{path} has <custom_token_0> at {found}, not {expected}: this Llama is not Orpheus"
            )
        self.cloner = cloner
        self.voices = {name.lower(): name for name in voices_of(config, directory)}

    def __call__(self, request: Request, said: Said | None = None) -> Script:
        """said: what was spoken before in a voice that this text goes on in."""
        voice = (request.voice or NO_VOICE).lower()
        text = request.text if voice == NO_VOICE else f"{self.voices[voice]}: {request.text}"
        tokens = self._tokens("text", text)
        ids: list[int] = []
        for reference in request.references:
            transcript = self._tokens("transcript", reference.transcript or "")
            ids += self._pair(transcript, self.cloner(reference.clip))
        if said is not None and not request.references:
            ids += self._pair(self._tokens("text", said.text), said.frames)
        return Script((*ids, *self._human(tokens)), len(tokens))

    def _tokens(self, param: str, text: str) -> list[int]:
        tokens = self.tokenize(text)
        if len(tokens) > self.max_tokens:
            raise RequestError(
                param, f"{param} has {len(tokens)} tokens; the model reads {self.max_tokens} positions in all"
            )
        return tokens

    def _human(self, tokens: list[int]) -> list[int]:
        before = self._marked(BEGIN_HUMAN, BEGIN_TEXT)
        return [*before, *tokens, *self._marked(END_TEXT, END_HUMAN, BEGIN_AI, BEGIN_SPEECH)]

    def _pair(self, tokens: list[int], codes: Tensor) -> list[int]:
        """codes [F, 7]"""
        spoken = [
            code_id(place, code)
            for frame in codes.tolist()
            for place, code in zip(range(PLACES), frame, strict=True)
        ]
        return [*self._human(tokens), *self._marked(*spoken, END_SPEECH, END_AI)]

    def _marked(self, *marks: int) -> list[int]:
        """Return the ids of special tokens and codes, which tokens.py counts from the first one behind the
        words."""
        return [self.num_words + mark for mark in marks]


def is_pretrained(config: Config, directory: Path) -> bool:
    """Return whether a checkpoint clones and has no voices: by its published name, unless it lists voices."""
    return config.voices is None and "pretrain" in published_name(directory).lower()


def voices_of(config: Config, directory: Path) -> tuple[str, ...]:
    """Return the voices of a checkpoint: those that it lists, or those of the language in its published
    name."""
    if config.voices is not None:
        return config.voices
    if is_pretrained(config, directory):
        return ()
    name = published_name(directory).lower()
    parts = name.replace("-", "_").split("_")
    for language, voices in VOICES.items():
        if language in parts or (language == "es_it" and "es_it" in name):
            return voices
    return VOICES["en"]
