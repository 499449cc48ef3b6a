"""A toy whose second lane of guidance opens late: it writes a text first, and hums then. The second lane knows
nothing of the text. It has read as many equal rows as the first lane has read rows when it opens, and then reads
the same frames.

    step      0   1  ...   t        t+1   t+2   t+3   t+4  ...
    lane 0    w0  w1 ...   opens    .     .     f0    f1         runs from the start
    lane 1    ............................ n n  f0    f1         n: a row that all requests share
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from toy import NULL
from toy_delay import LATER, MAX_TEXT, TextAndAudioState, TextAndAudioToy

from zoo.contract import Lane, Prompt
from zoo.nn.keys import prefix_key
from zoo.request import Request


class LateToy(TextAndAudioToy):
    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, variant="late", opens_late=True)

    def prompt(self, request: Request) -> Prompt:
        prompt = super().prompt(request)
        assert prompt.null is not None, "the toy is guided"
        prompt.null = None
        prompt.lead_steps = MAX_TEXT
        prompt.opens_lane = prompt.slot["cfg_scale"] != 1
        return prompt

    def second_lane(self, length: int) -> Lane:
        row = self.bytes.weight[NULL[0]]
        return Lane(row.expand(length, -1), (prefix_key("null"),) * length)

    def emit(self, state: TextAndAudioState, slots: Tensor, h: Tensor) -> None:
        was_text, alive = state.begins[slots] == LATER, ~state.done[slots]
        super().emit(state, slots, h)
        begins_now = was_text & (state.begins[slots] != LATER) & alive
        state.open_lane(slots, begins_now & (state.cfg_scale[slots] != 1))


TOYS = {"toy_late": LateToy}
