"""Measure one step of a model in several lowered forms: compile time, step time and kernels a step.

    python benchmarks/step.py DIR [--dtype float32] [--batches 1 4 8] [--how eager flat mlp blocks regions] [--json OUT]

    eager    the function as it is written
    flat     the whole step as one graph with every block unrolled; a graph for each batch size, since inductor 2.13 fails otherwise
    mlp      only the gated MLPs are compiled, once for all of them
    blocks   each repeated block is a callable, compiled once for all of them; everything between them is eager
    regions  the whole step as one graph that holds each repeated block once, for every batch size (the server's form)
    bucket   the same, but a graph for each batch size

Each form is measured in two processes: with an empty cache directory, and with the cache that the first one
left. Kernels are the leaves of the profile: operators that call no other operator, and inductor's generated
functions.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

HOWS = ("eager", "flat", "mlp", "blocks", "regions", "bucket")
APART = ("mlp", "blocks")  # the step itself is eager
USUAL = ("eager", "flat", "blocks", "regions")
POSITIONS = 48  # in the cache of every slot when the clock starts
# attribute in which torch.compiler.nested_compile_region keeps the original function
MARK = "__marked_compile_region_fn__"


def measure(directory: str, dtype: str, batches: list[int], how: str) -> dict:
    import numpy as np
    import torch
    import torch._inductor.config

    import zoo
    from compile_cache import threads
    from serving.engine.device.arena import PAGE_TOKENS, Arena, common_page_bytes
    from serving.engine.device.runner import Runner
    from serving.engine.device.warmup import warm_step
    from serving.tools.requests import first_request
    from zoo import kernels
    from zoo.nn.linear import SwiGLU
    from zoo.nn.pack import pack

    torch._inductor.config.cpp.enable_kernel_profile = True
    family = zoo.load(directory, dtype=dtype)
    threads.set_num_threads(family, is_compiled=True)
    kernels.build()
    pack(family)
    if how in ("flat", "mlp", "blocks"):
        unmark(family, compile_blocks=how == "blocks")
    if how == "mlp":
        SwiGLU.forward = torch.compile(
            SwiGLU.forward, fullgraph=True, dynamic=True, options={"cpp.threads": 1}
        )
    slots = max(batches)
    pages = -(-(POSITIONS + 64) // PAGE_TOKENS)
    lanes = family.spec.lanes
    arena = Arena([family], (slots * lanes * pages + 2) * common_page_bytes([family]))
    runner = Runner(family, slots, arena, compile=how not in ("eager", *APART))
    request = first_request(family, text="Hello there.")
    for slot in range(slots):
        own = [range(1 + i * pages, 1 + (i + 1) * pages) for i in range(slot * lanes, (slot + 1) * lanes)]
        runner.open(slot, family.prompt(request), own, [POSITIONS] * lanes)

    def step(batch: int) -> None:
        runner.step(np.arange(batch)).read()

    before, began_s = usage(), time.perf_counter()
    if how == "regions":  # one graph for every size
        with torch.inference_mode():
            warm_step(runner)
    else:
        for batch in batches:
            step(batch)
    result: dict[str, Any] = {"how": how, "ready_s": time.perf_counter() - began_s}
    result |= {"ready_cpu_s": usage() - before, "step_ms": {}}
    for batch in batches:
        times = []
        for _ in range(8):
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
        result["step_ms"][batch] = 1e3 * sorted(times)[len(times) // 2]
    result["kernels"] = num_kernels(lambda: step(batches[0]))
    return result


def unmark(family: Any, compile_blocks: bool) -> None:
    """Remove the region marks of all functions; optionally compile repeated blocks separately instead."""
    import torch
    import torch.fx.experimental._config

    # Sizes that are equal once may differ later, for example the places of a frame's steps.
    if compile_blocks:
        torch.fx.experimental._config.use_duck_shape = False
        torch._dynamo.config.recompile_limit = 64
    for kind in {type(module) for module in family.modules()}:
        if plain := vars(kind.forward).get(MARK):
            kind.forward = (
                torch.compile(plain, fullgraph=True, dynamic=True, options={"cpp.threads": 1})
                if compile_blocks
                else plain
            )
    for name, module in tuple(sys.modules.items()):
        if name.startswith("zoo."):
            for key, value in tuple(vars(module).items()):
                if plain := getattr(value, "__dict__", {}).get(MARK):
                    setattr(module, key, plain)


def num_kernels(call: Any) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    operators = [
        event
        for event in seen.events()
        if event.name.startswith(("aten::", "zoo::", "mkldnn::", "cpp_fused"))
    ]
    return sum(
        not any(child.name.startswith(("aten::", "mkldnn::")) for child in event.cpu_children)
        for event in operators
    )


def usage() -> float:
    """Return the CPU seconds of this process and of the compilers that it ran."""
    return sum(
        r.ru_utime + r.ru_stime
        for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--how", nargs="+", choices=HOWS, default=list(USUAL))
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.directory, options.dtype, options.batches, options.how[0])))
        return
    results = []
    for how in options.how:
        with tempfile.TemporaryDirectory() as cache:
            for cached in (False,) if how == "eager" else (False, True):
                command = [
                    sys.executable,
                    __file__,
                    options.directory,
                    "--dtype",
                    options.dtype,
                    "--worker",
                    "--how",
                    how,
                    "--batches",
                ]
                command += map(str, options.batches)
                out = subprocess.run(
                    command,
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                result = {"cached": cached, **json.loads(out.stdout.splitlines()[-1])}
                steps = "  ".join(f"{batch}: {ms:.1f}" for batch, ms in result["step_ms"].items())
                print(
                    f"{how:8} {'warm' if cached else 'cold'}  ready {result['ready_s']:6.1f} s  CPU {result['ready_cpu_s']:6.1f} s  "
                    f"{result['kernels']:5} kernels  step ms by batch  {steps}",
                    flush=True,
                )
                results.append(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
