"""Text as ids: punctuation as the model knows it, a tag for the language, and the directory's tokenizer.

    Chatterbox     255  text, spaces as [SPACE]  0
    Multilingual   255  [fr] text, lower case, accents apart  0      the first one keeps case and accents
    Turbo          text, GPT-2's tokenizer

Source: chatterbox-tts 0.1.7, tts.py, mtl_tts.py, tts_turbo.py (punc_norm) and models/tokenizers/tokenizer.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, pre_tokenizers

from zoo.chatterbox import watermark
from zoo.chatterbox.config import Config
from zoo.chatterbox.languages import LANGUAGES, in_language
from zoo.checkpoint.json_files import read_json
from zoo.nn.plain_tokenizer import PlainTokenizer
from zoo.request import Option, Request, RequestError, sampling_options
from zoo.text.byte_level import read_bpe

START, STOP, UNKNOWN, SPACE = "[START]", "[STOP]", "[UNK]", "[SPACE]"
CONTROL = (START, STOP, UNKNOWN, SPACE)
MAX_TEXT_TOKENS = 2048
PIECE_S = 12.0  # first audio comes when a piece has been rendered, so pieces are short
# Replaced in this order. Turbo keeps the marks of TURBO_KEEPS.
REPLACED = (
    ("...", ", "),
    ("…", ", "),
    (":", ","),
    (" - ", ", "),
    (";", ", "),
    ("—", "-"),
    ("–", "-"),  # noqa: RUF001 (a dash)
    (" ,", ","),
    ("“", '"'),
    ("”", '"'),
    ("‘", "'"),  # noqa: RUF001 (a quotation mark)
    ("’", "'"),  # noqa: RUF001 (a quotation mark)
)
TURBO_KEEPS = ("...", " - ", ";")
ENDS = (".", "!", "?", "-", ",")
WIDE_ENDS = ("、", "，", "。", "？", "！")  # noqa: RUF001 (of Chinese and Japanese)

NO_VOICE = "or put the original's conds.pt into the model's directory"
HINTS = {
    "voice": "or give a reference",
    "instructions": "use exaggeration, or tags in the text such as [laughter]",
    "language": "use Chatterbox Multilingual for other languages than English",
    "references": NO_VOICE,
    "watermark": watermark.HINT,
}
TURBO_HINTS = {
    "voice": "or give a reference",
    "instructions": "use tags in the text such as [laugh]",
    "language": "use Chatterbox Multilingual for other languages than English",
    "references": NO_VOICE,
    "exaggeration": "this option belongs to Chatterbox and Chatterbox Multilingual",
    "cfg_weight": "Chatterbox Turbo runs without guidance",
    "watermark": watermark.HINT,
}


def options(config: Config) -> tuple[Option, ...]:
    """Return the options of a variant with the reference's defaults."""
    mark = Option("watermark", bool, "put the original's inaudible watermark into the speech", False)
    marks = (mark,) if watermark.is_installed() else ()
    if config.is_turbo:
        return (*sampling_options(0.8, 1000, 0.95, 1.2), *marks)
    temperature, _, top_p, penalty = sampling_options(0.8, 0, 1.0, 1.2)
    return (
        temperature,
        top_p,
        penalty,
        Option(
            "min_p",
            float,
            "leave out codes below this share of the likeliest one's probability",
            0.05,
            (0, 1),
        ),
        Option("exaggeration", float, "how expressive the voice is; 0.5 is neutral", 0.5, (0, 2)),
        Option(
            "cfg_weight",
            float,
            "guidance: how closely the speech follows the text; lower is slower, and 0 turns guidance off",
            0.5,
            (0, 1),
        ),
        *marks,
    )


def normalized(text: str, config: Config) -> str:
    """Return a text with the punctuation that the model was trained with."""
    if text[:1].islower():
        text = text[0].upper() + text[1:]
    text = " ".join(text.split())
    for old, new in REPLACED:
        if not (config.is_turbo and old in TURBO_KEEPS):
            text = text.replace(old, new)
    text = text.rstrip(" ")
    ends = ENDS + (WIDE_ENDS if config.kind == "multilingual" else ())
    return text if text.endswith(ends) else f"{text}."


class TextTokenizer(PlainTokenizer):
    """The tokenizer of the directory. In a text only its tags, such as [laughter], are special tokens."""

    def __init__(self, path: Path, rows: int, title: str):
        super().__init__(path, CONTROL, rows, title)
        tags = sorted((name for name in self.special if name not in CONTROL), key=len, reverse=True)
        self._part = re.compile("(" + "|".join(re.escape(name) for name in [*tags, " "]) + ")")

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._part.split(text)):  # text and tags alternate
            ids += [self.special[SPACE if part == " " else part]] if i % 2 else super().__call__(part)
        return ids

    def framed(self, ids: list[int]) -> list[int]:
        return [self.special[START], *ids, self.special[STOP]]


class Gpt2Tokenizer:
    """GPT-2's byte-level BPE with the directory's tags, such as [laugh]."""

    def __init__(self, directory: Path, rows: int):
        self._tokenizer = read_bpe(directory)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tags = read_json(directory / "added_tokens.json")
        most = max([self._tokenizer.get_vocab_size() - 1, *(i for i in tags.values() if type(i) is int)])
        if most >= rows:
            raise ValueError(f"{directory} has text ids up to {most}, but the model has {rows} text rows")
        first = self._tokenizer.get_vocab_size()
        for name, token_id in sorted(tags.items(), key=lambda tag: str(tag[1])):
            if self._tokenizer.token_to_id(name) is None:  # words such as <|endoftext|> stay plain text
                self._tokenizer.add_tokens([AddedToken(name, normalized=False)])
            found = self._tokenizer.token_to_id(name)
            if found != token_id:
                raise ValueError(
                    f"{directory / 'added_tokens.json'}: {name} has id {token_id}; {found} is next"
                )
        self.tags = tuple(name for name, token_id in tags.items() if token_id >= first)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class PromptWriter:
    """Turns a Request into the ids of its text. Raises RequestError for a mistake in the request."""

    def __init__(self, config: Config, directory: Path):
        self.config = config
        self.directory = directory
        rows = config.t3.text_vocab
        self.tokenize: TextTokenizer | Gpt2Tokenizer
        if config.is_turbo:
            self.tokenize = Gpt2Tokenizer(directory, rows)
        else:
            self.tokenize = TextTokenizer(directory / config.tokenizer_file, rows, config.title)

    def __call__(self, request: Request) -> list[int]:
        text = normalized(request.text.strip(), self.config)
        if self.config.kind == "multilingual":
            language = (request.language or "auto").lower()
            language = "" if language == "auto" else language
            text = in_language(text, language, self.directory, self.config.keeps_case)
        ids = self.tokenize(text)
        if isinstance(self.tokenize, TextTokenizer):
            ids = self.tokenize.framed(ids)
        most = min(MAX_TEXT_TOKENS, self.config.t3.text_positions or MAX_TEXT_TOKENS)
        if len(ids) > most:
            raise RequestError("text", f"the text has {len(ids)} tokens; at most {most} are possible")
        return ids


def languages(config: Config) -> tuple[str, ...]:
    return ("auto", *(LANGUAGES if config.kind == "multilingual" else ("english",)))
