"""Run everything that needs a machine with a GPU in one call of at most ten minutes: figures and checks.

    python benchmarks/device.py --out RESULT.json [--models FAMILY=SPEC ...] [--parts KIND ...] [--limit-s 590]
    python benchmarks/device.py --out RESULT.json --models cosyvoice2=full qwen3_tts=1.7b-base voxcpm2=full higgs_v3=full fish_s2=full

SIZE is a size of the family's demo checkpoints. Their weights are random, since time does not depend on the
values. SPEC is SIZE[:SLOTS[:WEIGHTS[:CODEC[:KV_PART[:DEPTH]]]]]: the server's slots, by default the largest of
--streams; published or fp8; the options --codec and --kv-part for this model; and layers or whole. Without --models,
every family runs at its smallest size. KIND is one of:

    figures   of each model: the time of each recorded launch, and its slowest kernels; then listeners: --streams that
              begin together, one stream for each slot that is followed by the next, and random arrivals at --rates
              (by default those of predict.py); then the last two over HTTP, where the same warm engine is served by
              the HTTP process and asked by `zoo load` (device_http.py). Its audio-s/s count until the last stream
              ends. Without a package that HTTP needs, the result says which one
    kernels   the GPU's kernels compared with the plain operators on the same device, at every family's published shapes,
              and the time of a gated product in one launch and in two
    fp8       products in fp8 compared with their plain form at the published shapes, and their times beside bf16's;
              skipped with a reason where a GPU has none
    codec     of each of --codecs: its render in each format of --codec, and the error (device_codec.py)
    flashinfer  of each of --flashinfer: FlashInfer's kernels and ours at published shapes, by number of streams: the
              largest gap, and the times of both (device_flashinfer.py); skipped with a reason where it cannot run
    checks    of a tiny checkpoint: greedy fp32 codes equal the CPU's, or latents are close with the same noise; compiled
              and recorded launches agree with the plain loop, alone and in a batch; bf16 generates audio

Each part is a process. --at-once of them run at a time, in the order above, since most of their time is compiling. Only
one part measures at a time, and all others are stopped meanwhile. The result file gets each finding immediately. After
--limit-s all parts are ended; one that was cut off keeps its findings, and its error says so. A later call with the
same RESULT.json runs the parts that are not complete in it, and those named by --again: other options than before, such
as --codec, need that, or another file. With the same --cache-dir, such a call finds what was compiled, even for parts
that were cut off and after changes of the source (device_parts.py). The exit status is 1 if something failed.

It needs torch 2.11 or newer, numpy, safetensors, einops, tokenizers, msgspec, structlog, soxr and sentencex, and no
network; HTTP needs the packages of the server and aiohttp, without av. On a machine without a GPU, a check compares the
CPU with itself.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from benchmarks import (
    device_codec,
    device_compilers,
    device_flashinfer,
    device_http,
    device_kernels,
    device_launches,
    device_parts,
)
from benchmarks.device_kernels import DEVICE, Put
from benchmarks.device_parts import ALONE, KINDS, cached

TEXTS = (
    "Good morning.",
    "The quick brown fox jumps over the lazy dog.",
    "It is a quarter to eight, and the train leaves now.",
)
SPEECH_GAP = 1e-4  # allowed difference of frames or samples in fp32
SETTLE_S = 0.5  # for the other parts to stop, before one measures
RAMP_S = 2.0  # streams start and settle before they count


# --- checks ---


def checks(name: str, put: Put) -> None:
    import zoo
    from serving.engine.device.prepare_for_host import prepare_for_host

    with tempfile.TemporaryDirectory() as directory:
        path = zoo.families()[name].write_demo(Path(directory) / "tiny", "tiny", dtype=torch.float32)
        here, there = (zoo.load(path, device=device, dtype="float32") for device in ("cpu", DEVICE))
        prepare_for_host(there)
        shape, noise = here.spec.noise_shape, None
        if shape:
            noise = torch.randn(40, *shape, generator=torch.Generator().manual_seed(0))
        gaps = []
        for request in requests(here, is_greedy=True):
            ours, theirs = (
                zoo.generate(family, request, noise=noise).frames.double() for family in (there, here)
            )
            gaps.append(float((ours - theirs).abs().max()) if ours.shape == theirs.shape else None)
        put("frames apart from the CPU's", gaps)  # 0 for codes
        most = SPEECH_GAP if shape else 0.0
        wrong = [one for one in gaps if one is None or not one <= most]
        work = requests(there, is_greedy=False)
        apart = [zoo.generate(there, request).samples.numpy() for request in work]
        for kind, compile in (("recorded", False), ("compiled and recorded", True)):
            batched, misses = together(there, work, compile)
            equal = [len(a) == len(b) for a, b in zip(apart, batched, strict=True)]
            pairs = [(a, b) for a, b in zip(apart, batched, strict=True) if len(a) == len(b)]
            largest = max((float(np.abs(a - b).max()) for a, b in pairs), default=None)
            put(kind, {"lengths_equal": equal, "largest_sample_gap": largest, "graph_misses": misses})
            if not (all(equal) and largest is not None and largest <= SPEECH_GAP and misses == 0):
                wrong.append(kind)
        half = zoo.load(path, device=DEVICE, dtype="bfloat16")
        spoken, _ = together(half, requests(half, is_greedy=False), True)
        put("bf16 frames", [len(samples) // half.spec.frame_samples for samples in spoken])
        assert not wrong and all(map(len, spoken)), f"different from the plain loop: {wrong}"


def requests(family: Any, is_greedy: bool) -> list[Any]:
    """Return requests: greedy for families that sample codes; other families get their noise separately."""
    from serving.tools.requests import first_request

    temperature = 0.0 if is_greedy and not family.spec.noise_shape else None
    fields = {"temperature": temperature, "max_frames": 40}
    return [first_request(family, text=text, seed=i, **fields) for i, text in enumerate(TEXTS)]


def together(family: Any, work: list[Any], compile: bool) -> tuple[list[np.ndarray], int]:
    """Run all requests at once through the engine. Return their samples and the unrecorded launches."""
    from serving.engine.engine import Audio, Engine

    engine = Engine(family, max_slots=4, compile=compile)
    engine.warm(lambda *_: None, cached)
    heard: list[list[np.ndarray]] = [[np.zeros(0, np.float32)] for _ in work]

    def hear(i: int, event: Any) -> None:
        if isinstance(event, Audio):
            heard[i].append(event.samples)

    for i, request in enumerate(work):
        engine.speak(str(i), request, partial(hear, i))
    while engine.turn():
        pass
    return [np.concatenate(pieces) for pieces in heard], engine.stats()["models"][family.spec.family][
        "graph_misses"
    ]


# --- figures ---


def figures(name: str, size: str, options: argparse.Namespace, put: Put) -> None:
    import zoo
    from serving.tools.bench import TEXT, beside
    from serving.tools.requests import first_request

    options.http = name in options.http if options.http else not options.no_http
    if options.http and (reason := device_http.why_not()) is not None:
        put("over HTTP", f"left out: {reason}")
        options.http = False
    size, *spec = size.split(":")
    with tempfile.TemporaryDirectory() as directory:
        path = zoo.families()[name].write_demo(Path(directory) / size, size)
        with device_compilers.beside(options.compilers, path):
            engine = warmed(path, spec, options, put)
    [model] = engine.models.values()
    frames = round(options.speech_s * model.family.spec.frame_rate_hz)
    request = first_request(model.family, text=TEXT, max_frames=frames)
    with alone(put):
        device_launches.times(model.runner, put)
        if options.part in options.only_launches:
            return
        orders = {order: device_launches.recorded_again(model.runner, order) for order in options.orders}
        try:
            beside(engine, partial(listen, name, engine, request, orders, options, put))
        finally:
            put("graph_misses", model.runner.graph_misses)
            put("compiles_after_warmup", engine.stats()["compiles_after_warmup"])
        device_launches.beside_each_other(model.runner, put)


def loaded(path: Path, spec: Sequence[str], options: argparse.Namespace, kv_slots: int | None = None) -> Any:
    """Load a checkpoint and return an engine for it. spec: of a model, without its size; kv_slots: slots for which
    there are pages, by default all."""
    import zoo
    from serving.engine.device.prepare_for_host import prepare_for_host
    from serving.engine.engine import Engine
    from serving.engine.memory.memory_plan import usual_kv_bytes

    slots, weights, codec, kv_part, depth = (*spec, "", "", "", "", "")[:5]
    most = int(slots or max(options.streams))
    family = zoo.load(path, device=DEVICE)
    part = 1 if kv_slots else float(kv_part or options.kv_part)
    prepare_for_host(
        family, compile=not options.no_compile, weights=weights or "published", depth=depth or "layers"
    )
    return Engine(
        family,
        max_slots=most,
        kv_memory_bytes=int(part * usual_kv_bytes(family, kv_slots or most)),
        compile=not options.no_compile,
        codec=codec or options.codec,
        attention=options.attention,
    )


def warmed(path: Path, spec: Sequence[str], options: argparse.Namespace, put: Put) -> Any:
    """Return a warm engine of a checkpoint, and report how it became one."""
    from torch._dynamo.utils import counters

    from serving.engine.memory.memory_plan import plan

    began_s = time.perf_counter()
    engine = loaded(path, spec, options)
    [model] = engine.models.values()
    put("dtype", str(model.family.dtype))
    put("loaded_s", round(time.perf_counter() - began_s, 1))
    began_s = time.perf_counter()
    begun_s: list[tuple[str, float]] = []  # stage, when it began

    def begin(_: float, stage: str) -> None:
        begun_s.append((stage, time.perf_counter()))
        put("began after, s", {stage: round(at_s - began_s, 1) for stage, at_s in begun_s})

    engine.warm(begin, cached)
    warm_s = {"all": time.perf_counter() - began_s}
    for (stage, start_s), (_, end_s) in pairwise(begun_s):
        warm_s[stage] = warm_s.get(stage, 0) + end_s - start_s
    found = {kind: dict(counters[kind]) for kind in ("aot_autograd", "inductor") if counters[kind]}
    put(
        "of torch's caches",
        {kind: {k: n for k, n in of.items() if "cache" in k} for kind, of in found.items()},
    )
    put("warm_s", {stage: round(seconds, 1) for stage, seconds in warm_s.items()})
    memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    planned = plan(model.family, model.runner.num_slots, engine.arena.bytes.nbytes).total
    put("memory_bytes", {"planned": planned, "allocated": memory})
    return engine


def compile_stage(part: str, options: argparse.Namespace) -> None:
    """Be a compiler of a part of figures (device_compilers.py)."""
    spec = part.split("=")[2].split(":")[1:]
    engine = loaded(options.checkpoint, spec, options, kv_slots=1)
    [model] = engine.models.values()
    began_s = time.perf_counter()
    name = device_compilers.compile_stage(model.runner, options.compiler)
    took_s = time.perf_counter() - began_s
    print(f"{part}: a compiler for {name} took {took_s:.1f} s", file=sys.stderr, flush=True)


def listen(
    name: str,
    engine: Any,
    request: Any,
    orders: dict[str, tuple[device_launches.Recorded, device_launches.Recorded]],
    options: argparse.Namespace,
    put: Put,
) -> None:
    """Measure what listeners of a model experience. orders: launches with other priorities, for the same again."""
    from benchmarks.predict import RATES
    from serving.tools.bench import WARM_FRAMES, load

    [model] = engine.models.values()
    most = model.runner.num_slots
    load(engine, most, 1, replace(request, max_frames=WARM_FRAMES))
    for streams in sorted({min(count, most) for count in options.streams}):
        put(f"{streams} streams", load(engine, streams, 1, request))
    for streams in sorted({min(max(options.streams), most), most}):
        put(
            f"{streams} streams, each followed by the next",
            followed(engine, request, streams, options.seconds),
        )
    rates = RATES.get(name, ()) if options.rates is None else options.rates
    for rate in rates:
        put(f"{rate:g} requests a second", arrivals(engine, request, rate, options.seconds))
    if options.http:
        streams = sorted({min(max(options.streams), most), most})
        device_http.over_http(engine, streams, rates, request.max_frames, options.seconds, put)
    lowered = model.runner.lowered
    for order, (steps, renders) in orders.items():
        lowered.step_graphs.recorded |= steps
        lowered.render_graphs.recorded |= renders
        put(
            f"{most} streams, each followed by the next, {order}",
            followed(engine, request, most, options.seconds),
        )
        for rate in rates:
            put(f"{rate:g} requests a second, {order}", arrivals(engine, request, rate, options.seconds))


@contextmanager
def alone(put: Put) -> Iterator[None]:
    """Keep the device and the host's cores free of other parts, which `run_all` stops."""
    with open(os.environ["DEVICE_LOCK"], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        put(ALONE, True)
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            put(ALONE, False)


def arrivals(engine: Any, request: Any, rate: float, seconds: float) -> dict[str, Any]:
    """Send requests with random arrivals and measure them. Runs on the listeners' thread."""
    random = np.random.default_rng(0)
    due_s = np.cumsum(random.exponential(1 / rate, max(1, round(rate * seconds))))
    hearing = Hearing()
    before, began_s = underruns(engine), time.perf_counter()
    for seed, due in enumerate(due_s):
        time.sleep(max(0.0, began_s + due - time.perf_counter()))
        hearing.ask(engine, replace(request, seed=seed), began_s + due)
    hearing.wait(len(due_s))
    return {
        "requests": len(due_s),
        "ttfa_ms": hearing.first_ms(50, 90, 95, 99),
        "underruns": underruns(engine) - before,
        "failed": hearing.failed,
    }


def followed(engine: Any, request: Any, streams: int, seconds: float) -> dict[str, Any]:
    """Keep `streams` requests running, each followed by the next, and measure audio-s/s after the ramp.

    Lengths vary from half to one and a half of the request's frames. Runs on the listeners' thread."""
    random, began_s = np.random.default_rng(0), time.perf_counter()
    hearing = Hearing(began_s + RAMP_S, began_s + seconds)
    rows: dict[str, list[int]] = {"step": [], "render": []}
    [runner] = (model.runner for model in engine.models.values())
    runner.observer = lambda event, count, _: rows[event].append(count) if event in rows else None
    before, turns, asked, ended = underruns(engine), engine.iterations.num, 0, 0

    def speak() -> None:
        nonlocal asked
        frames = int(random.integers(request.max_frames // 2, 3 * request.max_frames // 2))
        asked += 1
        hearing.ask(engine, replace(request, seed=asked, max_frames=frames), time.perf_counter())

    for _ in range(streams):
        speak()
    while ended < asked:
        hearing.wait(1)
        ended += 1
        if time.perf_counter() < began_s + seconds:
            speak()
    runner.observer = None
    rate_hz = next(iter(engine.models.values())).family.spec.sample_rate_hz
    return {
        "requests": asked,
        "audio_s_per_s": round(hearing.num_samples / rate_hz / (seconds - RAMP_S), 1),
        "turn_ms": round(1e3 * (time.perf_counter() - began_s) / (engine.iterations.num - turns), 2),
        "launches": {
            kind: {"num": len(each), "rows": round(float(np.mean(each)), 1)}
            for kind, each in rows.items()
            if each
        },
        "ttfa_ms": hearing.first_ms(50, 95),
        "underruns": underruns(engine) - before,
        "failed": hearing.failed,
    }


class Hearing:
    """The audio that listeners received. Samples count only from since_s until until_s."""

    def __init__(self, since_s: float = 0.0, until_s: float = np.inf):
        self.since_s, self.until_s = since_s, until_s
        self.first_s: list[float] = []
        self.failed: list[str] = []
        self.num_samples = 0
        self._ended = threading.Semaphore(0)

    def ask(self, engine: Any, request: Any, due_s: float) -> None:
        from serving.engine.engine import Audio, Failed, Text

        is_first = True

        def hear(event: Any) -> None:  # runs on the engine's thread
            nonlocal is_first
            now_s = time.perf_counter()
            if isinstance(event, Audio):
                if is_first and len(event.samples):
                    self.first_s.append(now_s - due_s)
                    is_first = False
                self.num_samples += len(event.samples) * (self.since_s <= now_s < self.until_s)
            elif not isinstance(event, Text):
                if isinstance(event, Failed):
                    self.failed.append(event.message)
                self._ended.release()

        engine.speak(f"{id(self)} {due_s} {request.seed}", request, hear)

    def wait(self, count: int) -> None:
        for _ in range(count):
            self._ended.acquire()

    def first_ms(self, *percentiles: int) -> dict[str, float]:
        """Return percentiles of the times to first audio; without audio, none, so that the failures are reported."""
        return {
            f"p{q}": round(1e3 * float(np.percentile(self.first_s, q)), 1)
            for q in percentiles
            if self.first_s
        }


def underruns(engine: Any) -> int:
    return sum(model["underruns"] for model in engine.stats()["models"].values())


# --- one process for each part ---


def run_part(options: argparse.Namespace) -> None:
    """Run one part and print its findings to standard output, one JSON object a line."""
    part, *rest = options.part.split("=")
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything else that is printed goes to standard error

    def put(name: str, value: Any) -> None:
        print(json.dumps({name: value}), file=said, flush=True)
        print(f"{options.part}: {name}: {value}", file=sys.stderr, flush=True)

    parts: dict[str, Callable[..., None]] = {
        "kernels": partial(device_kernels.kernels, alone=alone),
        "fp8": partial(device_kernels.fp8_products, alone=alone),
        "flashinfer": partial(device_flashinfer.compared, alone=alone),
        "codec": partial(device_codec.formats, alone=alone),
        "checks": checks,
        "figures": partial(figures, options=options),
    }
    began_s = time.perf_counter()
    try:
        parts[part](*rest, put=put)
        put("seconds", round(time.perf_counter() - began_s, 1))
    except Exception:  # keeps the findings before an error, whatever the device does
        put("error", traceback.format_exc())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--parts", nargs="+", choices=KINDS, help="kinds of parts to run (default: all)")
    parser.add_argument(
        "--models",
        nargs="*",
        metavar="FAMILY=SPEC",
        help="models of the part figures",
    )
    parser.add_argument("--checks", nargs="*", metavar="FAMILY", help="families to check (default: all)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="*", help="requests a second for every model")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of arrivals at each rate")
    parser.add_argument(
        "--speech-s", type=float, default=4.2, help="seconds that a stream speaks, in the mean"
    )
    parser.add_argument(
        "--kv-part",
        type=float,
        default=1.0,
        help="of the KV memory that a server would take, for several models",
    )
    parser.add_argument(
        "--only-launches", nargs="+", default=[], metavar="PART", help="figures without listeners"
    )
    parser.add_argument("--at-once", type=int, help="parts that run at once (default: one for two cores)")
    parser.add_argument("--codec", default="float32")
    parser.add_argument("--attention", default="auto", help="of the part figures, as of zoo serve")
    parser.add_argument(
        "--codecs",
        nargs="*",
        default=[],
        metavar="FAMILY=SIZE",
        help="models of the part codec (default: none)",
    )
    parser.add_argument(
        "--flashinfer",
        nargs="+",
        default=device_flashinfer.KINDS,
        choices=device_flashinfer.KINDS,
        help="what to compare with FlashInfer's (default: all)",
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--orders",
        nargs="+",
        default=[],
        choices=device_launches.ORDERS,
        help="figures once more with these priorities of steps and renders",
    )
    parser.add_argument("--http", nargs="+", metavar="FAMILY", help="figures over HTTP for these alone")
    parser.add_argument("--no-http", action="store_true", help="no figures over HTTP")
    parser.add_argument(
        "--again",
        nargs="+",
        default=[],
        metavar="PART",
        help="parts or kinds to repeat, though RESULT.json has them",
    )
    parser.add_argument("--cache-dir", type=Path, help="the folder of everything that is compiled")
    parser.add_argument("--limit-s", type=float, default=590, help="seconds after which all parts are killed")
    parser.add_argument(
        "--compilers",
        type=int,
        default=0,
        help="more processes that compile for each part of figures, with --cache-dir (device_compilers.py)",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--compiler", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compilers and (options.cache_dir is None or options.no_compile):
        parser.error("--compilers needs --cache-dir, and something to compile")
    if options.compiler is not None:
        return compile_stage(options.part, options)
    if options.part:
        return run_part(options)
    import zoo

    names = list(zoo.families()) if options.checks is None else options.checks
    models = [f"{name}=tiny" for name in zoo.families()] if options.models is None else options.models
    by_kind = {
        "figures": [f"figures={model}" for model in models],
        "kernels": ["kernels"],
        "fp8": ["fp8"],
        "codec": [f"codec={model}" for model in options.codecs],
        "flashinfer": [f"flashinfer={kind}" for kind in options.flashinfer],
        "checks": [f"checks={name}" for name in names],
    }
    parts = [part for kind in options.parts or by_kind for part in by_kind[kind]]
    header = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arguments": sys.argv[1:],
    }
    ends_s = time.monotonic() - time.process_time() + options.limit_s  # importing torch counts too
    os.environ.update(device_parts.environment(options.cache_dir))
    result = device_parts.continued(options.out, header)
    open_parts = device_parts.to_run(parts, result, options.again)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DEVICE_LOCK"] = str(Path(directory) / "lock")
        at_once = options.at_once or max(1, (os.cpu_count() or 2) // 2)
        command = [sys.executable, *sys.argv]
        device_parts.run_all(command, open_parts, result, options.out, ends_s, at_once)
    sys.exit(any("error" in result[part] for part in parts))


if __name__ == "__main__":
    main()
