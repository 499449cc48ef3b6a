"""Rehearse a family on a GPU that the machine does not have: trace, lower and count its launches, build every
kernel, and list what makes the host wait.

    python benchmarks/rehearse.py higgs_v3 [--size tiny] [--card h100] [--slots 1 16 64] [--weights fp8] [--json OUT]

Needs `pip install -e .[rehearse]` (the triton wheel for the torch version, 200 MB) and g++, but no CUDA. It
runs the project's own path, `zoo.load`, `Arena`, `Runner` and `lower`, over fake tensors with the shapes of a
demo checkpoint, which takes minutes. The exit status is 1 if a graph breaks, a kernel does not build or a launch
makes the host wait. `benchmarks/predict.py` turns the JSON into times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch._dynamo.utils import counters

import zoo
from benchmarks.rehearsal import kept, shapes
from benchmarks.rehearsal.cards import CARDS
from benchmarks.rehearsal.costs import APART, CLIP_S, merged
from benchmarks.rehearsal.device import pretend
from benchmarks.rehearsal.kernels import Built, build, lowering
from benchmarks.rehearsal.l2 import ASSUMED as L2_ASSUMED
from benchmarks.rehearsal.l2 import L2
from benchmarks.rehearsal.launches import Launch, Log
from benchmarks.rehearsal.parts import Rehearsed
from compile_cache import choices
from compile_cache.strategy import Eager, Parts
from serving.engine.device.prepare_for_host import DEPTHS
from serving.engine.device.runner import CODECS
from serving.engine.memory.memory_plan import MemoryPlan, plan
from serving.engine.schedule.numbers import STREAMING_PREFILL_TOKENS
from zoo.contract import Window
from zoo.nn import fp8, frame_stack
from zoo.nn.swiglu import WAYS

CONTEXT = 500  # positions of every slot
PARTS = ("step", "mixed", "prefill", "render", "listen")
PROMPT_TOKENS, PROMPTS = 100, (1, 3)  # of a prefill
MIXED_PROMPTS = (1, 2)  # with a step of all slots


@dataclass
class Part:
    """One launch of the server: a step, a prefill or a render of `slots` slots, or the encoder of one clip."""

    name: str
    slots: int
    frames: int = 0
    length: int = 0
    launches: Counter[Launch] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)

    def num(self, *kinds: str) -> int:
        return sum(n for launch, n in self.launches.items() if launch.kind in kinds)

    def as_json(self) -> dict[str, Any]:
        """Return the form that `costs.Counts` reads."""
        facts = {"name": self.name, "slots": self.slots, "frames": self.frames, "length": self.length}
        rows = merged([(n, *launch[1:]) for launch, n in self.launches.items()])
        return facts | {"waits": self.waits, "copies": self.copies, "launches": rows}


@dataclass
class Rehearsal:
    family: str
    size: str
    card: str
    codec: str
    frame_s: float
    sample_rate_hz: int
    steps_per_frame: int
    window: Window
    memory: MemoryPlan  # with the largest number of slots
    num_lowered: int  # launches of different shapes that are compiled: the expected number of graphs
    graphs: int = 0
    graphs_again: int = 0  # those that the next start compiles, although they are saved
    again_cpu_s: float = 0.0
    breaks: dict[str, int] = field(default_factory=dict)
    lowering_cpu_s: float = 0.0
    parts: list[Part] = field(default_factory=list)
    built: Built | None = None

    @property
    def problems(self) -> list[str]:
        found = [f"the graph breaks: {reason}" for reason in self.breaks]
        if self.graphs != self.num_lowered:
            found.append(f"{self.graphs} graphs instead of {self.num_lowered}")
        if self.graphs_again:
            found.append(f"the next start compiles {self.graphs_again} graphs again")
        for part in self.parts:
            found += [f"{part.name} waits: {what}, {n} times" for what, n in part.waits.items()]
        if self.built is not None:
            found += [f"{name} does not build: {error}" for name, error in self.built.failed.items()]
        return sorted(set(found))

    def as_json(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
        nested = {
            "window": asdict(self.window),
            "memory": asdict(self.memory),
            "built": None if self.built is None else asdict(self.built),
            "parts": [part.as_json() for part in self.parts],
        }
        return vars(self) | versions | nested


def rehearse(
    family_name: str,
    size: str,
    card_name: str,
    slots: Sequence[int],
    directory: Path,
    codec: str = "float32",
    is_built: bool = True,
    parts: Collection[str] = PARTS,
    weights: str = "published",
    is_largest_window: bool = False,
    depth: str = "layers",
    uncompiled: Collection[str] = (),
) -> Rehearsal:
    """Run a model's parts on a pretended card. is_largest_window: renders have windows of the largest size
    and length only; uncompiled: places of parts of a render that run as they are written."""
    path = shapes.write(family_name, size, directory / f"{family_name}-{size}")
    log = Log(cache=L2(CARDS[card_name].L2_cache_size))
    with (
        pretend(card_name),
        shapes.fake() as mode,
        lowering(log) as kernels,
        torch.inference_mode(),
        choices.assumed(WAYS[0]),
    ):

        def loaded(memory: int = 1) -> Rehearsed:
            family = shapes.load(path, mode)
            if weights == "fp8":
                fp8.round_weights(family)
            if depth == "whole":
                frame_stack.join(family)
            return Rehearsed(family, slots, CONTEXT, log, codec, is_largest_window, memory, uncompiled)

        runner = loaded(memory=2)
        family, spec = runner.family, runner.family.spec
        # a tensor that was made from an array has symbols for its sizes
        memory = MemoryPlan(**{name: int(n) for name, n in asdict(plan(family, max(slots))).items()})
        facts = 1 / spec.frame_rate_hz, spec.sample_rate_hz, spec.steps_per_frame, spec.window, memory
        result = Rehearsal(family_name, size, card_name, codec, *facts, num_lowered(runner, parts))
        with _lowered(result), kept.entry(directory / "kept") as entry:
            runner.lower(parts, entry)
        traced = counters["stats"]["unique_graphs"]
        runner = loaded()  # The count is of the files that the next start loads, with other KV memory.
        with kept.entry(directory / "kept") as entry:
            began_s = time.process_time()
            runner.lower(parts, entry)
            result.again_cpu_s = round(time.process_time() - began_s, 1)
        for num_slots in slots if "step" in parts else ():
            runner.count_step(num_slots)
            result.parts.append(_part(log, "step", num_slots))
            with choices.assumed(WAYS[1]):
                runner.count_step(num_slots)
            if log.launches != result.parts[-1].launches:
                result.parts.append(_part(log, APART, num_slots))
        for num_prompts in (n for n in PROMPTS if n <= max(slots) and "prefill" in parts):
            runner.count_prefill([PROMPT_TOKENS] * num_prompts)
            result.parts.append(_part(log, "prefill", num_prompts))
        lanes = 1 if spec.opens_late else spec.lanes
        for num_prompts in (n for n in MIXED_PROMPTS if n <= max(slots) and "mixed" in parts):
            if num_prompts * lanes * PROMPT_TOKENS <= STREAMING_PREFILL_TOKENS:
                runner.count_mixed(max(slots), [PROMPT_TOKENS] * num_prompts)
                result.parts.append(_part(log, "mixed", num_prompts))
        # A render's bytes and FLOPs are linear between the fewest slots and the most.
        ends = sorted({min(slots), max(slots)}) if "render" in parts else ()
        for num_slots, frames in product(ends, runner.windows):
            for length in runner.lengths:
                runner.count_render(num_slots, frames, length)
                result.parts.append(_part(log, "render", num_slots, frames, length))
        if "listen" in parts and spec.listens and spec.keeps_answers:  # it holds conversations
            runner.count_listen(CLIP_S)
            result.parts.append(_part(log, "listen", 1))
        result.graphs_again = counters["stats"]["unique_graphs"] - traced
        if is_built:
            result.built = build(kernels)
    return result


def num_lowered(runner: Rehearsed, parts: Collection[str] = PARTS) -> int:
    """Return the number of graphs that the warm-up should compile.

    The step and each shape of a render have a graph for one slot, if that size is recorded, and one for more.
    Where second lanes open late, a step of one slot has one without and one with its second lane.
    A prefill has one graph. Each part of a render has its graphs for all shapes together."""
    spec, how_rendered, sizes = runner.family.spec, runner.lowered.how[2], runner.sizes
    buckets = [sizes.render_buckets(frames) for frames in runner.windows]
    renders = sum(map(num_graphs, buckets)) * len(runner.lengths)
    if isinstance(how_rendered, Parts):
        renders = num_graphs([size for few in buckets for size in few]) * len(how_rendered.parts)
    steps = num_graphs(sizes.buckets)
    if spec.opens_late:
        steps = len({(size > 1, size + num > 1) for size in sizes.buckets for num in sizes.open_rows(size)})
    shapes = steps, num_graphs(sizes.mixed_buckets), 1, renders
    ways = runner.lowered.how[:1] + runner.lowered.how
    known = zip(PARTS[:4], shapes, ways, strict=True)  # encoders are eager
    return sum(n for part, n, how in known if how != Eager() and part in parts)


def num_graphs(sizes: Sequence[int]) -> int:
    return len({size > 1 for size in sizes})


@contextmanager
def _lowered(result: Rehearsal) -> Iterator[None]:
    breaks, began_s = Counter(counters["graph_break"]), time.process_time()
    result.graphs = counters["stats"]["unique_graphs"]
    yield
    result.graphs = counters["stats"]["unique_graphs"] - result.graphs
    result.breaks = dict(counters["graph_break"] - breaks)
    result.lowering_cpu_s = round(time.process_time() - began_s, 1)


def _part(log: Log, name: str, slots: int, frames: int = 0, length: int = 0) -> Part:
    return Part(name, slots, frames, length, *log.counted())


def report(result: Rehearsal) -> Iterator[str]:
    """Yield the lines of the printed report."""
    memory = result.memory
    gb = [f"{size / 1e9:.2f} GB" for size in (memory.weights, memory.state, memory.kv_cache)]
    yield f"{result.family} {result.size} on a pretended {result.card}: weights {gb[0]}, state {gb[1]}, KV cache {gb[2]}"
    yield f"{result.graphs} graphs, {sum(result.breaks.values())} breaks, lowered in {result.lowering_cpu_s:.0f} CPU-s"
    yield f"the next start: {result.graphs_again} graphs, {result.again_cpu_s:.1f} CPU-s"
    for part in result.parts:
        gbytes = sum(n * launch.bytes for launch, n in part.launches.items()) / 1e9
        beyond = sum(n * launch.memory_bytes for launch, n in part.launches.items()) / 1e9
        gflop = sum(n * launch.flops for launch, n in part.launches.items()) / 1e9
        shape = f" {part.frames} frames" * bool(part.frames) + f" of {part.length}" * bool(part.length)
        kinds = (
            f"{part.num('triton')} generated, {part.num('extern')} called, {part.num('recorded')} recorded eager, "
            f"{part.num('eager')} launched by Python each time"
        )
        waits = f"{part.waits.total()} waits, {part.copies.total()} blocking copies"
        yield f"{part.name}{shape}, {part.slots} slots: {kinds}; {gbytes:.3f} GB, {beyond:.3f} beyond L2, {gflop:.1f} GFLOP; {waits}"
    yield f"  beyond L2: {L2_ASSUMED}"
    for part in {part.name: part for part in result.parts}.values():
        yield from (f"  {part.name}: {what}, {n} times" for what, n in (part.waits | part.copies).items())
    if result.built is not None:
        built = result.built
        yield f"{built.num_kernels} kernels, {len(built.failed)} failed"
        spilled = ", ".join(built.spilled) or "none"
        yield f"at most {built.max_registers} registers, {built.max_shared_bytes} bytes shared; registers spilled: {spilled}"
    yield from result.problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=zoo.families())
    parser.add_argument(
        "--size", default="tiny", help="size of the family's demo checkpoint; full is the published one"
    )
    parser.add_argument("--card", default="h100", choices=CARDS)
    parser.add_argument("--codec", default="float32", choices=CODECS)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--weights", default="published", choices=("published", "fp8"))
    parser.add_argument("--depth", default="layers", choices=DEPTHS)
    parser.add_argument(
        "--no-build", action="store_true", help="only count: generate kernels without building them"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to lower and count")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wanted = options.family, options.size, options.card, options.slots
        how = options.codec, not options.no_build, options.parts, options.weights
        result = rehearse(*wanted, Path(directory), *how, depth=options.depth)
    print("\n".join(report(result)), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result.as_json()) + "\n")
    sys.exit(bool(result.problems))


if __name__ == "__main__":
    main()
