"""`zoo bench`: measure how fast a model is on this machine, and how fast it could be.

Time is measured as a listener sees it: from the request to its first samples, with seconds of audio counted
from samples and the true rate. The floor is the least possible time for a frame. It comes from one eager
step, which counts the weights that matrix products and convolutions read and the arithmetic that they do.
A frame of some models takes several steps. Weights count with the bits that the checkpoint gives them. The
same run measures the machine's bandwidth and arithmetic rate.
"""

from __future__ import annotations

import platform
import resource
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import zoo
from compile_cache import artifacts, threads
from serving.engine.device.arena import PAGE_TOKENS, Arena, token_bytes
from serving.engine.device.prepare_for_host import cached, prepare_for_host
from serving.engine.device.runner import Runner
from serving.engine.engine import Audio, Engine, Event, Failed, Text
from serving.engine.schedule.policy import Policy
from serving.tools import reference
from serving.tools.requests import first_request
from zoo import kernels
from zoo.contract import Family, Spec, View
from zoo.nn.fp8 import FP8Linear
from zoo.nn.linear import FusedLinear
from zoo.nn.packed import GROUP, BlockedLinear, PackedLinear, can_be_packed, has_16_bits
from zoo.request import Request, Value

TEXT = "The quick brown fox jumps over the lazy dog, and then the other fox says hello to the world."
T = TypeVar("T")
WARM_FRAMES = 4  # frames of an unmeasured round that fills caches and allocators and takes page faults


def bench(
    model: str,
    *,
    streams: tuple[int, ...] = (1, 8),
    frames: int = 50,
    rounds: int = 2,
    device: str | None = None,
    dtype: str | None = None,
    weights: str = "published",
    compile: bool = True,
    policy: str = "streaming",
    voice: str | None = None,
    options: Callable[[Spec], dict[str, Value]] = lambda spec: {},
    reference_python: str | None = None,
    log_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure a closed loop: `streams` requests at once, `rounds` times, each of `frames` frames or fewer if
    the model ends. The requests use the first of the model's modes. options: returns the options of the
    requests. Raises ValueError."""
    Policy.named(policy)  # raises for an unknown policy before the run takes minutes
    family = zoo.load(model, device=device, dtype=dtype)
    given: dict[str, Any] = {"options": options(family.spec)}
    if voice is not None:
        given["voice"] = voice
    request = request_of(family, frames, given, is_compared=reference_python is not None)
    if reference_python is not None:
        reference.check(family.spec.family, reference_python)  # before our own runs take minutes
    counted = work(family, request)
    prepare_for_host(family, compile=compile, weights=weights)
    flops = Counter(counted["step"]["flops"]) + Counter(counted["render"]["flops"])
    what = products(family)
    log_line(f"instructions: {instructions(family.device)}")
    log_line("; ".join(f"{name} read by {count} products" for name, count in what.items()))
    limits = machine(family, flops)
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in limits["flops_per_s"].items())
    log_line(f"this machine: {limits['bytes_per_s'] / 1e9:.1f} GB/s, {rates}")
    engine = Engine(family, max_slots=max(streams), policy=policy, compile=compile)
    began_s = time.perf_counter()
    engine.warm(lambda fraction, stage: log_line(f"warming {fraction:4.0%} {stage}"), cached)
    warm_s = time.perf_counter() - began_s

    def finish(run: dict[str, Any]) -> None:
        window = max(family.spec.window.sizes)
        add_floor(run, min_ms_per_frame(counted, limits, run["streams"], window, run["steps_per_frame"]))
        log_line(summary(run))

    runs = drive(engine, streams, rounds, request, finish)
    result = {
        "family": family.spec.family,
        "variant": family.spec.variant,
        "device": device_name(family.device),
        "instructions": instructions(family.device),
        "products": what,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": dtype_name(family.dtype),
        "weights": weights,
        "compiled": compile,
        "warm_s": warm_s,
        "compiles_after_warmup": engine.stats()["compiles_after_warmup"],
        "machine": limits,
        "step_weight_bytes": counted["step"]["bytes"],
        "frame_flops": flops.total(),
        "frame_flops_by_dtype": dict(flops),
        "peak_memory_bytes": peak_memory(family.device),
        "runs": runs,
    }
    if reference_python is not None:
        del engine
        log_line("running the reference ...")
        order = {"directory": str(zoo.find(model)[1].resolve()), "dtype": result["dtype"]}
        order |= {"streams": streams, "rounds": rounds}
        result["reference"] = against(family.spec.family, reference_python, order, request, log_line)
        for run, theirs in zip(runs, result["reference"]["runs"], strict=True):
            run["speedup"] = run["audio_s_per_s"] / theirs["audio_s_per_s"]
    return result


def request_of(family: Family[Any], frames: int, given: dict[str, Any], is_compared: bool) -> Request:
    """Return a request of the given fields. Raises RequestError.

    The tokens of an answer decide how many steps its frames take. So they are bounded, and greedy if the
    reference is to take as many.
    """
    spec = family.spec
    if spec.answers:
        [option] = (option for option in spec.options if option.name == "max_tokens")
        assert option.range is not None, "a bound on tokens has a range"
        most = {"max_tokens": min(frames * spec.steps_per_frame, int(option.range[1]))}
        given = given | {"options": most | given["options"]}
        if is_compared:
            given["temperature"] = 0.0
    return first_request(family, text=TEXT, max_frames=frames, **given)


def summary(run: dict[str, Any]) -> str:
    """Return a run as one line of text."""
    return (
        f"streams {run['streams']:3}: RTF {run['rtf']:.3f}  {run['audio_s_per_s']:.2f} audio-s/s  "
        f"first audio {run['ttfa_ms']:.0f} ms  step {run['step_ms']:.1f} + "
        f"render {run['render_ms']:.1f} + host {run['host_ms_per_step']:.2f} ms  "
        f"floor {run['floor_fraction']:.0%}"
    )


def drive(
    engine: Engine,
    streams: tuple[int, ...],
    rounds: int,
    request: Request,
    report: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Make a run for each number of streams."""

    def listen() -> list[dict[str, Any]]:
        runs = []
        for count in streams:
            load(engine, count, 1, replace(request, max_frames=WARM_FRAMES))
            runs.append(load(engine, count, rounds, request))
            report(runs[-1])
        return runs

    return beside(engine, listen)


def beside(engine: Engine, listen: Callable[[], T]) -> T:
    """Run the engine on the calling thread, as a server does, and `listen` on another. The engine stops when
    `listen` returns. Returns its result."""

    def listen_and_stop() -> T:
        try:
            return listen()
        finally:
            engine.stop()

    with ThreadPoolExecutor(1, "load", threads.use_one_thread) as pool:
        listening = pool.submit(listen_and_stop)
        engine.run()
        return listening.result()


class Load:
    """A closed loop of requests: each stream makes `rounds` of them, one after the other."""

    def __init__(self, engine: Engine, rounds: int, request: Request):
        self.engine = engine
        self.rounds = rounds
        self.request = request
        self.first_audio_s: list[float] = []
        self.num_samples = self.num_frames = 0
        self.errors: list[str] = []
        self._left = threading.Semaphore(0)

    def run(self, streams: int) -> float:
        """Run the loop and return the seconds it took. Raises RuntimeError if a request fails."""
        began_s = time.perf_counter()
        for stream in range(streams):
            self._start(stream, 0)
        for _ in range(streams):
            self._left.acquire()
        if self.errors:
            raise RuntimeError(self.errors[0])
        return time.perf_counter() - began_s

    def _start(self, stream: int, turn: int) -> None:
        began_s = time.perf_counter()
        is_first = True

        def deliver(event: Event) -> None:  # on the engine's thread
            nonlocal is_first
            if isinstance(event, Audio):
                if is_first and len(event.samples):  # a renderer may hold back all of its first ones
                    self.first_audio_s.append(time.perf_counter() - began_s)
                    is_first = False
                self.num_samples += len(event.samples)
                self.num_frames += event.frames
            elif not isinstance(event, Text):
                self._end(stream, turn, event)

        self.engine.speak(f"{stream}-{turn}", replace(self.request, seed=1000 * stream + turn), deliver)

    def _end(self, stream: int, turn: int, event: Event) -> None:
        if isinstance(event, Failed):
            self.errors.append(event.message)
        if turn + 1 < self.rounds and not self.errors:
            self._start(stream, turn + 1)
        else:
            self._left.release()


class LaunchTimes:
    """The seconds that a runner spends in its launches, their number and their rows, by kind. The host has the
    rest."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.launches: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def __call__(self, event: str, rows: int, seconds: float) -> None:
        self.seconds[event] += seconds
        self.launches[event] += 1
        self.rows[event] += rows


def load(engine: Engine, streams: int, rounds: int, request: Request) -> dict[str, Any]:
    """Measure what `streams` listeners notice and where time goes. Raises RuntimeError if a request fails, and
    ValueError if none has audio."""
    [model] = engine.models.values()
    model.runner.observer = times = LaunchTimes()
    listeners = Load(engine, rounds, request)
    wall_s = listeners.run(streams)
    model.runner.observer = None
    spec = model.family.spec
    if not listeners.num_samples:
        raise ValueError(
            f"{spec.family} answered without audio, so there is nothing to time; a checkpoint with random weights may"
        )
    audio_s = listeners.num_samples / spec.sample_rate_hz
    steps = times.launches["step"]
    return {
        "streams": streams,
        "requests": streams * rounds,
        "frames": listeners.num_frames,
        "audio_s": audio_s,
        "wall_s": wall_s,
        "rtf": wall_s * streams / audio_s,
        "audio_s_per_s": audio_s / wall_s,
        "ttfa_ms": 1e3 * float(np.median(listeners.first_audio_s)),
        "ttfa_p90_ms": 1e3 * float(np.quantile(listeners.first_audio_s, 0.9)),
        # steps behind a speech's end make no frame
        "steps_per_frame": min(spec.steps_per_frame, times.rows["step"] / listeners.num_frames),
        "step_ms": 1e3 * times.seconds["step"] / steps,
        "render_ms": 1e3 * times.seconds["render"] / steps,
        "host_ms_per_step": 1e3 * max(wall_s - sum(times.seconds.values()), 0.0) / steps,
    }


class Work(TorchDispatchMode):
    """Counts the bytes of weights that matrix products and convolutions read, every time they do, and the
    arithmetic by dtype. It uses the textbook formula, even if an algorithm needs less arithmetic."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.weights = {  # where each is, and the bytes of one of its numbers
            tensor.untyped_storage().data_ptr(): 2 if has_16_bits(tensor) else tensor.itemsize
            for tensor in module.parameters()
        }
        self.bytes = 0
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func.overloadpacket)
        if count is None:  # count the operators that it consists of, if it decomposes
            with self:
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        for tensor in tensors:
            self.bytes += tensor.numel() * self.weights.get(tensor.untyped_storage().data_ptr(), 0)
        self.flops[dtype_name(tensors[0].dtype)] += count(*args, **kwargs, out_val=out)
        return out


def products(model: nn.Module) -> dict[str, int]:
    """Return what the products of a model read -> how many products do, after `prepare_for_host`."""
    kinds: Counter[str] = Counter()
    for layer in model.modules():
        if isinstance(layer, BlockedLinear):
            bits = "float32" if layer.blocks.dtype == torch.float32 else "bf16"
            kinds[bits if layer.scales is None else f"int8, {GROUP} a scale"] += 1
        elif isinstance(layer, FP8Linear):
            kinds["fp8, a scale a row"] += 1
        elif isinstance(layer, PackedLinear):
            kinds[f"{dtype_name(layer.weight.dtype)}, packed by oneDNN"] += 1
        elif isinstance(layer, nn.Linear | FusedLinear):
            kinds[dtype_name(layer.weight.dtype)] += 1
    return dict(kinds)


def instructions(device: torch.device) -> str:
    """Return the instruction sets that torch and our kernels use on a CPU, or what a GPU is built for."""
    if device.type != "cpu":
        return artifacts.target(device.type)
    limit = kernels.level()
    return torch.backends.cpu.get_cpu_capability() + ("" if limit is None else f", kernels for {limit}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def work(family: Family[Any], request: Request) -> dict[str, dict[str, Any]]:
    """Count the weights read and the arithmetic by dtype, for one eager step of one stream and for rendering
    its largest window. The arithmetic of the render is per frame."""
    prompt = family.prompt(request)
    window = family.spec.window
    frames = window.sizes[-1]
    lanes = len(prompt.lanes)
    pages = -(-max(len(lane.inputs) for lane in prompt.lanes) // PAGE_TOKENS)
    arena = Arena([family], (1 + lanes * pages) * PAGE_TOKENS * token_bytes(family))
    runner = Runner(family, 1, arena, compile=False)
    own = [range(1 + lane * pages, 1 + (lane + 1) * pages) for lane in range(lanes)]
    runner.open(0, prompt, own, [len(lane.inputs) - 1 for lane in prompt.lanes])
    row = torch.zeros(1, dtype=torch.int64, device=family.device)
    view = View(row, row, row + frames, row > 0, frames, window.length_bucket(frames))
    calls = {
        "step": lambda: runner.step(np.zeros(1, np.int64)).read(),
        "render": lambda: family.render(runner.state, view),
    }
    counts: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for name, call in calls.items():
            if name == "render":
                runner.state.ready[0] = frames  # a renderer may read no further than the tape
            with Work(family) as done:
                call()
            counts[name] = {"bytes": done.bytes, "flops": dict(done.flops)}
    counts["render"]["flops"] = {name: flops // frames for name, flops in counts["render"]["flops"].items()}
    return counts


def min_ms_per_frame(
    counted: dict[str, dict[str, Any]],
    limits: dict[str, Any],
    streams: int,
    window: int,
    steps_per_frame: float = 1.0,
) -> float:
    """Return the least time for a frame of every stream: the longer of reading weights at full bandwidth and
    doing arithmetic at the full rate of its dtype. The renderer's weights are read once per largest
    window."""
    step = counted["step"]
    render = counted["render"]
    read = (steps_per_frame * step["bytes"] + render["bytes"] / window) / limits["bytes_per_s"]
    flops = {name: steps_per_frame * count for name, count in step["flops"].items()}
    for name, count in render["flops"].items():
        flops[name] = flops.get(name, 0) + count
    compute = streams * sum(count / limits["flops_per_s"][name] for name, count in flops.items())
    return 1e3 * max(read, compute)


def add_floor(run: dict[str, Any], min_ms: float) -> None:
    """Add the floor to a run, and the fraction of the run's time that it explains."""
    run["floor_ms_per_frame"] = min_ms
    run["floor_fraction"] = min_ms * run["frames"] / run["streams"] / (1e3 * run["wall_s"])


def machine(family: Family[Any], dtypes: Iterable[str]) -> dict[str, Any]:
    """Measure the bytes per second of a large matrix-vector product in the model's dtype, and the FLOP/s of a
    large matrix product in each of `dtypes`. Each is the best of several tries."""
    device = family.device
    dtype = family.dtype
    side = 16384 if device.type == "cuda" else 8192
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    vector = torch.ones(side, 1, dtype=dtype, device=device)
    limits: dict[str, Any] = {
        "bytes_per_s": matrix.numel() * matrix.itemsize / best(lambda: matrix @ vector, device),
        "flops_per_s": {},
    }
    for name in dtypes:
        small = matrix[: side // 4, : side // 4].to(getattr(torch, name)).contiguous()
        products = [partial(torch.mm, small, small)]
        linear = nn.Linear(len(small), len(small), bias=False, device="meta")
        linear.weight = nn.Parameter(small, requires_grad=False)
        if can_be_packed(small):  # another library's product, which may be twice as fast
            products.append(partial(PackedLinear(linear), small))
        limits["flops_per_s"][name] = (
            2 * small.shape[0] ** 3 / min(best(product, device) for product in products)
        )
    return limits


def best(call: Callable[[], Any], device: torch.device, tries: int = 6) -> float:
    """Return the shortest time of a call, in seconds."""
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def against(
    family: str, python: str, order: dict[str, Any], request: Request, log_line: Callable[[str], None]
) -> dict[str, Any]:
    """Run the reference on the same work, in its own environment. Raises ValueError if it fails."""
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as place:
        order = order | {"request": reference.fields(request, Path(place), "request")}
        result = reference.run(family, python, order)
    for run in result["runs"]:
        rtf = run["rtf"]
        speed = run["audio_s_per_s"]
        log_line(f"streams {run['streams']:3}: RTF {rtf:.3f}  {speed:.2f} audio-s/s  (reference)")
    return result
