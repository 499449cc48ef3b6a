"""How fast a model is on this machine, and how fast it could be: `zoo bench`.

The clock is a listener's: from the request to its first samples, and seconds of audio counted from samples and the true rate. The floor
comes from the model itself: one eager step is watched, and the weights that its matrix products and convolutions read, and the
arithmetic they do, are counted. What the machine can do is measured in the same run.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zoo
from compile_cache import threads
from serving.engine.engine import Audio, Engine, Failed, Text
from serving.engine.prepare_for_host import prepare_for_host
from serving.engine.runner import PAGE_TOKENS, Arena, AsyncCopy, Runner, token_bytes
from zoo.contract import Family, Request, View

TEXT = "The quick brown fox jumps over the lazy dog, and then the other fox says hello to the world."
REFERENCES = Path(__file__).parent.parent / "benchmarks"  # reference_FAMILY.py


def bench(
    directory: str,
    *,
    streams: tuple[int, ...] = (1, 8),
    frames: int = 50,
    rounds: int = 2,
    device: str | None = None,
    dtype: str | None = None,
    compile: bool = True,
    policy: str = "streaming",
    voice: str | None = None,
    reference_python: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Closed loop: `streams` requests at once, `rounds` times over, of `frames` frames (fewer if the model ends). Raises ValueError."""
    family = zoo.load(directory, device=device, dtype=dtype)
    spec = family.spec
    request: dict[str, Any] = {"text": TEXT, "voice": voice or (spec.voices[0] if spec.voices else None), "max_frames": frames}
    floor = work(family, Request(**request))
    prepare_for_host(family, compile=compile)
    limits = machine(family)
    say(f"this machine: {limits['bytes_per_s'] / 1e9:.1f} GB/s, {limits['flops_per_s'] / 1e9:.0f} GFLOP/s in {family.dtype}")
    engine = Engine(family, max_slots=max(streams), policy=policy, compile=compile)
    began = time.perf_counter()
    engine.warm(lambda progress, detail: say(f"warming {progress:4.0%} {detail}"))
    result: dict[str, Any] = {
        "family": spec.family,
        "variant": spec.variant,
        "device": torch.cuda.get_device_name() if family.device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(family.dtype).removeprefix("torch."),
        "compiled": compile,
        "warm_s": time.perf_counter() - began,
        "machine": limits,
        "step_weight_bytes": floor["step"]["bytes"],
        "frame_flops": floor["step"]["flops"] + floor["render"]["flops"],
        "runs": [],
    }

    def drive() -> None:
        try:
            for count in streams:
                load(engine, count, 1, {**request, "max_frames": 4})  # caches, allocators, page faults
                run = load(engine, count, rounds, request)
                run["floor_ms_per_frame"] = least_ms(floor, limits, count, max(spec.window.sizes))
                run["floor_fraction"] = run["floor_ms_per_frame"] * run["frames"] / count / (1e3 * run["wall_s"])
                result["runs"].append(run)
                say(line(run))
        finally:
            engine.stop()

    with ThreadPoolExecutor(1, "load", threads.use_one_thread) as pool:  # the engine has the main thread, as in a server
        driving = pool.submit(drive)
        engine.run()
        driving.result()
    result["peak_memory_bytes"] = peak_memory(family.device)
    if reference_python:
        del engine
        result["reference"] = against(directory, spec.family, reference_python, streams, rounds, frames, result["dtype"], request, say)
        for run, theirs in zip(result["runs"], result["reference"]["runs"], strict=True):
            run["speedup"] = run["audio_s_per_s"] / theirs["audio_s_per_s"]
    return result


def line(run: dict[str, Any]) -> str:
    return (
        f"{run['streams']:3} streams: RTF {run['rtf']:.3f}  {run['audio_s_per_s']:.2f} audio-s/s  first audio {run['ttfa_ms']:.0f} ms  "
        f"{run['step_ms']:.1f} ms/step, of it host {run['host_ms_per_step']:.2f}  floor {run['floor_fraction']:.0%}"
    )


def load(engine: Engine, streams: int, rounds: int, request: dict[str, Any]) -> dict[str, Any]:
    """`rounds` requests on each of `streams` lines, the next when the last is done."""
    [model] = engine.models.values()
    rate = model.family.spec.sample_rate_hz
    first, samples, frames, errors = [], [], [], []
    left, done = threading.Semaphore(0), threading.Lock()

    def start(line: int, turn: int) -> None:
        began, heard = time.perf_counter(), [0, 0]

        def deliver(event: Any) -> None:
            if isinstance(event, Audio):
                if heard[0] == 0:
                    first.append(time.perf_counter() - began)
                heard[0] += len(event.samples)
                heard[1] += event.frames
            if isinstance(event, Audio | Text):
                return
            with done:
                samples.append(heard[0])
                frames.append(heard[1])
            if isinstance(event, Failed):
                errors.append(event.message)
            if turn + 1 < rounds and not errors:
                start(line, turn + 1)
            else:
                left.release()

        engine.speak(f"{line}-{turn}", Request(**request, seed=1000 * line + turn), deliver)

    clock = Clock(model.runner)
    began = time.perf_counter()
    for line_ in range(streams):
        start(line_, 0)
    for _ in range(streams):
        left.acquire()
    wall = time.perf_counter() - began
    clock.stop()
    if errors:
        raise RuntimeError(errors[0])
    audio = sum(samples) / rate
    return {
        "streams": streams,
        "requests": streams * rounds,
        "frames": sum(frames),
        "audio_s": audio,
        "wall_s": wall,
        "rtf": wall * streams / audio,
        "audio_s_per_s": audio / wall,
        "ttfa_ms": 1e3 * float(np.median(first)),
        "ttfa_p90_ms": 1e3 * float(np.quantile(first, 0.9)),
        "step_ms": 1e3 * clock.step_s / clock.steps,
        "render_ms": 1e3 * clock.render_s / clock.steps,
        "host_ms_per_step": 1e3 * max(wall - clock.step_s - clock.render_s - clock.other_s, 0.0) / clock.steps,
    }


class Clock:
    """Time inside the runner's lowered calls and waits for them; all other time is the host's."""

    def __init__(self, runner: Runner):
        self.runner, self.steps = runner, 0
        self.step_s = self.render_s = self.other_s = 0.0
        self.plain = runner._step, runner._hidden, runner._render, AsyncCopy.read
        runner._step, runner._hidden, runner._render = (
            self._timed(call, name) for call, name in zip(self.plain, ("step_s", "other_s", "render_s"), strict=False)
        )
        AsyncCopy.read = self._timed(AsyncCopy.read, "other_s")  # type: ignore[method-assign]

    def stop(self) -> None:
        self.runner._step, self.runner._hidden, self.runner._render, AsyncCopy.read = self.plain  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)
            self.steps += name == "step_s"
            return result

        return timed


class Traffic(TorchDispatchMode):
    """Bytes of weights that pass through matrix products and convolutions, each time they do."""

    HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "matmul")

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.HEAVY:
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() in self.weights:
                    self.bytes += arg.numel() * arg.itemsize
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def work(family: Family, request: Request) -> dict[str, dict[str, int]]:
    """Weights read and arithmetic done by one eager step of one stream, and by its largest window; of that, the arithmetic of a frame."""
    prompt, window = family.prompt(request), family.spec.window.sizes[-1]
    lanes, pages = len(prompt.lanes), -(-max(len(lane.inputs) for lane in prompt.lanes) // PAGE_TOKENS)
    runner = Runner(family, 1, Arena([family], (1 + lanes * pages) * PAGE_TOKENS * token_bytes(family)), compile=False)
    own = [range(1 + lane * pages, 1 + (lane + 1) * pages) for lane in range(lanes)]
    runner.open(0, prompt, own, [len(lane.inputs) - 1 for lane in prompt.lanes])
    row = torch.zeros(1, dtype=torch.int64, device=family.device)
    calls = {
        "step": lambda: runner.step(np.zeros(1, np.int64)).read(),
        "render": lambda: family.render(runner.state, View(row, row, row + window, window)),
    }
    counts: dict[str, dict[str, int]] = {}
    with torch.inference_mode(False):
        for name, call in calls.items():
            with FlopCounterMode(display=False) as flops, Traffic(family) as traffic:
                call()
            counts[name] = {"bytes": traffic.bytes, "flops": flops.get_total_flops()}
    counts["render"]["flops"] //= window
    return counts


def least_ms(floor: dict[str, dict[str, int]], limits: dict[str, float], streams: int, window: int) -> float:
    """The least time for a frame of every stream: weights at full bandwidth or arithmetic at full rate, whichever takes longer; the
    renderer's weights are read once per largest window."""
    step, render = floor["step"], floor["render"]
    read = (step["bytes"] + render["bytes"] / window) / limits["bytes_per_s"]
    compute = streams * (step["flops"] + render["flops"]) / limits["flops_per_s"]
    return 1e3 * max(read, compute)


def machine(family: Family) -> dict[str, float]:
    """Bytes per second of a large matrix-vector product, and FLOP/s of a large matrix product, in the model's dtype: the best of some."""
    device, dtype = family.device, family.dtype
    side = 16384 if device.type == "cuda" else 8192
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    vector = torch.ones(side, 1, dtype=dtype, device=device)
    small = matrix[: side // 4, : side // 4].contiguous()
    return {
        "bytes_per_s": matrix.numel() * matrix.itemsize / best(lambda: matrix @ vector, device),
        "flops_per_s": 2 * small.shape[0] ** 3 / best(lambda: small @ small, device),
    }


def best(call: Callable[[], Any], device: torch.device, tries: int = 6) -> float:
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def against(
    directory: str, family: str, python: str, streams: tuple[int, ...], rounds: int, frames: int, dtype: str, request: dict, say: Callable
) -> dict[str, Any]:
    """The reference implementation on the same work, in its own environment. Raises ValueError if it cannot be run."""
    script = REFERENCES / f"reference_{family}.py"
    if not script.exists():
        raise ValueError(f"{script} does not exist: running against the reference needs a source tree that has one for this family")
    order = {"directory": str(Path(directory).resolve()), "streams": streams, "rounds": rounds, "frames": frames, "dtype": dtype, **request}
    say("the reference ...")
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        out = subprocess.run([python, str(script), json.dumps(order)], stdout=subprocess.PIPE, check=True, env=env, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"the reference did not run with {python}: {error}") from None
    result = json.loads(out.stdout.splitlines()[-1])
    for run in result["runs"]:
        say(f"{run['streams']:3} streams: RTF {run['rtf']:.3f}  {run['audio_s_per_s']:.2f} audio-s/s  (the reference)")
    return result

