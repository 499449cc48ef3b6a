"""From a conversation to the LM's ids.

    [gMASK] <sop> <|system|> \n SYSTEM
    <|user|> \n text, or <|begin_of_audio|> codes <|end_of_audio|>
    <|assistant|> streaming_transcription \n                           the answer follows, and ends with <|user|>

The system line asks for the interleaved answer; a system turn replaces it. It is that of the first turn, spoken or
written. The text of a turn never gives a special token: the spelling of one is tokenized as plain text.
Source: THUDM/GLM-4-Voice at eb00ce9, web_demo.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zoo.check import check_turn, roles_of
from zoo.glm4_voice.listener import Ear
from zoo.glm4_voice.vocabulary import ASSISTANT, AUDIO_BEGIN, AUDIO_END, BEGIN, SYSTEM, USER, Vocabulary
from zoo.request import BLANK, Option, Request, RequestError, Turn, sampling_options

LINE = (
    "User will provide you with a {} instruction. Do it step by step. First, think about the instruction and "
    "respond in a interleaved manner, with 13 text token followed by 26 audio tokens."
)
SPOKEN = LINE.format("speech") + " "  # the space is in the reference
WRITTEN = LINE.format("text")
OPENING = "streaming_transcription\n"
MAX_TOKENS = 2000  # of an answer, text and audio together
OPTIONS = (
    *sampling_options(temperature=0.2, top_k=0, top_p=0.8),
    Option(
        "max_tokens", int, "the most tokens of an answer, of text and audio together", MAX_TOKENS, (1, 8192)
    ),
)
HINTS = {
    "voice": "it speaks in one voice",
    "references": "it speaks in one voice, and cannot clone",
    "instructions": "say in the turn itself how the answer shall sound",
    "language": "it answers in the language of the turn, Chinese or English",
}


@dataclass(frozen=True)
class Script:
    ids: tuple[int, ...]
    num_codes: int  # among them


class PromptWriter:
    """Turns a Request into a Script. Raises RequestError. Clips are encoded last, after everything else was
    checked."""

    def __init__(self, vocabulary: Vocabulary, ear: Ear, max_positions: int):
        self.vocabulary, self.ear, self.max_positions = vocabulary, ear, max_positions

    def __call__(self, request: Request) -> Script:
        turns = conversation(request)
        is_spoken = next(turn for turn in turns if turn.role == "user").clip is not None
        line = SPOKEN if is_spoken else WRITTEN
        if turns[0].role == "system":
            line = turns[0].text or ""
            turns = turns[1:]
        special = self.vocabulary.special
        ids = [*(special[token] for token in BEGIN), special[SYSTEM], *self._text("\n"), *self._text(line)]
        texts = [self._text(turn.text or "") for turn in turns]
        given = [turn.tokens or () for turn in turns]
        if len(ids) + sum(map(len, texts)) + sum(map(len, given)) > self.max_positions:
            raise RequestError(
                "text", f"the conversation is too long; the model has {self.max_positions} positions"
            )
        if any(not self.vocabulary.has(token) for tokens in given for token in tokens):
            raise RequestError("turns", "a turn has tokens that are not this model's")
        num_codes = 0
        opening = [special[ASSISTANT], *self._text(OPENING)]
        for turn, text in zip(turns, texts, strict=True):
            if turn.role == "assistant":
                ids += [*opening, *(text if turn.tokens is None else turn.tokens)]
                num_codes += sum(token >= self.vocabulary.first_code for token in turn.tokens or ())
                continue
            codes = [] if turn.clip is None else self.ear(turn.clip).tolist()
            num_codes += len(codes)
            ids += [special[USER], *self._text("\n"), *self._heard(codes), *text]
        return Script((*ids, *opening), num_codes)

    def _text(self, text: str) -> list[int]:
        return self.vocabulary(text)

    def _heard(self, codes: Sequence[int]) -> list[int]:
        """Return the ids of a clip's codes, or nothing without any."""
        if not codes:
            return []
        special, first = self.vocabulary.special, self.vocabulary.first_code
        return [special[AUDIO_BEGIN], *(first + code for code in codes), special[AUDIO_END]]


def conversation(request: Request) -> list[Turn]:
    """Return the turns of a request, of which the last one is the user's. Raises RequestError."""
    turns = list(request.turns)
    if request.text.strip(BLANK):
        turns.append(Turn("user", request.text))
    roles = [turn.role for turn in turns]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    is_known = set(spoken) <= {"user", "assistant"} and ("user", "user") not in pairwise(spoken)
    if not is_known or spoken[-1:] != ["user"]:
        order = "at most one system turn, then user and assistant, never two of the user in a row"
        raise RequestError(
            "turns", f"the turns are by {roles_of(turns)}; possible: {order}, and the user's last"
        )
    for turn in turns:
        check_turn(turn)
        if turn.clip is not None and (turn.text or "").strip(BLANK):
            raise RequestError("turns", "a turn has audio and text; the model reads one of them")
    return turns
