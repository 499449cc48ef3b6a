"""From a conversation to the LM's ids.

    <|BOT|>system \n SYSTEM <|EOT|>
    <|BOT|>human \n text <|EOT|>            or <audio_start> rows <audio_end>, for every 25 s of a clip, then the text
    <|BOT|>assistant \n                     the answer follows, and ends with <|EOT|>

A spoken answer begins behind <tts_start>. A thought begins with <think>, and <tts_start> follows it. With the base
model there are no roles: texts and clips follow each other. The text of a turn never gives a special token:
the spelling of one is tokenized as plain text.
Source: stepfun-ai/Step-Audio2 at 7c58630, stepaudio2.py and examples*.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from zoo.check import check_turn, roles_of
from zoo.nn.keys import prefix_key
from zoo.request import BLANK, Option, Request, RequestError, Turn, sampling_options
from zoo.step_audio2.listener import Ear
from zoo.step_audio2.vocabulary import (
    AUDIO_END,
    AUDIO_PATCH,
    AUDIO_START,
    BEGIN,
    END,
    SPEECH_START,
    THOUGHT_END,
    Vocabulary,
)

MAX_TOKENS = 4096  # of an answer, text and audio together
MOST_TOKENS = 16_384
ROLES = {"user": "human", "tools": "tool_json_schemas", "tool": "input"}
THOUGHT = "\n<think>\n"
BEHIND_THOUGHT = THOUGHT_END + "\n\n"
TRANSCRIBE = "请记录下你所听到的语音内容。"
CHAT, PLAIN = "chat", "plain"
OPTIONS = (
    *sampling_options(temperature=0.7, top_k=0, top_p=0.9, repetition_penalty=1.05),
    Option(
        "max_tokens",
        int,
        "the most tokens of an answer, of text and audio together",
        MAX_TOKENS,
        (1, MOST_TOKENS),
    ),
    Option("thinks", bool, "whether the model thinks before it answers, for Step-Audio 2 mini Think", False),
    Option(
        "template",
        str,
        "chat: turns with roles; plain: texts and clips alone, for Step-Audio 2 mini Base",
        CHAT,
        choices=(CHAT, PLAIN),
    ),
)
HINTS = {
    "instructions": "say in a system turn how the answer shall sound",
    "language": "it answers in the language of the turn, Chinese or English",
    "references": "or put the original's assets/default_*.wav into the model's directory",
}


@dataclass(frozen=True)
class Script:
    """ids: of all positions. keys: by which equal positions are found; where the position is a row of a clip, its key
    says of which. heard: the place of each clip's rows, and the rows [N, D]."""

    ids: tuple[int, ...]
    keys: tuple[int, ...]
    heard: tuple[tuple[int, Tensor], ...]

    @property
    def num_heard(self) -> int:
        return sum(len(rows) for _, rows in self.heard)


class PromptWriter:
    """Turns a Request into a Script. Raises RequestError. Clips are encoded last, after everything else was checked."""

    def __init__(self, vocabulary: Vocabulary, ear: Ear, max_positions: int):
        self.vocabulary, self.ear, self.max_positions = vocabulary, ear, max_positions

    def __call__(self, request: Request, values: dict[str, object]) -> Script:
        turns = conversation(request)
        is_chat = values["template"] == CHAT
        write = self._chat_turn if is_chat else self._plain_turn
        pieces: list[list[int] | Turn] = []
        for turn in turns:
            pieces += write(turn)
        pieces.append(self._opening(request.output == "speech", bool(values["thinks"]), is_chat))
        known = sum(len(piece) for piece in pieces if isinstance(piece, list))
        if known > self.max_positions:
            raise RequestError(
                "text", f"the conversation is too long; the model has {self.max_positions} positions"
            )
        return self._script(pieces)

    def _script(self, pieces: Sequence[list[int] | Turn]) -> Script:
        ids: list[int] = []
        keys: list[int] = []
        heard: list[tuple[int, Tensor]] = []
        special = self.vocabulary.special
        for piece in pieces:
            if isinstance(piece, list):
                ids += piece
                keys += piece
                continue
            assert piece.clip is not None, piece
            clip = self.ear(piece.clip)
            for i, rows in enumerate(clip.pieces):
                heard.append((len(ids) + 1, rows))
                ids += [special[AUDIO_START], *[special[AUDIO_PATCH]] * len(rows), special[AUDIO_END]]
                names = [prefix_key(clip.name, i, k) for k in range(len(rows))]
                keys += [special[AUDIO_START], *names, special[AUDIO_END]]
        return Script(tuple(ids), tuple(keys), tuple(heard))

    def _chat_turn(self, turn: Turn) -> list[list[int] | Turn]:
        special = self.vocabulary.special
        head, end = f"{ROLES.get(turn.role, turn.role)}\n", [special[END]]
        if turn.tokens is not None:
            return [[special[BEGIN], *self.vocabulary(head), *self.answer(turn.tokens), *end]]
        if turn.clip is None:
            return [[special[BEGIN], *self.vocabulary(head + (turn.text or "")), *end]]
        text = self.vocabulary(turn.text or "")
        return [[special[BEGIN], *self.vocabulary(head)], turn, [*text, *end]]

    def _plain_turn(self, turn: Turn) -> list[list[int] | Turn]:
        if turn.tokens is not None:
            return [self.answer(turn.tokens)]
        text = self.vocabulary(turn.text or "")
        return [text] if turn.clip is None else [text, turn]

    def _opening(self, is_spoken: bool, thinks: bool, is_chat: bool) -> list[int]:
        text = f"{BEGIN}assistant\n" if is_chat else ""
        if thinks:
            return self.vocabulary.own(text + THOUGHT)
        return self.vocabulary.own(text + (SPEECH_START if is_spoken else ""))

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """Return the ids of an earlier answer, without its thought. Raises RequestError."""
        vocabulary = self.vocabulary
        if any(not vocabulary.has(token) for token in tokens):
            raise RequestError("turns", "a turn has tokens that are not this model's")
        start = vocabulary.speech_start
        kept = list(tokens[tokens.index(start) + 1 :] if start in tokens else self._behind_thought(tokens))
        is_spoken = start in tokens or any(token >= vocabulary.first_hidden for token in kept)
        return [start, *kept] if is_spoken else kept

    def _behind_thought(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a text behind the end of its thought, or all of them without one."""
        end, spelled = THOUGHT_END.encode(), b""
        for i, token in enumerate(tokens, start=1):
            spelled = spelled[-len(end) :] + self.vocabulary.bytes_of(token)
            if end in spelled:
                return tokens[i:]
        return tokens


def conversation(request: Request) -> list[Turn]:
    """Return the turns of a request, of which the last one is the user's or a tool's. Raises RequestError."""
    if request.output == "transcript":
        return [Turn("system", TRANSCRIBE), *request.turns]
    turns = list(request.turns)
    if request.text.strip(BLANK):
        turns.append(Turn("user", request.text))
    _check_order(turns)
    for turn in turns:
        check_turn(turn)
    return turns


BEHIND = {
    "": ("system", "tools", "user", "assistant"),
    "system": ("tools", "user", "assistant"),
    "tools": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "assistant", "tool"),
    "tool": ("tool", "assistant", "user"),
}


def _check_order(turns: Sequence[Turn]) -> None:
    """Raise RequestError for roles that do not follow each other in a conversation."""
    roles = [turn.role for turn in turns]
    is_known = all(role in BEHIND[before] for before, role in pairwise(("", *roles)))
    if not is_known or roles[-1] not in ("user", "tool"):
        order = "at most one system turn and one with tools, then user, assistant and tools' results"
        never = "never two of the user in a row, and not the assistant's last"
        raise RequestError("turns", f"the turns are by {roles_of(turns)}; possible: {order}, {never}")
