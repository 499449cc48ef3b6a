"""Builds the prompt: the positions that the talker reads before the first frame.

Every position is the sum of a text row and, after the role, a codec row ("." is tts_pad, "-" means none):

    text   instruction…  <|im_start|> assistant \\n  .      .          .         .          .      tts_bos  ┬ text…  tts_eos  . (full)
    codec  -             -                         think  think_bos  language  think_eos  voice  pad      │ pad…   pad      bos
                                                                                                          └ text[0] (interleaved)
                                                                                                            bos

With language "auto" there are three control ids instead of four: nothink, think_bos, think_eos. The voice is
a row of the checkpoint or the speaker vector of a reference; a voice_design model has no such position. In
the interleaved mode the rest of the text, followed by tts_eos, is added to the next frames, one token per
frame.

A reference with its transcript comes first, as if the model had already said it. In the interleaved mode text
and reference frames run in parallel. If the frames are longer, tts_pad fills the text side; if the text is
longer, its rest is added to the next frames:

    text   reference text…  text…  tts_eos   .    .  .  .… (full)       reference text…  text…  tts_eos  .…
    codec  pad…             pad…   pad       bos  frames…               bos  frames…                            (interleaved)

Source: QwenLM/Qwen3-TTS, qwen_tts/core/models/modeling_qwen3_tts.py, generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.qwen3_tts.clone import Cloner, EncodedReference
from zoo.qwen3_tts.config import Config, Defaults
from zoo.request import Option, Request, RequestError, sampling_options
from zoo.text.byte_level import read_qwen

MAX_TEXT_TOKENS = 8192
PIECE_S = 45.0  # users report that speech over a minute drifts, speeds up or loses its end
SIZES = {"0b6": "0.6B", "1b7": "1.7B"}


def options(config: Config, defaults: Defaults) -> tuple[Option, ...]:
    """Return the options that a request to this checkpoint may set, with their defaults."""
    d, clones = defaults, config.variant == "base"
    mode = "full: the model reads the whole text first; interleaved: it reads one token with every frame"
    after = "for every code of a frame except the first"
    own = [
        Option(
            "depth_temperature",
            float,
            f"temperature {after}; 0 if temperature is 0",
            d.depth_temperature,
            (0, 2),
        ),
        Option("depth_top_k", int, f"top_k {after}; 0 means all", d.depth_top_k, (0, 1_000_000)),
        Option("depth_top_p", float, f"top_p {after}; 1 means all", d.depth_top_p, (1e-6, 1)),
        Option("text_mode", str, mode, "interleaved" if clones else "full", choices=("full", "interleaved")),
    ]
    if clones:
        own.append(
            Option(
                "x_vector_only_mode",
                bool,
                "clone only the voice of the reference, without its transcript",
                False,
            )
        )
    return (*sampling_options(d.temperature, d.top_k, d.top_p, d.repetition_penalty), *own)


def hints(config: Config) -> dict[str, str]:
    """Return what to use instead of each parameter that the checkpoint does not support."""
    instead = {"base": "it clones a reference", "voice_design": "it makes a voice from instructions"}
    names = "1.7B custom_voice and voice_design" if config.variant == "base" else "the 1.7B model"
    follows = f"{names} of Qwen3-TTS {'do' if config.variant == 'base' else 'does'}"
    hints = {"instructions": follows, "references": "Qwen3-TTS base clones"}
    if config.variant in instead:
        hints["voice"] = instead[config.variant]
    return hints


class TextTokenizer:
    """Byte-level BPE with Qwen2's split. A special token in a user's text, such as `<|im_end|>`, is tokenized
    as ordinary text."""

    def __init__(self, directory: Path):
        self._tokenizer = read_qwen(directory)
        self.max_id = max(self._tokenizer.get_vocab().values(), default=0)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


# Values of a position's codec id that are not ids: no row, the speaker vector, and the reference's frames.
# Frame f is FRAME - f.
NOTHING, SPEAKER, FRAME = -1, -2, -3


@dataclass(frozen=True)
class Script:
    """A prompt as ids. pairs[t] is (text id, codec id or one of the values above); trailing holds the text
    ids that are added to the first frames."""

    pairs: tuple[tuple[int, int], ...]
    trailing: tuple[int, ...]
    text_tokens: int
    reference: EncodedReference | None


class PromptWriter:
    """Turns a Request into a Script. Raises RequestError for a mistake in the request.

    cloner: only for Base models, which have no built-in voices. A reference is encoded last, after everything
    else has been checked.
    """

    def __init__(self, config: Config, directory: Path, cloner: Cloner | None):
        self.config = config
        self.cloner = cloner
        self.tokenize = TextTokenizer(directory)
        if (max_id := self.tokenize.max_id) >= config.text_vocab:
            rows = f"the model has {config.text_vocab} text rows"
            raise ValueError(f"{directory / 'vocab.json'} has ids up to {max_id}, but {rows}")
        self.newline = self.tokenize("\n")
        self.user = self.tokenize("user")

    def __call__(self, request: Request, values: Mapping[str, Any], is_mixed: bool = False) -> Script:
        """Return the request's prompt. values: the model's options, from `zoo.check.check`. is_mixed:
        whether the speaker is a mix of voices."""
        c, control = self.config, self.config.control
        is_full = values["text_mode"] == "full"
        if request.is_open and is_full:
            raise RequestError(
                "text_mode", "text that arrives while the model speaks needs text_mode interleaved"
            )
        text = self._tokens("text", request.text)
        if not text:
            raise RequestError("text", "text is empty")
        instruction = self._instruction(request)
        transcript = [] if is_mixed else self._transcript(request, values, len(text))
        voice = None if is_mixed else self._voice(request)
        language = self._language(request, voice)
        reference = None if is_mixed else self._reference(request, values)

        pairs = [(token, NOTHING) for token in (*instruction, c.im_start, c.assistant, *self.newline)]
        if language is None:
            codec = [control.nothink, control.think_bos, control.think_eos]
        else:
            codec = [control.think, control.think_bos, language, control.think_eos]
        if voice is not None:
            codec.append(c.voices[voice])
        elif reference is not None or is_mixed:
            codec.append(SPEAKER)
        pairs += [(c.tts_pad, index) for index in codec]
        pairs.append((c.tts_bos, control.pad))

        words = [*transcript, *text]
        if not request.is_open:
            words.append(c.tts_eos)
        sounds = [control.bos, *(FRAME - f for f in range(len(reference.codes) if reference else 0))]
        if is_full:
            pairs += [(token, control.pad) for token in words]
            words = []
        if request.is_open and len(words) < len(sounds):
            has = f"the reference has {len(sounds) - 1} frames, but transcript and text have {len(words)} tokens"
            missing = len(sounds) - len(words)
            more = "1 more token" if missing == 1 else f"{missing} more tokens"
            raise RequestError("text", f"{has}; send {more} or set x_vector_only_mode")
        pairs += [(words[i] if i < len(words) else c.tts_pad, index) for i, index in enumerate(sounds)]
        return Script(tuple(pairs), tuple(words[len(sounds) :]), len(text), reference)

    def _tokens(self, param: str, text: str) -> list[int]:
        tokens = self.tokenize(text.strip())
        if len(tokens) > MAX_TEXT_TOKENS:
            raise RequestError(param, f"{param} has {len(tokens)} tokens; the limit is {MAX_TEXT_TOKENS}")
        return tokens

    def _instruction(self, request: Request) -> list[int]:
        tokens = self._tokens("instructions", request.instructions or "")
        if not tokens:
            return []
        return [self.config.im_start, *self.user, *self.newline, *tokens, self.config.im_end, *self.newline]

    def _voice(self, request: Request) -> str | None:
        """Return one of the checkpoint's voices, or None if a reference or the instructions define the
        voice."""
        if self.config.variant != "custom_voice":
            return None
        return request.voice.lower() if request.voice is not None else next(iter(self.config.voices))

    def _language(self, request: Request, voice: str | None) -> int | None:
        """Return the codec id of the language, or None for auto. A voice with a dialect speaks it if the
        request asks for Chinese or for no language."""
        language = (request.language or "auto").lower()
        if language in ("auto", "chinese") and voice in self.config.dialects:
            language = self.config.dialects[voice]
        return None if language == "auto" else self.config.languages[language]

    def _transcript(self, request: Request, values: Mapping[str, Any], text_tokens: int) -> list[int]:
        """Return the tokens of the reference's transcript, or none if only its voice is cloned."""
        if not request.references or values["x_vector_only_mode"]:
            return []
        tokens = self._tokens("transcript", request.references[0].transcript or "")
        if not tokens:
            needed = "transcript is missing; give the words of the reference, or set x_vector_only_mode to clone only the voice"
            raise RequestError("transcript", needed)
        if (both := text_tokens + len(tokens)) > MAX_TEXT_TOKENS:
            raise RequestError(
                "transcript",
                f"text and transcript have {both} tokens together; the limit is {MAX_TEXT_TOKENS}",
            )
        return tokens

    def _reference(self, request: Request, values: Mapping[str, Any]) -> EncodedReference | None:
        if self.cloner is None:
            return None
        return self.cloner(request.references[0].clip, values["x_vector_only_mode"])
