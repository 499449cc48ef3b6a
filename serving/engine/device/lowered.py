"""A family's step, prefill and render, lowered for its device, and their recorded launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from compile_cache import saved
from compile_cache.artifacts import Entry
from compile_cache.graphs import Graphs
from compile_cache.lower import any_size, lower, with_parts
from compile_cache.saved import Saved
from compile_cache.strategy import Eager, Lowering, Part, Parts, Whole
from serving.engine.device.streams import Streams
from zoo.contract import Batch, Family, State, View


class Lowered:
    """how: of the step, the prefill and the render. streams: on which they are recorded."""

    def __init__(self, family: Family[Any], state: State, streams: Streams, is_recorded: bool, compile: bool):
        self.family = family
        self.state = state
        strategy = family.strategy
        how = (strategy.step, strategy.prefill, strategy.render)
        if is_recorded:
            how = (strategy.step, strategy.gpu_prefill, strategy.gpu_render)
        self.how: tuple[Lowering, ...] = how if compile else (Eager(), Eager(), Eager())
        # A step and a render may run at the same time, so they share no memory.
        self.step_graphs = Graphs(family.device, streams.lm.pool)
        self.render_graphs = Graphs(family.device, streams.renders.pool)
        step, prefill, render = self.how
        self._step = lower(family.step, step)
        self._mixed = lower(family.step, step)  # with prompts, which is another graph
        self._hidden = lower(family.hidden, prefill)
        # One for each length bucket, since Dynamo keeps at most eight graphs of a function. A verb in parts
        # is lowered once.
        lengths = family.spec.window.lengths or (0,)
        if isinstance(render, Parts):
            self._render = dict.fromkeys(lengths, lower(family.render, render))
        else:
            self._render = {length: lower(family.render, render) for length in lengths}

    @property
    def is_compiled(self) -> bool:
        return any(how != Eager() for how in self.how)

    @property
    def graph_misses(self) -> int:
        return self.step_graphs.misses + self.render_graphs.misses

    def keep_in(self, entry: Entry, codec: str) -> None:
        """Take the graphs of launches that will be recorded from an entry of the cache, and save those that
        it lacks. codec: the precision of renders."""
        if self.state.arena is not None:
            any_size((self.state.arena,), 0, "pages")  # the same graphs for every size of the KV memory
        step, prefill, render = self.how
        if step == Whole():
            self._step = Saved(self.family.step, "step", entry)
            self._mixed = Saved(self.family.step, "mixed", entry)
        if prefill == Whole():
            self._hidden = Saved(self.family.hidden, "prefill", entry)
        if render == Whole():
            self._render = dict.fromkeys(self._render, Saved(self.family.render, f"render-{codec}", entry))
        elif isinstance(render, Parts):

            def kept(method: Callable[..., Any], part: Part) -> Saved:
                return Saved(method, f"{part.place}-{codec}", entry)

            in_parts = with_parts(self.family.render, render.parts, kept)
            self._render = dict.fromkeys(self._render, in_parts)

    def take_step(self, entry: Entry, batch: Batch) -> None:
        """Load the saved step, which holds for every size, or compile it for such a batch and save it. If
        neither is possible, each step is traced."""
        load = partial(saved.loaded, self.family.step)
        make = partial(saved.compiled, self.family.step, (self.state, batch))
        self._step = saved.taken(entry, "step.saved", load, make) or self._step

    def step(self, batch: Batch) -> tuple[Tensor]:
        return (self._step(self.state, batch),)

    def mixed(self, batch: Batch) -> tuple[Tensor]:
        return (self._mixed(self.state, batch),)

    def prefill(self, inputs: Tensor, batch: Batch) -> tuple[()]:
        self._hidden(inputs, batch)
        return ()

    def render(self, view: View) -> tuple[Tensor, ...]:
        samples, valid = self._render[view.length](self.state, view)
        return samples, valid
