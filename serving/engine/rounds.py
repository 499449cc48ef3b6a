"""Whose round comes when: one turn of several models.

Where launches return at once, all models launch before any is waited for, and the device has work meanwhile. Where a launch
returns when it is done, models only wait for each other: then each has its round from prompts to samples, whose listeners are
in need the first, and while they are, a model whose listeners have time has no round. Who comes during another model's round
waits for the launch under way, not for the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serving.engine.model_worker import ModelWorker


class Rounds:
    """take_in: takes in who has come, and says whether somebody has."""

    def __init__(
        self,
        models: Iterable[ModelWorker],
        clock: Callable[[], float],
        is_synchronous: bool,
        take_in: Callable[[], bool],
    ):
        self.models, self.clock = tuple(models), clock
        self.is_synchronous, self.take_in = is_synchronous, take_in
        self._launched: dict[
            ModelWorker, bool
        ] = {}  # who has a round in this turn, and whether there was anything to launch
        self._own_s: dict[ModelWorker, float] = {}
        self._inner_s = 0.0  # of rounds within others
        self._depth = 0

    def run(self) -> list[ModelWorker]:
        """One round of those that have work -> who had one."""
        self._launched, self._own_s = {}, {}
        busy = [model for model in self.models if model.has_work]
        if self.is_synchronous:
            for model in by_need(busy, self.clock()):
                self._round([model])
        else:
            self._round(busy)
        all_s = sum(self._own_s.values())
        for model, own_s in self._own_s.items():
            if self._launched[model]:
                model.forecaster.record_turn(model.load, own_s, all_s)
        return list(self._own_s)

    def between(self) -> None:
        """Between two launches of a model: others have their round now, where somebody who came just now has heard nothing."""
        if not self.is_synchronous or self._depth != 1 or not self.take_in():
            return
        now = self.clock()
        for model in by_need((model for model in self.models if model.has_work), now):
            if model not in self._launched and model.scheduler.is_in_need(now):
                self._round([model])

    def _round(self, models: list[ModelWorker]) -> None:
        models = [model for model in models if model not in self._launched]  # who had it within another's
        self._depth += 1
        for model in models:
            self._launched[model] = False
            self._timed(model, self._launch)
            self.between()
        is_alone = not any(self._launched[model] for model in models)
        for model in models:
            self._timed(model, lambda model: model.collect(self._launched[model], is_alone))
        self._depth -= 1

    def _launch(self, model: ModelWorker) -> None:
        self._launched[model] = model.launch()

    def _timed(self, model: ModelWorker, work: Callable[[ModelWorker], None]) -> None:
        began_s, inner_s = self.clock(), self._inner_s
        work(model)
        took_s = self.clock() - began_s
        self._own_s[model] = self._own_s.get(model, 0.0) + took_s - (self._inner_s - inner_s)
        self._inner_s = inner_s + took_s if self._depth > 1 else inner_s


def by_need(models: Iterable[ModelWorker], now: float) -> list[ModelWorker]:
    """The nearest deadline first. While that one is in need, others that have time are left out: until they have
    none, so nobody is passed for ever."""
    ordered = list(models)
    if len(ordered) < 2:
        return ordered
    ordered.sort(key=lambda model: model.scheduler.dry_in_s(now))
    if not ordered[0].scheduler.is_in_need(now):
        return ordered
    first, *others = ordered
    return [first, *(model for model in others if not model.scheduler.has_time(now))]
