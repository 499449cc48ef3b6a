"""An engine driven by hand, and text that arrives in portions."""

from __future__ import annotations

from typing import Any

import numpy as np
from models import Clock, Listener

from serving.engine.engine import Engine
from zoo.contract import Family
from zoo.request import Request

# name -> (step, number of tokens that arrive after it); the end of the text arrives with the last tokens
PORTIONS: dict[str, list[tuple[int, int]]] = {
    "one by one": [(turn, 1) for turn in range(60)],
    "in bursts": [(2, 3), (3, 5), (30, 60)],
    "after pauses": [(20 * i, 2) for i in range(1, 40)],
    "all before it is admitted": [(0, 60)],
}


class Speaking:
    """An engine that counts its steps (`turns`) and records the slots of each launch (`steps`)."""

    def __init__(self, ours: Family[Any], max_slots: int = 3, **settings: Any):
        self.engine = Engine(ours, max_slots=max_slots, compile=False, clock=Clock(), **settings)
        [self.model] = self.engine.models.values()
        self.turns = 0
        self.steps: list[list[int]] = []
        step = self.model.runner.step

        def counted(slots: np.ndarray) -> Any:
            self.steps.append(slots.tolist())
            return step(slots)

        self.model.runner.step = counted

    def begin(self, request: Request, name: str = "a") -> Listener:
        listener = Listener()
        self.engine.speak(name, request, listener)
        return listener

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.turn()
            self.turns += 1
            self.engine.clock.now_s += 0.03


def speak_in_portions(
    speaking: Speaking, request: Request, rest: list[int], portions: list[tuple[int, int]], name: str = "a"
) -> Listener:
    listener, rest, portions = speaking.begin(request, name), list(rest), list(portions)
    while listener.end is None:
        while portions and portions[0][0] <= speaking.turns and rest:
            count = portions.pop(0)[1]
            speaking.engine.feed(name, rest[:count], is_last=count >= len(rest))
            del rest[:count]
        speaking.turn()
        assert speaking.turns < 2000, "the speech does not end"
    return listener
