"""One step of a model, as it is lowered: compile time cold and warm, and step time by batch size.

    python benchmarks/step.py DIR [--dtype float32] [--batches 1 4 8] [--how eager flat blocks regions bucket] [--json OUT]

eager    the function as it is written
flat     the whole step as one graph, every block unrolled; a graph per batch size, since inductor 2.13 fails on one for all
blocks   each repeated block is a callable of its own, compiled once for all of them; what is between them runs as written
regions  the whole step as one graph that holds each repeated block once; one graph for every batch size (what the server uses)
bucket   the same, but one graph per batch size
Each is measured in processes of its own: first with an empty cache directory, then again with what the first one left.
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

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

HOWS = ("eager", "flat", "blocks", "regions", "bucket")
POSITIONS = 48  # in the cache of every slot when the clock starts


def measure(directory: str, dtype: str, batches: list[int], how: str) -> dict:
    import numpy as np
    import torch

    import zoo
    from serving import runner as running
    from zoo.nn.packed import pack

    if how in ("flat", "blocks"):
        unroll()
    if how in ("flat", "bucket"):
        running.any_size = lambda *_: None
    family = zoo.load(directory, dtype=dtype)
    pack(family)
    if how == "blocks":
        compile_blocks()
    slots = max(batches)
    pages = -(-(POSITIONS + 64) // running.PAGE_TOKENS)
    page_bytes = running.PAGE_TOKENS * family.spec.kv.token_bytes(family.dtype)
    arena = running.Arena([family], (slots * pages + 2) * page_bytes)
    runner = running.Runner(family, slots, arena, compile=how not in ("eager", "blocks"))
    request = zoo.Request(text="Hello there.", voice=family.spec.voices[0], temperature=0.9)
    for slot in range(slots):
        runner.open(slot, family.prompt(request), range(1 + slot * pages, 1 + (slot + 1) * pages), POSITIONS)

    before, began = usage(), time.perf_counter()
    with torch.inference_mode():
        runner._warm_step()
    for batch in batches if how in ("flat", "blocks", "bucket") else []:
        runner.step(np.arange(batch)).read()
    result = {"how": how, "ready_s": time.perf_counter() - began, "ready_cpu_s": usage() - before, "step_ms": {}}
    for batch in batches:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            runner.step(np.arange(batch)).read()
            times.append(time.perf_counter() - start)
        result["step_ms"][batch] = 1e3 * sorted(times)[len(times) // 2]
    return result


def unroll() -> None:
    """Take the marks off the repeated blocks."""
    from zoo.nn import sampling
    from zoo.qwen3_tts import depth, model

    for owner in (depth.DepthBlock, model.Block):
        owner.forward = owner.forward.__marked_compile_region_fn__
    model.draw = sampling.draw.__marked_compile_region_fn__


def compile_blocks() -> None:
    """Without the check that sizes which are equal once stay equal: the places of a frame's steps are such sizes."""
    import torch
    import torch.fx.experimental._config

    torch.fx.experimental._config.use_duck_shape = False
    torch._dynamo.config.recompile_limit = 64
    from zoo.qwen3_tts import depth, model

    for owner in (depth.DepthBlock, model.Block):
        owner.forward = torch.compile(owner.forward, fullgraph=True, dynamic=True, options={"cpp.threads": 1})


def usage() -> float:
    """CPU seconds of this process and of the compilers it ran."""
    return sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--how", nargs="+", choices=HOWS, default=list(HOWS))
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
                command = [sys.executable, __file__, options.directory, "--dtype", options.dtype, "--worker", "--how", how, "--batches"]
                command += map(str, options.batches)
                out = subprocess.run(command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}, stdout=subprocess.PIPE, check=True)
                result = {"cached": cached, **json.loads(out.stdout.splitlines()[-1])}
                steps = "  ".join(f"{batch}: {ms:.1f}" for batch, ms in result["step_ms"].items())
                print(
                    f"{how:8} {'warm' if cached else 'cold'}  ready {result['ready_s']:6.1f} s  "
                    f"CPU {result['ready_cpu_s']:6.1f} s  step ms by batch  {steps}",
                    flush=True,
                )
                results.append(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
