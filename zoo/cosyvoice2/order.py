"""What the language model reads, as keys in one list: an id with the table it is looked up in, or a code that is drawn.

    full         sos  text…  task  codes of the prompt…  drawn…
    interleaved  sos  5 of the text, 15 codes  5 of the text, 15 codes  …  what is left of the text  task  drawn…

In the interleaved order text may still be on its way. Its codes are the prompt's as long as there are any, then drawn ones.
Behind the fifteenth the model is done with the text it knows (the reference draws "fill" there, which no one reads). What is
left of the prompt's codes when the text ends follows behind task, as in training. Source: FunAudioLLM/CosyVoice,
cosyvoice/llm/llm.py, Qwen2LM.prepare_lm_input_target and inference_bistream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

TEXT, CONTROL, CODE = range(NUM_TABLES := 3)
SOS, TASK = range(2)  # rows of the control table
TEXT_GROUP, CODE_GROUP = 5, 15
DRAWN, UNKNOWN = -1, -2  # a code of the speech; text that is still on its way


def keys(table: int, ids: Iterable[int]) -> list[int]:
    return [NUM_TABLES * index + table for index in ids]


FIRST, LAST = keys(CONTROL, (SOS, TASK))


def full(text: Sequence[int], codes: Sequence[int]) -> list[int]:
    return [FIRST, *keys(TEXT, text), LAST, *keys(CODE, codes)]


@dataclass(frozen=True)
class Interleaved:
    """How far a text has come. codes: all of the prompt's."""

    codes: tuple[int, ...]
    num_text: int = 0

    def fed(self, text: Sequence[int]) -> tuple[Interleaved, list[int]]:
        """-> what follows of more text, and how far it has come with it."""
        more: list[int] = []
        for i, token in enumerate(text, self.num_text + 1):
            more += keys(TEXT, [token])
            if i % TEXT_GROUP == 0:
                codes = self.codes[: i // TEXT_GROUP * CODE_GROUP][(i // TEXT_GROUP - 1) * CODE_GROUP :]
                more += keys(CODE, codes) + [DRAWN] * (CODE_GROUP - len(codes))
        return replace(self, num_text=self.num_text + len(text)), more

    def end(self) -> list[int]:
        """What follows behind the last of the text."""
        return [LAST, *keys(CODE, self.codes[self.num_text // TEXT_GROUP * CODE_GROUP :])]

    def max_given(self, num_frames: int) -> int:
        """The most keys that are not drawn before `num_frames` are."""
        num_groups = (len(self.codes) + num_frames) // CODE_GROUP + 2
        return len(self.codes) + TEXT_GROUP * num_groups + 1
