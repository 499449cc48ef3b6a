"""One iteration of several models: which has its round when.

If launches return at once, all models launch before any is waited for, and the device has work meanwhile.
If a launch returns when it is done, models only wait for each other: then each has its round from prompts
to samples, and the model whose listeners are most in need goes first. While they are in need, a model whose
listeners have time has no round. A request that comes during another model's round waits for the launch in
flight, not for the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serving.engine.model_worker import ModelWorker


class Rounds:
    """take_in: takes in new requests, and returns whether there was news."""

    def __init__(
        self,
        models: Iterable[ModelWorker],
        clock: Callable[[], float],
        is_synchronous: bool,
        take_in: Callable[[], bool],
    ):
        self.models = tuple(models)
        self.clock = clock
        self.is_synchronous = is_synchronous
        self.take_in = take_in
        # The models that have a round in this iteration, and whether there was anything to launch.
        self._launched: dict[ModelWorker, bool] = {}
        self._own_s: dict[ModelWorker, float] = {}
        self._inner_s = 0.0  # of rounds within others
        self._depth = 0

    def run(self) -> list[ModelWorker]:
        """Give the models that have work one round, and return those that had one."""
        self._launched = {}
        self._own_s = {}
        busy = [model for model in self.models if model.has_work]
        if self.is_synchronous:
            for model in by_need(busy, self.clock()):
                self._round([model])
        else:
            self._round(busy)
        all_s = sum(self._own_s.values())
        for model, own_s in self._own_s.items():
            if self._launched[model]:
                model.forecaster.record_iteration(model.round.load, own_s, all_s)
        return list(self._own_s)

    def between(self) -> None:
        """Between two launches of a model: give a round to other models where a request that came just now
        has heard nothing."""
        if not self.is_synchronous or self._depth != 1 or not self.take_in():
            return
        now_s = self.clock()
        for model in by_need((model for model in self.models if model.has_work), now_s):
            if model not in self._launched and model.scheduler.is_in_need(now_s):
                self._round([model])

    def _round(self, models: list[ModelWorker]) -> None:
        models = [model for model in models if model not in self._launched]  # others had it within another's
        self._depth += 1
        for model in models:
            self._launched[model] = False
            self._timed(model, self._launch)
            self.between()
        is_alone = not any(self._launched[model] for model in models)
        for model in models:
            self._timed(model, lambda model: model.round.collect(self._launched[model], is_alone))
        self._depth -= 1

    def _launch(self, model: ModelWorker) -> None:
        self._launched[model] = model.round.launch()

    def _timed(self, model: ModelWorker, work: Callable[[ModelWorker], None]) -> None:
        began_s = self.clock()
        inner_s = self._inner_s
        work(model)
        took_s = self.clock() - began_s
        self._own_s[model] = self._own_s.get(model, 0.0) + took_s - (self._inner_s - inner_s)
        self._inner_s = inner_s + took_s if self._depth > 1 else inner_s


def by_need(models: Iterable[ModelWorker], now_s: float) -> list[ModelWorker]:
    """Return the models by deadline, the nearest first. While that one is in need, others that have time are
    left out: until they have none, so no model is passed for ever."""
    ordered = list(models)
    if len(ordered) < 2:
        return ordered
    ordered.sort(key=lambda model: model.scheduler.runs_dry_in_s(now_s))
    if not ordered[0].scheduler.is_in_need(now_s):
        return ordered
    first, *others = ordered
    return [first, *(model for model in others if not model.scheduler.has_time(now_s))]
