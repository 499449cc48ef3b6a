"""Builds the prompt: rows of nine ids, of which text uses only the first, delayed as a whole.

    random voice     E plain [text] text… P  [audio]                     E the end, also the begin; P eight rows of
    voice            E clone [text] text… P  [voice] 500 frames P  [audio]  pads, so that the delay mixes no two parts
    words of a clip  E heard [audio] frames… P  [text]
    a text goes on   text…
    a clip goes on   E continued [audio] frames…
    dialogue         E dialogue, then for each turn: role [voice, text or audio] … P, and at last: assistant [text]

A voice prompt has a fixed number of frames: a longer one is cut, a shorter one is followed by pads. An earlier
answer in a dialogue ends with E. Source: ESPnet's SpeechLM at 5f0a39a, train/preprocessor.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.contract import Said
from zoo.opuslm.config import Config
from zoo.opuslm.delay import DELAY, delayed, left_over
from zoo.opuslm.ids import PAD, STREAMS, Vocabulary
from zoo.opuslm.listener import MISSING, Ear
from zoo.opuslm.vocabulary import TextTokenizer
from zoo.opuslm.voices import DEFAULT
from zoo.request import BLANK, AudioClip, Option, Request, RequestError, Turn, sampling_options

PIECE_S = 12.0  # longer texts are split by sentence
MAX_FRAMES = 2048 - DELAY - 1  # of the reference's 2048 steps
MAX_WORDS = MAX_FRAMES
TEMPERATURE, TOP_K, TOP_P = 0.8, 30, 1.0
SAMPLING = sampling_options(TEMPERATURE, TOP_K, TOP_P)
TEXT_TEMPERATURE = Option(
    "text_temperature",
    float,
    "how random the words that the model writes are; 0 is greedy; a temperature that is given sets both",
    0.0,
    (0, 2),
)
ROLES = ("system", "user", "assistant")
WRITTEN = "the most tokens of a text that the model writes"
ANSWERED = "the most tokens of an answer's text, and the most frames of its speech, 50 per second"
OPTIONS = (*SAMPLING, TEXT_TEMPERATURE, Option("max_tokens", int, WRITTEN, MAX_WORDS, (1, MAX_WORDS)))
DIALOGUE_OPTIONS = (*OPTIONS[:-1], Option("max_tokens", int, ANSWERED, MAX_WORDS, (1, MAX_WORDS)))
ENGLISH = "the model was trained on English"
HINTS = {"language": ENGLISH, "turns": "dialogues need OpusLM-Dialogue"}
DIALOGUE_HINTS = {"language": ENGLISH}


@dataclass(frozen=True, eq=False)
class Script:
    """A prompt as data: the ids [T, 9] that the model reads, and those [8, 9] of a continued recording that are due
    in the first steps."""

    rows: Tensor
    num_text: int  # tokens of text in it
    num_audio: int = 0  # frames of clips in it
    before: Tensor | None = None


class PromptWriter:
    """Request -> Script. Raises RequestError. voices: the codes [F, 9] of each, by lower-case name. ear: reads
    recordings; None without XEUS."""

    def __init__(
        self, config: Config, tokenize: TextTokenizer, voices: Mapping[str, Tensor], ear: Ear | None = None
    ):
        self.config, self.tokenize, self.voices, self.ear = config, tokenize, voices, ear
        self.known = config.vocabulary

    def __call__(self, request: Request, said: Said | None = None) -> Script:
        """said: what was spoken before in a random voice that this text goes on in."""
        if self.config.is_dialogue:
            return self._dialogue(request)
        if request.output == "transcript":
            return self._heard(request)
        if request.output == "continuation":
            return self._continued(request)
        ids = self._ids(request.text)
        if request.output == "text":
            return Script(_words(ids), len(ids))
        voice = self._chosen(request, said)
        known = self.known
        task = known.plain if voice is None else known.cloned
        parts = [_words([known.end, task, known.text, *ids]), _pads(DELAY)]
        if voice is not None:
            parts += [_words([known.voice]), self._voice(voice), _pads(DELAY)]
        return Script(delayed(torch.cat([*parts, _words([known.audio])])), len(ids))

    def _heard(self, request: Request) -> Script:
        known, frames = self.known, self._frames(request.turns[0].clip)
        parts = [_words([known.end, known.heard, known.audio]), frames, _pads(DELAY), _words([known.text])]
        return Script(delayed(torch.cat(parts)), 0, len(frames))

    def _continued(self, request: Request) -> Script:
        known, clips = self.known, [turn.clip for turn in request.turns]
        frames = [self._frames(clip) for clip in clips]
        rows = torch.cat([_words([known.end, known.continued, known.audio]), *frames])
        return Script(delayed(rows), 0, sum(map(len, frames)), left_over(rows))

    def _dialogue(self, request: Request) -> Script:
        known, turns = self.known, conversation(request)
        voice = self._chosen(request, None) if request.output == "speech" else None
        texts = [self._ids(turn.text) if turn.text else [] for turn in turns]
        task = known.audio_dialogue if request.output == "speech" else known.text_dialogue
        parts, num_audio = [_words([known.end, task])], 0
        if voice is not None:
            parts += [_words([known.system, known.voice]), self._voice(voice), _pads(DELAY)]
        roles = dict(zip(ROLES, (known.system, known.user, known.assistant), strict=True))
        for turn, ids in zip(turns, texts, strict=True):
            role, is_answer = roles[turn.role], turn.role == "assistant"
            end = [known.end] if is_answer else []
            text = [_words([role, known.text, *ids, *end]), _pads(DELAY)] if ids else []
            audio: list[Tensor] = []
            if turn.clip is not None:
                frames = self._frames(turn.clip)
                num_audio += len(frames)
                audio = [_words([role, known.audio]), frames, _words(end), _pads(DELAY)]
            parts += [*text, *audio] if is_answer else [*audio, *text]
        parts.append(_words([known.assistant, known.text]))
        return Script(delayed(torch.cat(parts)), sum(map(len, texts)), num_audio)

    def _ids(self, text: str) -> list[int]:
        ids, most = self.tokenize(text), self.config.max_positions
        if len(ids) > most:
            reads = f"the model reads {most} positions in all"
            raise RequestError("text", f"text has {len(ids)} tokens; {reads}")
        return ids

    def _chosen(self, request: Request, said: Said | None) -> Tensor | None:
        """Return the codes [F, 9] of the voice, None for a random one."""
        if request.references:
            assert self.ear is not None, "without XEUS, check lets no reference through"
            return self.ear(request.references[0].clip)
        name = (request.voice or DEFAULT).lower()
        if name != DEFAULT:
            return self.voices[name]
        return None if said is None else said.frames

    def _voice(self, codes: Tensor) -> Tensor:
        """Return the rows [N, 9] of a voice's codes [F, 9]."""
        length = self.config.voice_frames
        rows = ids_of(codes[:length], self.known)
        return torch.cat((rows, _pads(length - len(rows)))) if self.config.pads_voices else rows

    def _frames(self, clip: AudioClip | None) -> Tensor:
        """Return the rows [N, 9] of a turn's clip."""
        assert clip is not None, "only turns with clips have frames"
        if self.ear is None:
            raise RequestError("turns", MISSING)
        return ids_of(self.ear(clip, "turns"), self.known)


def conversation(request: Request) -> list[Turn]:
    """Return the turns of a request, of which the last one is the user's. Raises RequestError."""
    turns = list(request.turns)
    if request.text.strip(BLANK):
        turns.append(Turn("user", request.text))
    if [turn.role for turn in turns[-1:]] != ["user"]:
        raise RequestError("turns", "the last turn is not the user's, so there is nothing to answer")
    if any(turn.role == "system" for turn in turns[1:]):
        raise RequestError("turns", "a system turn is not the first one; only the first one can be")
    for turn in turns:
        if turn.role not in ROLES:
            raise RequestError("turns", f"a turn is by {turn.role!r}; possible: {', '.join(ROLES)}")
        if not (turn.text or "").strip(BLANK) and turn.clip is None:
            raise RequestError("turns", f"a turn by {turn.role} has neither text nor audio")
        if turn.role == "system" and turn.clip is not None:
            raise RequestError("turns", "a system turn has audio; a voice to speak in is a reference")
    return turns


def ids_of(codes: Tensor, known: Vocabulary) -> Tensor:
    """Return the ids of codes [F, 9]. Cluster 0 becomes a pad, as in the reference, which adds the first id only
    to values that are not zero; its codebooks count on, so that only the first one has a zero."""
    first = known.codec + known.num_codes * torch.arange(STREAMS - 1)
    ids = codes + torch.cat((torch.tensor([known.ssl]), first))
    ids[:, 0] = torch.where(codes[:, 0] == 0, PAD, ids[:, 0])
    return ids


def _words(ids: Sequence[int]) -> Tensor:
    """Return rows [T, 9] with ids in their first stream."""
    rows = _pads(len(ids))
    rows[:, 0] = torch.tensor(ids, dtype=rows.dtype)
    return rows


def _pads(num: int) -> Tensor:
    return torch.full((num, STREAMS), PAD)
