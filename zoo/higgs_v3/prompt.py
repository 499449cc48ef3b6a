"""From a request to what the LM reads before the first frame: text tokens, and a reference's rows of codes (R, one position each).

    zero-shot                 <|tts|>                                               <|text|> text… <|audio|>
    reference                 <|tts|>                           <|ref_audio|> R…    <|text|> text… <|audio|>
    reference, transcript     <|tts|> <|ref_text|> transcript…  <|ref_audio|> R…    <|text|> text… <|audio|>

There is no chat template, no system prompt and no token that ends the reference. The hidden state at <|audio|> gives the first codes.
Source: sgl-project/sglang-omni 0.1.9, models/higgs_tts/text_tokenizer.py; vllm-omni 0.30.0, higgs_audio_v3_tokenizer.py, says the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from zoo.contract import Request, refuse
from zoo.higgs_v3.clone import Cloner, Reference
from zoo.higgs_v3.config import Config
from zoo.higgs_v3.vocabulary import CONTROL_TAGS
from zoo.nn.checkpoint import read_json

ROW = -1  # stands for a row of the reference
STRUCTURE = ("<|tts|>", "<|ref_text|>", "<|ref_audio|>", "<|text|>", "<|audio|>")
_TAG = re.compile("(" + "|".join(re.escape(tag) for tag in CONTROL_TAGS) + ")")
VOICE = "default"  # a voice by chance; OpenAI's clients must name one
# Fields of a request that this model has no use for, and what it has instead.
UNUSED = {
    "instructions": "control tags in the text, such as <|emotion:awe|>, say how to speak",
    "depth_temperature": "temperature rules all codes",
    "depth_top_k": "top_k rules all codes",
    "depth_top_p": "top_p rules all codes",
    "guidance": "it has no lane to be guided away from",
    "solver_steps": "its codes are drawn, not solved",
}


class TextTokenizer:
    """The checkpoint's byte-level BPE. Of its added tokens, a user's text may hold the documented control tags alone: whatever else looks
    like a special token there is ordinary text, and cannot change the prompt's structure."""

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        content = read_json(path)
        self.special = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        missing = [token for token in (*STRUCTURE, *CONTROL_TAGS) if token not in self.special]
        if missing:
            raise ValueError(f"{path} lacks tokens of Higgs Audio V3: {', '.join(missing[:8])}")
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "post_processor": None}))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(_TAG.split(text)):  # text and tags in turn
            ids += [self.special[part]] if i % 2 else self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class Script:
    """A prompt as ids: text ids, and ROW where the reference's rows stand. keys: as in zoo.contract.Prompt."""

    ids: tuple[int, ...]
    keys: tuple[int, ...]
    text_tokens: int
    reference: Reference | None


class PromptWriter:
    """Request -> Script. Raises ValueError for what a user got wrong. A reference is encoded last, when all else is known to be right."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        self.cloner = cloner
        self.max_tokens = config.max_positions
        self.tokenize = TextTokenizer(directory)
        if (most := max(self.tokenize.special.values())) >= config.text_vocab:
            raise ValueError(f"{directory / 'tokenizer.json'} has ids up to {most}, but the model has {config.text_vocab} text rows")

    def __call__(self, request: Request) -> Script:
        for param, instead in UNUSED.items():
            if getattr(request, param) is not None:
                raise refuse(param, f"Higgs Audio V3 takes no {param}: {instead}")
        if (request.voice or VOICE).lower() != VOICE:
            raise refuse("voice", f"voice {request.voice!r} is not in this checkpoint; it has: {VOICE} (by chance), or give a reference")
        if request.language not in (None, "auto"):
            raise refuse(
                "language", f"language {request.language!r} cannot be chosen: Higgs Audio V3 hears it from the text; possible: auto"
            )
        if request.repetition_penalty not in (None, 1.0):
            raise refuse("repetition_penalty", f"repetition_penalty is {request.repetition_penalty:g}; Higgs Audio V3 has none, which is 1")
        if request.layout not in (None, "whole"):
            raise refuse(
                "layout", f"layout {request.layout!r} is not possible: Higgs Audio V3 reads all of the text first; possible: whole"
            )
        text = self._tokens("text", request.text)
        if not text:
            raise refuse("text", "text is empty")
        for param in ("reference_text", "x_vector_only"):
            if request.reference is None and getattr(request, param):
                raise refuse(param, f"{param} is about a reference, and there is none")
        transcript = [] if request.x_vector_only else self._tokens("reference_text", request.reference_text or "")
        reference = None if request.reference is None else self.cloner(request.reference)

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
            raise refuse(param, f"{param} has {len(tokens)} tokens; the model reads {self.max_tokens} positions in all")
        return tokens
