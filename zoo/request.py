"""Requests and the options of a model, as data. `zoo.check` refuses what a model does not take.

This module does not import torch, so every surface can use the same options: HTTP, the shell, `zoo inspect`
and the OpenAPI page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

Value = bool | int | float | str
KINDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def shown(bound: float) -> str:
    """Return a bound as a user would write it: 10, not 10.0."""
    return f"{bound:.0f}" if bound == int(bound) else f"{bound:g}"


class RequestError(ValueError):
    """An invalid request. `param` names the field; the message says what was given and what is possible."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Option:
    """A value that a request may set for a model. `default` None: the model decides, as `help` says."""

    name: str
    type: type  # bool, int, float or str
    help: str
    default: Value | None = None
    range: tuple[float, float] | None = None  # of a number; both ends are allowed
    choices: tuple[str, ...] = ()  # of a string

    @property
    def possible(self) -> str:
        """Return a description of the possible values."""
        if self.choices:
            return ", ".join(self.choices)
        if self.range is None:
            return KINDS[self.type]
        low, high = self.range
        return f"{KINDS[self.type]} from {shown(low)} to {shown(high)}"

    def read(self, value: object) -> Value:
        """Return the value as the option's type. Raises RequestError."""
        is_kind = type(value) is self.type or (self.type is float and type(value) is int)
        if not is_kind or not self._holds(value):
            raise RequestError(self.name, f"{self.name} is {value!r}; possible: {self.possible}")
        return self.type(value)

    def parse(self, text: str) -> Value:
        """Return the value of a command-line argument. Raises RequestError."""
        if self.type is bool:
            return self.read({"true": True, "false": False}.get(text, text))
        try:
            return self.read(text if self.type is str else self.type(text))
        except ValueError:
            raise RequestError(self.name, f"{self.name} is {text!r}; possible: {self.possible}") from None

    def _holds(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.type not in (int, float):
            return True
        low, high = self.range or (-sys.float_info.max, sys.float_info.max)
        return low <= value <= high  # false for NaN


@dataclass(frozen=True, eq=False)
class AudioClip:
    """Recorded audio: float32 samples [N] (mono) or [C, N], not normalized (full scale is 1).

    kept_in: the directory in which encodings of the clip are stored (zoo/voices/encoded_files.py); None: they are
    kept in memory only. name: identifies the samples (`recording_name`); None: it follows from them.
    """

    samples: np.ndarray
    sample_rate_hz: int
    kept_in: Path | None = None
    name: bytes | None = None


class StoredClip(AudioClip):
    """A clip whose `samples` are read when an encoder needs them for the first time. read: returns them [N]
    float32, and its exceptions pass through."""

    _read: Callable[[], np.ndarray]

    def __init__(self, read: Callable[[], np.ndarray], sample_rate_hz: int, kept_in: Path, name: bytes):
        for field_name, value in (("sample_rate_hz", sample_rate_hz), ("kept_in", kept_in), ("name", name)):
            object.__setattr__(self, field_name, value)
        object.__setattr__(self, "_read", read)

    def __getattr__(self, attribute: str) -> np.ndarray:
        if attribute != "samples":
            raise AttributeError(attribute)
        object.__setattr__(self, "samples", self._read())
        return self.samples


def recording_name(samples: np.ndarray, sample_rate_hz: int) -> bytes:
    """Return a hash of 16 bytes of samples [N] or [C, N] float32 and their rate."""
    name = blake2b(repr((samples.shape, sample_rate_hz)).encode(), digest_size=16)
    name.update(np.ascontiguousarray(samples).data)
    return name.digest()


@dataclass(frozen=True)
class Reference:
    """A recording of a voice to speak in.

    transcript: the words of the clip, verbatim. speaker: the speaker's name, for texts that name several
    speakers.
    name: the name by which `Request.voice` mixes this voice with others.
    """

    clip: AudioClip
    transcript: str | None = None
    speaker: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Share:
    """One voice of a mix: one of the model's voices, or a reference. The weights of a mix add up to 1."""

    name: str
    weight: float
    reference: Reference | None = None


# The syntax of a mix of voices, such as "vivian(2)+ryan(1)". HTTP reads it with these functions too.
# Source of the syntax: remsky/Kokoro-FastAPI, whose clients already use it.
MAX_SHARES = 8
MAX_WEIGHT = 1000.0
_SHARE = re.compile(r"\s*([^+()\s][^+()]*?)\s*(?:\(\s*(\d+\.?\d*|\.\d+)\s*\))?\s*")


def is_mix(voice: str) -> bool:
    """Return whether a voice is a mix of voices. No uploaded voice can have such a name."""
    return "+" in voice


def parts_of(mix: str) -> list[tuple[str, float]]:
    """Return the names and weights of a mix. Raises RequestError if it is malformed."""
    found = [_SHARE.fullmatch(part) for part in mix.split("+")]
    parts = [(match[1], float(match[2] or 1)) for match in found if match is not None]
    if not 2 <= len(parts) == len(found) <= MAX_SHARES or not all(
        0 < weight <= MAX_WEIGHT for _, weight in parts
    ):
        weight = f"a weight in brackets above 0 and up to {MAX_WEIGHT:g} (1 if it is left out)"
        form = f"give 2 to {MAX_SHARES} voices, each with {weight}"
        raise RequestError("voice", f"{mix!r} is not a mix of voices such as anna(2)+bert(1); {form}")
    return parts


def names_in(mix: str) -> list[str]:
    """Return the names in a mix. Malformed parts have none; `parts_of` refuses them."""
    return [match[1] for part in mix.split("+") if (match := _SHARE.fullmatch(part)) is not None]


def with_own_names(mix: str, aliases: Mapping[str, str]) -> str:
    """Replace the aliases in a mix by the voices that they stand for."""
    return "+".join(_with_own_name(part, aliases) for part in mix.split("+"))


def _with_own_name(part: str, aliases: Mapping[str, str]) -> str:
    if (match := _SHARE.fullmatch(part)) is None:
        return part
    return part[: match.start(1)] + aliases.get(match[1], match[1]) + part[match.end(1) :]


@dataclass(frozen=True)
class Turn:
    """An earlier turn of a conversation, for models that listen: a text, a clip, or both.

    role: "user", "assistant" or "system"; for models that take tools also "tools", their JSON schemas, and "tool",
    a result. tokens: the `Speech.tokens` of an earlier answer, in place of its text, for models that keep answers.
    """

    role: str
    text: str | None = None
    clip: AudioClip | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for speech. `None` means the checkpoint's default; temperature 0 is greedy. `check` refuses
    the fields that a model does not take.

    voice: one of the model's voices, or a mix of voices and named references such as "vivian(2)+ryan(1)"
    (`shares`).
    references: recordings of voices to speak in.
    max_frames: the most frames of all pieces together.
    options: values that only some models take, listed in `Spec.options`.
    turns: the earlier turns of a conversation, for models that listen.
    conversation: names a conversation, so that its next turn finds this one in the KV cache.
    is_open: more text is fed while the model speaks (`Engine.feed`).
    split_text: a text that is too long for one pass is split into pieces (zoo/text/pieces.py).
    normalize: numbers, dates and amounts are written out as words first (zoo/text/normalize.py).
    sentence_gap_s: seconds of silence between sentences, each of which is then spoken in a separate pass;
    None or 0: the text is cut by its length alone, without silence.
    stop: strings before which an answer ends, for models that answer.
    output: "speech"; "text", an answer in text without audio; "transcript", the words of the clip in the only
    turn; or "continuation", audio that goes on where that clip ends. `Spec.outputs` lists those of a model.
    """

    text: str
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    references: tuple[Reference, ...] = ()
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_frames: int | None = None
    options: dict[str, Value] = field(default_factory=dict, hash=False)
    turns: tuple[Turn, ...] = ()
    conversation: str | None = None
    is_open: bool = False
    split_text: bool = True
    normalize: bool = False
    sentence_gap_s: float | None = None
    stop: tuple[str, ...] = ()
    output: str = "speech"

    def __post_init__(self) -> None:
        """Raise RequestError for a value that no model can take, so that no request can stop an engine."""
        for name, low, high in (("seed", -INT64, INT64), ("max_frames", 1, 2**31)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(name, f"{name} is {value}; from {low} to {high} is possible")
        gap_s = self.sentence_gap_s
        if gap_s is not None and not 0 <= gap_s <= MAX_GAP_S:
            raise RequestError(
                "sentence_gap_s", f"sentence_gap_s is {gap_s}; from 0 to {MAX_GAP_S:g} is possible"
            )
        for name in SAMPLING:
            if name in self.options:
                raise RequestError(name, f"{name} is a field of the request: leave it out of the options")
        for name, text in self._texts():
            if text is not None and (half := _HALF.search(text)) is not None:
                raise RequestError(
                    name, f"{name} has {half[0]!r}, which is half of a character: give whole ones"
                )

    def _texts(self) -> Iterator[tuple[str, str | None]]:
        """Yield all texts that a model may read, each with its field."""
        yield from (("text", self.text), ("instructions", self.instructions))
        yield from (("references", reference.transcript) for reference in self.references)
        yield from (("turns", turn.text) for turn in self.turns)
        yield from (("stop", text) for text in self.stop)


_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which no UTF-8 has

INT64 = 2**63 - 1
MAX_GAP_S = 10.0  # of silence between two sentences
SOUND_ONLY = "x_vector_only_mode"  # the option of models that can ignore a reference's transcript
# fields of Request that most models list among their options
SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


def sampling_options(
    temperature: float, top_k: int, top_p: float, repetition_penalty: float | None = None
) -> tuple[Option, ...]:
    """Return the shared sampling options with a checkpoint's defaults. repetition_penalty None: the model has
    no repetition penalty."""
    options = (
        Option(
            "temperature",
            float,
            "how random sampling is; 0 is greedy: always the likeliest code",
            temperature,
            (0, 2),
        ),
        Option(
            "top_k", int, "sample from this many of the likeliest codes; 0 means all", top_k, (0, 1_000_000)
        ),
        Option(
            "top_p",
            float,
            "sample from the likeliest codes that make up this share of the probability; 1 means all",
            top_p,
            (1e-6, 1),
        ),
    )
    if repetition_penalty is None:
        return options
    penalty = "how strongly to penalize codes that were drawn before; 1 is off"
    return (*options, Option("repetition_penalty", float, penalty, repetition_penalty, (0.5, 2)))


# White space and invisible characters: NUL, zero-width characters, byte order marks
BLANK = " \t\n\r\v\f\0\u00a0\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u2060\u3000\ufeff"
