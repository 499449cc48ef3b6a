"""Builds the prompt: the text tokens and the reference's rows of codes (R, one position each) that the LM
reads before the first frame.

    zero-shot                 <|tts|>                                               <|text|> text… <|audio|>
    reference                 <|tts|>                           <|ref_audio|> R…    <|text|> text… <|audio|>
    reference, transcript     <|tts|> <|ref_text|> transcript…  <|ref_audio|> R…    <|text|> text… <|audio|>

The prompt has no chat template, no system prompt, and no token at the end of the reference. The hidden state
at <|audio|> gives the first codes.
Source: sgl-project/sglang-omni 0.1.9, models/higgs_tts/text_tokenizer.py. vllm-omni 0.30.0,
higgs_audio_v3_tokenizer.py, has the same layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.contract import Said
from zoo.higgs_v3.clone import Cloner, EncodedReference
from zoo.higgs_v3.config import Config
from zoo.higgs_v3.vocabulary import CONTROL_TAGS
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.request import Option, Request, RequestError, sampling_options

ROW = -1  # stands for a row of the reference
STRUCTURE = ("<|tts|>", "<|ref_text|>", "<|ref_audio|>", "<|text|>", "<|audio|>")
_TAG = re.compile("(" + "|".join(re.escape(tag) for tag in CONTROL_TAGS) + ")")
# Users of the model send 300 to 500 characters at a time. A pass holds at most 80 s.
PIECE_S = 30.0
# tags at the start apply to the whole text, but a pause does not
LEAD = r"(?:\s*<\|(?:emotion|style|prosody):(?!(?:long_)?pause\|)[^|<>]*\|>)+"
VOICE = "default"  # a random voice; OpenAI's clients must name one
# The defaults of sglang-omni 0.1.9 for speech requests; the checkpoint has none.
TEMPERATURE, TOP_K, TOP_P = 0.8, 30, 0.8
OPTIONS = (
    *sampling_options(TEMPERATURE, TOP_K, TOP_P),
    Option(
        "x_vector_only_mode", bool, "clone only the voice of the reference, without its transcript", False
    ),
)
HINTS = {
    "voice": "or give a reference",
    "language": "it infers the language from the text",
    "instructions": "use control tags in the text, such as <|emotion:awe|>",
}


class TextTokenizer(PlainTokenizer):
    """The checkpoint's byte-level BPE. In a user's text it recognizes only the documented control tags. Any
    other special token there is tokenized as ordinary text and cannot change the prompt's structure."""

    def __init__(self, directory: Path, rows: int):
        super().__init__(directory / "tokenizer.json", (*STRUCTURE, *CONTROL_TAGS), rows, "Higgs Audio V3")

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(_TAG.split(text)):  # text and tags alternate
            ids += [self.special[part]] if i % 2 else super().__call__(part)
        return ids


@dataclass(frozen=True)
class Script:
    """A prompt as ids: text ids, and ROW for each row of the reference. keys are the Prompt.prefix_keys."""

    ids: tuple[int, ...]
    keys: tuple[int, ...]
    text_tokens: int
    reference: EncodedReference | None


class PromptWriter:
    """Turns a Request into a Script. Raises ValueError for a mistake in the request. A reference is encoded
    last, after everything else has been checked."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        self.cloner = cloner
        self.max_tokens = config.max_positions
        self.tokenize = TextTokenizer(directory, config.text_vocab)

    def __call__(self, request: Request, values: Mapping[str, Any], said: Said | None = None) -> Script:
        """Return the request's prompt. values: the model's options, from `zoo.check.check`. said: earlier
        speech of the same voice, which takes the place of a reference."""
        text = self._tokens("text", request.text)
        if not text:
            raise RequestError("text", "text is empty")
        transcript, reference = [], None
        if request.references:
            given = request.references[0]
            if not values["x_vector_only_mode"]:
                transcript = self._tokens("transcript", given.transcript or "")
            reference = self.cloner(given.clip)
        elif said is not None:
            transcript = self._tokens("text", _TAG.sub("", said.text))
            reference = self.cloner.rows(said.frames)

        special = self.tokenize.special
        ids, keys = [special["<|tts|>"]], []
        if reference is not None:
            if transcript:
                ids += [special["<|ref_text|>"], *transcript]
            ids.append(special["<|ref_audio|>"])
            keys = [*ids, *reference.keys]
            ids += [ROW] * len(reference.keys)
        tail = [special["<|text|>"], *text, special["<|audio|>"]]
        return Script(tuple(ids + tail), tuple((keys or ids) + tail), len(text), reference)

    def _tokens(self, param: str, text: str) -> list[int]:
        tokens = self.tokenize(text.strip())
        if len(tokens) > self.max_tokens:
            raise RequestError(
                param,
                f"{param} has {len(tokens)} tokens; the model reads at most {self.max_tokens} positions",
            )
        return tokens
