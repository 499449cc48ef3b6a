"""From a request to what the talker reads before the first frame.

Every position is the sum of a text row and, after the role, a codec row ("." stands for tts_pad, "-" for nothing):

    text   instruction…  <|im_start|> assistant \\n  .      .          .         .          .      tts_bos  ┬ text…  tts_eos  . (whole)
    codec  -             -                         think  think_bos  language  think_eos  voice  pad      │ pad…   pad      bos
                                                                                                          └ text[0] (streaming)
                                                                                                            bos

With language "auto" the four control ids are three: nothink, think_bos, think_eos. The voice is a row of the checkpoint, or what the
speaker encoder made of a reference; a model that designs voices has no such position. In the streaming layout the rest of the text, and
tts_eos, is added to the frames that follow, a token a frame.

A reference with its transcript stands where the text begins, as what has been said already. The streaming layout reads both sides at
once; whichever is longer goes on, the text beside the frames that follow:

    text   reference text…  text…  tts_eos   .    .  .  .… (whole)      reference text…  text…  tts_eos  .…
    codec  pad…             pad…   pad       bos  frames…               bos  frames…                            (streaming)

Source: QwenLM/Qwen3-TTS, qwen_tts/core/models/modeling_qwen3_tts.py, generate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from zoo.contract import Layout, Request, refuse
from zoo.qwen3_tts.clone import Cloner, Reference
from zoo.qwen3_tts.config import Config

# Qwen2's split: contractions | letters after at most one other character | single digits | punctuation | line ends | spaces
_SPLIT = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_TEXT_TOKENS = 8192
SIZES = {"0b6": "0.6B", "1b7": "1.7B"}


class TextTokenizer:
    """Byte-level BPE with Qwen2's split. Special tokens are never read out of a user's text: `<|im_end|>` there is ordinary text."""

    def __init__(self, directory: Path):
        vocab, merges = directory / "vocab.json", directory / "merges.txt"
        for path in (vocab, merges):
            if not path.exists():
                raise ValueError(f"{path} does not exist")
        try:
            model = models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{vocab} and {merges.name} are not a byte-level BPE: {error}") from None
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.NFC()
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(_SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


# What stands beside a text row where no codec id does
NOTHING, SPEAKER, FRAME = -1, -2, -3  # nothing; the reference's speaker; the reference's frame f is FRAME - f


@dataclass(frozen=True)
class Script:
    """A prompt as ids: pairs[t] = (text id, codec id or one of the above), and the text ids that follow the first frames."""

    pairs: tuple[tuple[int, int], ...]
    trailing: tuple[int, ...]
    text_tokens: int
    reference: Reference | None


class PromptWriter:
    """Request -> Script. Raises ValueError for what a user got wrong.

    cloner: of the Base models, which have no voice of their own. A reference is encoded last, when all else is known to be right.
    """

    def __init__(self, config: Config, directory: Path, cloner: Cloner | None):
        self.config = config
        self.cloner = cloner
        self.which = f"this checkpoint (Qwen3-TTS {SIZES.get(config.size, config.size)} {config.variant})"
        self.tokenize = TextTokenizer(directory)
        self.newline = self.tokenize("\n")
        self.user = self.tokenize("user")
        self.languages = ("auto", *sorted(name for name in config.languages if "dialect" not in name))

    def __call__(self, request: Request) -> Script:
        c, control = self.config, self.config.control
        for param in ("guidance", "solver_steps"):
            if getattr(request, param) is not None:
                raise refuse(param, f"{self.which} takes no {param}: it draws codes and solves nothing")
        text = self._tokens("text", request.text)
        if not text:
            raise refuse("text", "text is empty")
        layout = self._layout(request)
        instruction = self._instruction(request)
        transcript = self._transcript(request, len(text))
        voice = self._voice(request)
        language = self._language(request, voice)
        reference = self._reference(request)

        pairs = [(token, NOTHING) for token in (*instruction, c.im_start, c.assistant, *self.newline)]
        if language is None:
            codec = [control.nothink, control.think_bos, control.think_eos]
        else:
            codec = [control.think, control.think_bos, language, control.think_eos]
        if voice is not None:
            codec.append(c.voices[voice])
        elif reference is not None:
            codec.append(SPEAKER)
        pairs += [(c.tts_pad, index) for index in codec]
        pairs.append((c.tts_bos, control.pad))

        words = [*transcript, *text, c.tts_eos]
        sounds = [control.bos, *(FRAME - f for f in range(len(reference.codes) if reference else 0))]
        if layout == "whole":
            pairs += [(token, control.pad) for token in words]
            words = []
        pairs += [(words[i] if i < len(words) else c.tts_pad, index) for i, index in enumerate(sounds)]
        return Script(tuple(pairs), tuple(words[len(sounds) :]), len(text), reference)

    def _tokens(self, param: str, text: str) -> list[int]:
        tokens = self.tokenize(text.strip())
        if len(tokens) > MAX_TEXT_TOKENS:
            has = "have" if param.endswith("s") else "has"
            raise refuse(param, f"{param} {has} {len(tokens)} tokens; at most {MAX_TEXT_TOKENS} are possible")
        return tokens

    def _layout(self, request: Request) -> Layout:
        if request.layout not in (None, "whole", "streaming"):
            raise refuse("layout", f"layout {request.layout!r} is not known; possible: whole, streaming")
        return request.layout or ("streaming" if self.cloner else "whole")

    def _instruction(self, request: Request) -> list[int]:
        tokens = self._tokens("instructions", request.instructions or "")
        if not tokens:
            if self.config.variant == "voice_design":
                raise refuse("instructions", f"instructions are needed: {self.which} makes a voice from a description of it")
            return []
        if not self.config.takes_instructions:
            does = "1.7B custom_voice and voice_design do" if self.cloner else "the 1.7B one does"
            raise refuse("instructions", f"{self.which} takes no instructions; {does}")
        return [self.config.im_start, *self.user, *self.newline, *tokens, self.config.im_end, *self.newline]

    def _voice(self, request: Request) -> str | None:
        """One of the checkpoint's voices; None where a reference, or the instructions, are the voice."""
        voices = self.config.voices
        if self.config.variant != "custom_voice":
            if request.voice is not None:
                instead = "clones a reference" if self.cloner else "makes a voice from instructions"
                raise refuse("voice", f"{self.which} has no voice {request.voice!r}, nor any other: it {instead}")
            return None
        if request.voice is None and len(voices) == 1:
            return next(iter(voices))
        has = ", ".join(sorted(voices))
        if request.voice is None:
            raise refuse("voice", f"a voice is needed; this checkpoint has: {has}")
        voice = request.voice.lower()
        if voice not in voices:
            raise refuse("voice", f"voice {request.voice!r} is not in this checkpoint; it has: {has}")
        return voice

    def _language(self, request: Request, voice: str | None) -> int | None:
        """The codec id of the language, None for auto. A voice of a dialect speaks it where Chinese is asked for, or nothing is."""
        language = (request.language or "auto").lower()
        if language not in self.languages:
            raise refuse("language", f"language {request.language!r} is not in this checkpoint; it has: {', '.join(self.languages)}")
        if language in ("auto", "chinese") and voice in self.config.dialects:
            language = self.config.dialects[voice]
        return None if language == "auto" else self.config.languages[language]

    def _transcript(self, request: Request, text_tokens: int) -> list[int]:
        """What the reference says, where it is cloned with its words."""
        for param in ("reference", "reference_text", "x_vector_only"):
            if self.cloner is None and getattr(request, param):
                raise refuse(param, f"{self.which} takes no {param}: it does not clone; Qwen3-TTS base does")
        if self.cloner is None or request.x_vector_only:
            return []
        tokens = self._tokens("reference_text", request.reference_text or "")
        if request.reference is not None and not tokens:
            raise refuse("reference_text", "reference_text (what the reference says) is needed, or x_vector_only, to take its sound alone")
        if (both := text_tokens + len(tokens)) > MAX_TEXT_TOKENS:
            raise refuse("reference_text", f"text and reference_text have {both} tokens together; at most {MAX_TEXT_TOKENS} are possible")
        return tokens

    def _reference(self, request: Request) -> Reference | None:
        if self.cloner is None:
            return None
        if request.reference is None:
            raise refuse("reference", f"a reference is needed: {self.which} clones the voice of a recording")
        return self.cloner(request.reference, request.x_vector_only)
