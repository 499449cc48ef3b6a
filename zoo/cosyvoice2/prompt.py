"""Build the prompt: everything that the language model reads before the first code.

    sos  transcript…  text…  task  codes of the prompt…       zero-shot: a voice with its transcript
    sos  instruction… <|endofprompt|>  text…  task            instruct
    sos  text…  task                                          cross-lingual, or a voice without a prompt

Text and codes can also be interleaved (order.py), without instructions. The flow reads the prompt in every
mode. Source: FunAudioLLM/CosyVoice, cosyvoice/llm/llm.py, Qwen2LM.inference; cosyvoice/cli/frontend.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zoo.cosyvoice2.config import MAX_RAS_WINDOW, Config, LMConfig
from zoo.request import Option, Request, RequestError, sampling_options
from zoo.text.byte_level import read_qwen

MAX_TEXT_TOKENS = 4096
PIECE_S = 20.0  # about the 80 Chinese characters or English tokens at which the reference splits a text
MIN_CODES_PER_TOKEN, MAX_CODES_PER_TOKEN = 2, 20  # per token of the text to speak

# Tokens that the reference adds to the vocabulary, in this order, after the words of vocab.json.
BASE = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_PROMPT = "<|endofprompt|>"
_TAGS = """
[breath] <strong> </strong> [noise] [laughter] [cough] [clucking] [accent] [quick_breath] <laughter>
</laughter> [hissing] [sigh]
[vocalized-noise] [lipsmack] [mn]
"""
TAGS = tuple(_TAGS.split())  # special tokens that are allowed in a text
SPECIAL = (*BASE, END_OF_PROMPT, *TAGS)
_TAG = re.compile("(" + "|".join(re.escape(tag) for tag in TAGS) + ")")

# A piece of a long text may end with a comma, and a quotation behind its own mark.
ENDS = (*".?!;:", *"。？！；：、", *",，", *'"”')  # noqa: RUF001 (wide forms)
CHINESE = re.compile("[\u4e00-\u9fff]")

HINTS = {
    "language": "the model infers it from the text; use instructions for dialects and styles",
    "voice": "give a reference to clone",
}


def options(config: Config) -> tuple[Option, ...]:
    s = config.sampling
    mode = "full: the model reads all of the text first; interleaved: 5 text tokens, then 15 codes"
    return (
        *sampling_options(1.0, s.top_k, s.top_p),
        Option(
            "ras_win_size",
            int,
            "number of last codes that are checked for repetition; 0 turns the check off",
            s.win_size,
            (0, MAX_RAS_WINDOW),
        ),
        Option(
            "ras_tau_r", float, "share of these codes at which a code counts as repeated", s.tau_r, (0, 1)
        ),
        Option(
            "text_mode",
            str,
            f"{mode}; the default is full, or interleaved if text arrives during speech",
            choices=("full", "interleaved"),
        ),
    )


def ended(text: str) -> str:
    """Return a text that ends like a sentence, as the reference's front end does for texts that are known as a
    whole. It leaves texts with tokens such as <|endofprompt|> as they are."""
    if not text or text.endswith(ENDS) or ("<|" in text and "|>" in text):
        return text
    return text + ("。" if CHINESE.search(text) else ".")


class TextTokenizer:
    """Byte-level BPE with Qwen2's split, from the vocabulary and merges in the model directory.

    The directory has fewer merges than Qwen2, so that Chinese is read character by character. The only
    special tokens in a text are the TAGS; all others are read as ordinary text.
    """

    def __init__(self, directory: Path):
        self._tokenizer = read_qwen(directory)
        first = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.special = {token: first + i for i, token in enumerate(SPECIAL)}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _TAG.split(text):
            if piece in TAGS:
                ids.append(self.special[piece])
            else:
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class Script:
    """The text that the language model reads, as ids.

    before: the transcript or the instructions; text: the text to speak; has_codes: whether the model reads
    the codes of the prompt too; is_interleaved: whether text and codes are interleaved (see order.py).
    """

    before: tuple[int, ...]
    text: tuple[int, ...]
    has_codes: bool
    is_interleaved: bool = False


class PromptWriter:
    """Turns a Request into a Script. Raises RequestError for an invalid request."""

    def __init__(self, config: LMConfig, directory: Path):
        self.tokenize = TextTokenizer(directory)
        if (max_id := max(self.tokenize.special.values())) >= config.text_vocab:
            rows = f"the model has {config.text_vocab} text rows"
            raise ValueError(
                f"{directory / 'vocab.json'} and special tokens have ids up to {max_id}, but {rows}"
            )

    def __call__(self, request: Request, transcript: tuple[int, ...]) -> Script:
        """Write the script of a request. transcript: text ids of the voice's prompt; empty if not known."""
        is_interleaved = self._is_interleaved(request)
        text = self.tokens("text", request.text if is_interleaved else ended(request.text.strip()))
        if not text:
            raise RequestError("text", "text is empty")
        instructions = (request.instructions or "").strip().removesuffix(END_OF_PROMPT)
        if instructions:
            if is_interleaved:
                instead = "use text_mode full and send all of the text at once"
                raise RequestError(
                    "instructions", f"instructions would be spoken between the codes: {instead}"
                )
            before = [*self.tokens("instructions", instructions), self.tokenize.special[END_OF_PROMPT]]
            return Script(tuple(before), tuple(text), has_codes=False)
        return Script(transcript, tuple(text), bool(transcript), is_interleaved)

    def _is_interleaved(self, request: Request) -> bool:
        mode = request.options.get("text_mode", "interleaved" if request.is_open else "full")
        if request.is_open and mode == "full":
            needs = "text that arrives while the model speaks needs text_mode interleaved"
            raise RequestError("text_mode", needs)
        return mode == "interleaved"

    def tokens(self, param: str, text: str) -> list[int]:
        tokens = self.tokenize(text.strip())
        if len(tokens) > MAX_TEXT_TOKENS:
            raise RequestError(
                param, f"{param}: {len(tokens)} tokens are given; at most {MAX_TEXT_TOKENS} are possible"
            )
        return tokens
