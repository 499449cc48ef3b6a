"""Builds the prompt: the columns that the LM reads before the first frame. Each position is a column: a token
id, then the codes of a frame, which are zeros for text. A frame's token is that of its first code. The
segments between two · are tokenized separately:

    system     <|im_start|>system\\n · convert the provided text to speech · <|im_end|>\\n
      or       <|im_start|>system\\n · convert the provided text to speech reference to the following:
               \\n\\nText:\\n · transcripts · \\n\\nSpeech:\\n · all references' frames · <|im_end|>\\n
    user       <|im_start|>user\\n · text · <|im_end|>\\n
    assistant  <|im_start|>assistant\\n<|voice|> · frames… · <|im_end|>\\n          user, assistant and so on

A transcript begins with <|speaker:i|>, where i is its index among the references. The same tags in the text
set the speaker. Emotion tags such as [whisper] are ordinary text. A text with speaker tags is spoken a few
turns at a time; each pass reads the turns and the speech of earlier passes.

Source: facts of fishaudio/fish-speech, content_sequence.py and models/text2semantic/inference.py. There are
two differences: a user's text can contain no special tokens except the phoneme pair, and text before the
first speaker tag is spoken too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from zoo.fish_s2.clone import Cloner
from zoo.fish_s2.config import Config
from zoo.fish_s2.vocabulary import END, PHONEMES, START, VOICE, semantic
from zoo.nn import plain_tokenizer
from zoo.nn.keys import prefix_key
from zoo.request import Option, Reference, RequestError, sampling_options

TASK = "convert the provided text to speech"
WITH_REFERENCE = f"{TASK} reference to the following:\n\nText:\n"
SPEAKER = re.compile(r"<\|speaker:\d+\|>")
_TURN = re.compile(rf"(?={SPEAKER.pattern})")
MAX_TURNS = 5  # per pass
PIECE_S = 30.0  # for texts without speaker tags; a pass holds 47 s by default, as in the original's server
DEFAULT_VOICE = "default"  # a random voice; OpenAI's clients must name one
# The defaults of the original's HTTP server; the checkpoint has none.
TEMPERATURE, TOP_K, TOP_P, CHUNK_BYTES = 0.8, 30, 0.8, 200
OPTIONS = (
    *sampling_options(TEMPERATURE, TOP_K, TOP_P),
    Option(
        "chunk_length",
        int,
        "most UTF-8 bytes per pass, for a text with speaker tags",
        CHUNK_BYTES,
        (100, 1000),
    ),
)
HINTS = {
    "voice": "or give a reference",
    "language": "it infers the language from the text",
    "instructions": "use tags in the text, such as [whisper]",
    "repetition_penalty": "it draws again instead of repeating itself",
}


class TextTokenizer:
    """The checkpoint's byte-level BPE. In a user's text it recognizes only the two phoneme tokens. Any other
    special token there is tokenized as ordinary text and cannot change the prompt's structure."""

    def __init__(
        self,
        path: Path,
        special: dict[str, int],
        tokenizer: Tokenizer,
        config: Config,
        needed: tuple[str, ...],
    ):
        """special: the added tokens, from the file `path`. needed: those that the prompt uses."""
        self.special, self._tokenizer = special, tokenizer
        self._check(path, config, needed)
        greatest = max((*self.special.values(), *self._tokenizer.get_vocab().values()))
        if greatest >= config.vocab:
            raise ValueError(f"{path} has ids up to {greatest}, but the model has {config.vocab} text rows")
        known = [re.escape(token) for token in PHONEMES if token in self.special]
        self._phonemes = re.compile(f"({'|'.join(known) or '(?!)'})")

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._phonemes.split(text)):  # text and tokens alternate
            ids += (
                [self.special[part]] if i % 2 else self._tokenizer.encode(part, add_special_tokens=False).ids
            )
        return ids

    @classmethod
    def read(cls, directory: Path, config: Config) -> TextTokenizer:
        """Read tokenizer.json. Raises ValueError."""
        path = directory / "tokenizer.json"
        tokenizer, special = plain_tokenizer.read(path)
        return cls(path, special, tokenizer, config, (START, VOICE))

    def _check(self, path: Path, config: Config, needed: tuple[str, ...]) -> None:
        """Check that the tokenizer has the needed tokens, with the ids of the config."""
        wanted = {END: config.end} | {
            semantic(code): config.semantic_start + code for code in range(config.codebook_size)
        }
        missing = [token for token in (*needed, *wanted) if token not in self.special]
        if missing:
            model = "OpenAudio S1" if config.is_s1 else "Fish Audio S2"
            raise ValueError(f"{path} lacks tokens of {model}: {', '.join(missing[:8])}")
        for token, index in wanted.items():
            if self.special[token] != index:
                source = "by its order it must have" if config.is_s1 else "config.json has"
                raise ValueError(f"{path} gives {token} the id {self.special[token]}, but {source} {index}")


class Writer:
    """Turns text and frames into columns [T, 1 + K] int64 on the CPU."""

    def __init__(self, config: Config, tokenize: TextTokenizer, cloner: Cloner):
        self.config, self.tokenize, self.cloner = config, tokenize, cloner

    def frames(self, codes: Tensor) -> Tensor:
        """Return the columns of codes [F, K]."""
        return torch.cat((codes[:, :1] + self.config.semantic_start, codes), 1)

    def _text(self, *parts: list[int]) -> Tensor:
        ids = torch.tensor([token for part in parts for token in part], dtype=torch.int64)
        return torch.cat((ids[:, None], ids.new_zeros(len(ids), self.config.codebooks)), 1)


class PromptWriter(Writer):
    """Writes the messages of S2's chat. `system` encodes the references."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        super().__init__(config, TextTokenizer.read(directory, config), cloner)
        start = self.tokenize.special[START]
        self._headers = {
            role: [start, *self.tokenize(f"{role}\n")] for role in ("system", "user", "assistant")
        }
        self._end = [config.end, *self.tokenize("\n")]

    def system(self, references: Sequence[Reference]) -> Tensor:
        """Return the system message. Raises RequestError for an invalid reference."""
        if not references:
            return self._text(self._headers["system"], self.tokenize(TASK), self._end)
        transcripts = "\n".join(_transcript(reference, i) for i, reference in enumerate(references))
        parts = (self.tokenize(text) for text in (WITH_REFERENCE, transcripts, "\n\nSpeech:\n"))
        before = self._text(self._headers["system"], *parts)
        frames = [self.frames(self.cloner(reference.clip)) for reference in references]
        return torch.cat((before, *frames, self._text(self._end)))

    def user(self, text: str) -> Tensor:
        """Return a user's message, and the header of the model's answer."""
        assistant = [*self._headers["assistant"], self.tokenize.special[VOICE]]
        return self._text(self._headers["user"], self.tokenize(text), self._end, assistant)

    def said(self, codes: Tensor) -> Tensor:
        """Return the rest of the model's answer, from its codes [F, K]."""
        return torch.cat((self.frames(codes), self._text(self._end)))


def _transcript(reference: Reference, place: int) -> str:
    """Return a reference's transcript after its speaker tag. The transcript may be empty, as in the
    original."""
    text, speaker = reference.transcript or "", reference.speaker
    if speaker is not None and not re.fullmatch(r"\d{1,4}", speaker):
        raise RequestError(
            "speaker",
            f"speaker is {speaker!r}; use a number, as in the tag <|speaker:{place}|> of the text",
        )
    return text if SPEAKER.search(text) else f"<|speaker:{speaker or place}|>{text}"


def passes(text: str, chunk_bytes: int) -> list[str]:
    """Split a text with speaker tags into passes of at most MAX_TURNS turns and chunk_bytes bytes. A text
    without tags stays whole. Raises RequestError for a text that has only tags."""
    if not SPEAKER.search(text):
        return [text]
    if not SPEAKER.sub("", text).strip():
        raise RequestError("text", f"text is {text!r}; it needs words after its tags")
    groups: list[list[str]] = []
    for turn in filter(None, map(str.strip, _TURN.split(text))):
        if groups and len(groups[-1]) < MAX_TURNS and _num_bytes((*groups[-1], turn)) <= chunk_bytes:
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return ["\n".join(group) for group in groups]


def _num_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def column_keys(columns: Tensor, config: Config) -> tuple[int, ...]:
    """Return the prefix-cache keys of columns [T, 1 + K]: the id >= 0 of a text column, or a negative hash of
    a frame's codes."""
    stop = config.semantic_start + config.codebook_size
    return tuple(
        prefix_key(*codes) if config.semantic_start <= token < stop else token
        for token, *codes in columns.tolist()
    )
