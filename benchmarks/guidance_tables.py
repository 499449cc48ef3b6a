"""Measure OpusLM and Bagpiper as the paper of their vLLM fork does: throughput next to the native loop, guided next to
unguided, and first audio next to a whole file.

    python -m benchmarks.guidance_tables [--family bagpiper opuslm] [--size mid] [--requests 1 8 32] [--words 32] [--frames 50]
    python -m benchmarks.guidance_tables --device cuda --size full --words 550 --frames 210   (the paper's lengths)

The weights are random, and no model draws an end, so all answers have the same length. A row is a step of one request:
a word or a frame. All requests of a run begin at once, each with its own text, and the best of --rounds counts.

The native loop is ESPnet's own code on a CPU if its environment is in this directory (tests/parity/environments.sh), and
otherwise the plain loop of zoo/loop.py. The output says which. Both answer one request after the other, so Bagpiper's
throughput is that of one request at any number; ESPnet's OpusLM draws several answers to one prompt at once. Both
render a whole file at the end. Guided and unguided rounds alternate on one engine; OpusLM has no guidance.

Source of the tables' form: "An Efficient vLLM-Based Inference Pipeline for Unified Audio Understanding and Generation".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zoo
from serving.engine.device.prepare_for_host import cached, prepare_for_host
from serving.engine.engine import Audio, Engine, Failed, Finished
from serving.tools import reference
from zoo.bagpiper.model import Bagpiper
from zoo.contract import Family
from zoo.opuslm.model import OpusLM
from zoo.request import Request, Value

FAMILIES = ("bagpiper", "opuslm")
NATIVE_ROUNDS = 2  # of one request, where the native loop answers one after the other
GUIDANCE = 3.0
PLAIN = "the plain loop of zoo/loop.py, eager"


@dataclass(frozen=True)
class Work:
    """The length of an answer. words: 0 for a model that writes none."""

    words: int
    frames: int
    guidance: float = GUIDANCE

    @property
    def rows(self) -> int:
        return self.words + self.frames

    def request(self, i: int) -> Request:
        options: dict[str, Value] = {}
        if self.words:
            options = {"max_tokens": self.words, "guidance": self.guidance}
        text = f"Request {i}: a calm voice tells the story of {i + 7} ships that left the harbour at dawn."
        return Request(text=text, seed=i, max_frames=self.frames, options=options)


@dataclass
class Run:
    """A round of so many requests at once. Times are of the listeners, from the beginning of the round."""

    requests: int
    wall_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    rows: int = 0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.wall_s


def endless(path: Path, device: str, dtype: str) -> Family[Any]:
    """Return a model of random weights that draws no end. Its graphs stay those of the model."""
    family = zoo.load(path, device, dtype)
    assert isinstance(family, Bagpiper | OpusLM), f"{path} is of the family {family.spec.family}"
    with torch.no_grad():
        if isinstance(family, OpusLM):
            family.backbone.offset[family.config.vocabulary.num_clusters] = -torch.inf
        else:
            codes = family.config.codec.num_codes + 1
            family.backbone.offset[codes : codes + 2] = -torch.inf
            family.backbone.words.weight[family.config.num_words :] = 0  # below the likeliest words
    return family


class Ours:
    """The engine, warm."""

    def __init__(self, family: Family[Any], slots: int, compile: bool):
        prepare_for_host(family, compile=compile)
        self.engine = Engine(family, max_slots=slots, compile=compile)
        self.engine.warm(lambda *_: None, cached)

    def run(self, requests: int, work: Work) -> Run:
        run, failed = Run(requests), list[str]()
        began_s = time.perf_counter()

        def ask(i: int) -> None:
            is_first = True

            def hear(event: Any) -> None:
                nonlocal is_first
                now_s = time.perf_counter() - began_s
                if isinstance(event, Audio) and is_first and len(event.samples):
                    run.first_s.append(now_s)
                    is_first = False
                elif isinstance(event, Finished):
                    run.whole_s.append(now_s)
                    run.rows += event.frames + event.usage.get("text_tokens", 0)
                elif isinstance(event, Failed):
                    failed.append(event.message)

            self.engine.speak(str(i), work.request(i), hear)

        for i in range(requests):
            ask(i)
        while self.engine.turn():
            pass
        run.wall_s = time.perf_counter() - began_s
        assert not failed, failed[0]
        assert len(run.whole_s) == requests, f"{len(run.whole_s)} of {requests} answers ended"
        return run


@dataclass(frozen=True)
class Native:
    """The native loop's rows a second by number of requests, and the seconds of one answer."""

    name: str
    rows_per_s: dict[int, float]
    whole_s: float


def native(path: Path, device: str, dtype: str, requests: Sequence[int], work: Work) -> Native:
    family = zoo.find(str(path))[0].NAME
    python = Path(f".venv-parity-{family}/bin/python")
    if device == "cpu" and python.exists():
        return espnet(family, path, python, dtype, requests, work)
    model = endless(path, device, dtype)
    zoo.generate(model, Work(min(work.words, 2), 2).request(0))
    began_s = time.perf_counter()
    rows = 0
    for i in range(NATIVE_ROUNDS):
        made = zoo.generate(model, work.request(i))
        made.samples.cpu()
        rows += work.rows
    wall_s = time.perf_counter() - began_s
    return Native(PLAIN, dict.fromkeys(requests, rows / wall_s), wall_s / NATIVE_ROUNDS)


def espnet(family: str, path: Path, python: Path, dtype: str, requests: Sequence[int], work: Work) -> Native:
    """Run ESPnet's own code, on our threads. It answers copies of one request. Its seconds are those of one copy."""
    is_in_turn = family == "bagpiper"
    streams = [1] if is_in_turn else sorted({1, *requests})
    order: dict[str, Any] = {"directory": str(path.resolve()), "dtype": dtype}
    order |= {"streams": streams, "rounds": NATIVE_ROUNDS if is_in_turn else 1}
    with tempfile.TemporaryDirectory() as place:
        order["request"] = reference.fields(work.request(0), Path(place), "request")
        if family == "opuslm":
            order["request"]["voice"] = "default"
        made = reference.run(family, str(python), order)
    rounds = order["rounds"]
    speeds = {run["streams"]: run["streams"] * rounds * work.rows / run["wall_s"] for run in made["runs"]}
    rows_per_s = {num: speeds.get(num, speeds[1]) for num in requests}
    return Native(made["name"], rows_per_s, made["runs"][0]["wall_s"] / rounds)


@dataclass
class Measured:
    family: str
    size: str
    device: str
    dtype: str
    work: Work
    native: Native
    guided: list[Run] = field(default_factory=list)  # of each number of requests, the best round
    unguided: list[Run] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # median over the rounds' pairs


def measure(family: str, path: Path, options: argparse.Namespace, dtype: str) -> Measured:
    is_guided = family == "bagpiper"
    work = Work(options.words if is_guided else 0, options.frames)
    device = "cpu" if options.device == "cpu" else torch.cuda.get_device_name()
    found = Measured(
        family,
        options.size,
        device,
        dtype,
        work,
        native(path, options.device, dtype, options.requests, work),
    )
    ours = Ours(endless(path, options.device, dtype), max(options.requests), not options.eager)
    plain = Work(work.words, work.frames, 1.0)
    for requests in options.requests:
        ours.run(requests, Work(min(work.words, 2), 2))
        rounds, others = [], []
        for _ in range(options.rounds):
            rounds.append(ours.run(requests, work))
            if is_guided:
                others.append(ours.run(requests, plain))
        found.guided.append(max(rounds, key=lambda run: run.rows_per_s))
        if is_guided:
            found.unguided.append(max(others, key=lambda run: run.rows_per_s))
            pairs = zip(rounds, others, strict=True)
            found.ratios.append(float(np.median([one.rows_per_s / other.rows_per_s for one, other in pairs])))
    return found


def tables(found: Measured) -> Iterator[str]:
    """Yield the lines of the three tables."""
    work, theirs = found.work, found.native
    yield f"## {found.family} {found.size}, {found.dtype}, {found.device}: {work.words} words, {work.frames} frames"
    yield f"Native loop: {theirs.name}.\n"
    yield "| requests | ours, rows/s | native, rows/s | ratio |\n|---|---|---|---|"
    for run in found.guided:
        native_rows = theirs.rows_per_s[run.requests]
        ratio = run.rows_per_s / native_rows
        yield f"| {run.requests} | {run.rows_per_s:.1f} | {native_rows:.1f} | {ratio:.1f} |"
    if found.unguided:
        yield "\n| requests | unguided, rows/s | guided, rows/s | ratio of the best | median ratio |\n|---|---|---|---|---|"
        for one, two, ratio in zip(found.unguided, found.guided, found.ratios, strict=True):
            best = two.rows_per_s / one.rows_per_s
            yield f"| {one.requests} | {one.rows_per_s:.1f} | {two.rows_per_s:.1f} | {best:.2f} | {ratio:.2f} |"
    yield "\n| requests | first audio p50 / p95, s | whole answer, s | native whole file of one request, s |\n|---|---|---|---|"
    for run in found.guided:
        p50, p95 = (float(np.percentile(run.first_s, q)) for q in (50, 95))
        whole = float(np.median(run.whole_s))
        yield f"| {run.requests} | {p50:.3f} / {p95:.3f} | {whole:.3f} | {theirs.whole_s:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--size", default="mid", help="size of the families' demo checkpoints")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--words", type=int, default=32, help="words of Bagpiper's text")
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    results = []
    with tempfile.TemporaryDirectory() as place:
        for family in options.family:
            path = zoo.families()[family].write_demo(Path(place) / family, options.size)
            found = measure(family, path, options, dtype)
            print("\n".join(tables(found)) + "\n", flush=True)
            results.append(asdict(found))
    if options.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "arguments": sys.argv[1:]}
        options.json.write_text(json.dumps(facts | {"results": results}) + "\n")


if __name__ == "__main__":
    main()
