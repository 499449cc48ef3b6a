"""The order of the language model's inputs, as a list of keys. A key is an id and its table, or stands for a
sampled code.

    full         sos  text…  task  codes of the prompt…  sampled…
    interleaved  sos  5 text tokens, 15 codes  5 text tokens, 15 codes  …  rest of the text  task  sampled…

In the interleaved order the text may still be arriving. Its codes are first those of the prompt, then sampled
ones. After each fifteenth code the model has used all text that it has read; the reference samples a "fill"
there, which is never read. If the text ends before the prompt's codes do, the rest of them follows task, as
in training. Source: FunAudioLLM/CosyVoice, cosyvoice/llm/llm.py, Qwen2LM.prepare_lm_input_target and
inference_bistream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

TEXT, CONTROL, CODE = range(NUM_TABLES := 3)
SOS, TASK = range(2)  # rows of the control table
TEXT_GROUP, CODE_GROUP = 5, 15
DRAWN, UNKNOWN = -1, -2  # a sampled code; text that has not arrived


def keys(table: int, ids: Iterable[int]) -> list[int]:
    """Return the keys of ids in a table."""
    return [NUM_TABLES * index + table for index in ids]


FIRST, LAST = keys(CONTROL, (SOS, TASK))


def full(text: Sequence[int], codes: Sequence[int]) -> list[int]:
    """Return the keys of the full order, up to the first sampled code."""
    return [FIRST, *keys(TEXT, text), LAST, *keys(CODE, codes)]


@dataclass(frozen=True)
class Interleaved:
    """The state of an interleaved order: the number of text tokens so far. codes: all codes of the prompt."""

    codes: tuple[int, ...]
    num_text: int = 0

    def fed(self, text: Sequence[int]) -> tuple[Interleaved, list[int]]:
        """Return the state after more text, and the keys that the text adds."""
        more: list[int] = []
        for i, token in enumerate(text, self.num_text + 1):
            more += keys(TEXT, [token])
            if i % TEXT_GROUP == 0:
                codes = self.codes[: i // TEXT_GROUP * CODE_GROUP][(i // TEXT_GROUP - 1) * CODE_GROUP :]
                more += keys(CODE, codes) + [DRAWN] * (CODE_GROUP - len(codes))
        return replace(self, num_text=self.num_text + len(text)), more

    def end(self) -> list[int]:
        """Return the keys that follow the last text token."""
        return [LAST, *keys(CODE, self.codes[self.num_text // TEXT_GROUP * CODE_GROUP :])]

    def max_given(self, num_frames: int) -> int:
        """Return an upper bound of the given keys that precede the sampled code number `num_frames`."""
        num_groups = (len(self.codes) + num_frames) // CODE_GROUP + 2
        return len(self.codes) + TEXT_GROUP * num_groups + 1
