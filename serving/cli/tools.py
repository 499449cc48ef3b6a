"""What looks at a model: zoo inspect, bench, warm, parity and demo-checkpoint."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from serving.cli.common import (
    Codec,
    Device,
    DType,
    ModelArgument,
    app,
    named_directories,
    num_bytes,
    progress_bar,
    readable,
)
from zoo import SMALL_VOICE
from zoo.hub import resolved

ReferencePython = Annotated[
    Path | None,
    Option(
        help="The Python of the reference's environment; otherwise that of .venv-parity-FAMILY, which `make fixtures` builds."
    ),
]


@app.command()
def inspect(
    model: ModelArgument = str(SMALL_VOICE),
    slots: Annotated[int, Option(min=1, max=1024, help="Of the memory plan: requests at once.")] = 8,
    dtype: DType = None,
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
) -> int:
    """What a model is and what memory it takes, without loading its weights, and what computes its attention
    on a device."""
    import zoo

    facts = zoo.inspect(model, device)
    facts["memory"] = memory(model, slots, dtype or "bfloat16", device)
    if as_json:
        print(json.dumps(facts))
        return 0

    from rich.console import Console
    from rich.table import Table

    table = Table(title=model, show_header=False, title_justify="left")
    options, taken = facts.pop("options"), facts.pop("memory")
    for name, value in taken.items():
        facts[f"memory: {name.removesuffix('_bytes')}"] = (
            f"{value / 2**20:,.1f} MiB" if name.endswith("_bytes") else value
        )
    for name, value in facts.items():
        table.add_row(name, readable(value))
    Console().print(table)
    possible = Table("name", "possible", "default", "", title="options", title_justify="left")
    for name, option in options.items():
        default = "" if option["default"] is None else readable(option["default"])
        possible.add_row(name, option["possible"], default, option["help"])
    Console().print(possible)
    return 0


def memory(model: str, slots: int, dtype: str, device: str | None) -> dict[str, int | str]:
    """The memory plan; why there is none, where a file of weights is missing or wrong."""
    import torch

    import zoo
    from serving.engine.memory_plan import plan

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        made = plan(zoo.load(model, "meta", dtype), slots, is_for_cpu=where == "cpu")
    except ValueError as error:
        return {"unknown": str(error)}
    parts = asdict(made) | {"total": made.total}
    return {"slots": parts.pop("slots"), "dtype": dtype} | {f"{name}_bytes": n for name, n in parts.items()}


@app.command()
def bench(
    model: ModelArgument = str(SMALL_VOICE),
    streams: Annotated[
        list[int], Option(min=1, help="How many requests at once; may be given several times.")
    ] = [1, 8],  # noqa: B006
    frames: Annotated[int, Option(min=1, help="Of each request.")] = 50,
    rounds: Annotated[int, Option(min=1, help="Requests per stream, one after the other.")] = 2,
    voice: Annotated[str | None, Option(help="Which preset voice.")] = None,
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
    dtype: Annotated[str | None, Option(help="float32 or bfloat16.")] = None,
    policy: Annotated[str, Option(help="streaming or throughput.")] = "streaming",
    compile: Annotated[bool, Option(help="Compile the step.")] = True,
    against: Annotated[
        str | None,
        Option(help="reference: run the reference implementation on the same work, in the same run."),
    ] = None,
    reference_python: ReferencePython = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
) -> int:
    """Measure a model on this machine: real-time factor, first audio, audio-s/s, and how near it comes to the
    hardware's limit."""
    if against not in (None, "reference"):
        raise ValueError(f"--against {against}: possible is: reference")
    directory = resolved(model)

    from functools import partial

    from serving.tools.bench import bench as measure

    result = measure(
        directory,
        streams=tuple(streams),
        frames=frames,
        rounds=rounds,
        device=device,
        dtype=dtype,
        compile=compile,
        policy=policy,
        voice=voice,
        reference_python=str(reference_python or usual_reference(directory)) if against else None,
        log_line=partial(print, file=sys.stderr, flush=True),
    )
    if as_json:
        print(json.dumps(result))
    return 0


@app.command()
def warm(
    models: Annotated[
        list[str],
        Argument(metavar="MODEL", help="As zoo serve takes them: one server's.", show_default=False),
    ] = [],  # noqa: B006
    device: Device = None,
    dtype: DType = None,
    max_slots: Annotated[int | None, Option(min=1, max=1024, help="As of zoo serve.")] = None,
    kv_memory: Annotated[str | None, Option(help="As of zoo serve.")] = None,
    policy: Annotated[Literal["streaming", "throughput"], Option(help="As of zoo serve.")] = "streaming",
    deterministic: Annotated[bool, Option("--deterministic", help="As of zoo serve.")] = False,
    codec: Codec = "float32",
    cache_dir: Annotated[
        Path | None,
        Option(help="Where compiled code is kept; ZOO_CACHE_DIR or ~/.cache/speechzoo otherwise."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object a model, for programs.")] = False,
) -> int:
    """Compile ahead of time what zoo serve with the same arguments needs, so that it is ready in seconds. On a CPU other
    numbers of slots, other memory and other sets of the same models find it too."""
    options: dict[str, Any] = {
        "models": named_directories(models or [str(SMALL_VOICE)]),
        "device": device,
        "dtype": dtype,
        "max_slots": max_slots,
        "kv_bytes": None if kv_memory is None else num_bytes(kv_memory),
        "policy": policy,
        "deterministic": deterministic,
        "codec": codec,
    }
    if cache_dir is not None:
        os.environ["ZOO_CACHE_DIR"] = str(cache_dir.resolve())

    from serving.engine.engine_process import Options
    from serving.tools.warm import warm as compile_all

    with progress_bar(", ".join(options["models"])) as advance:
        made = compile_all(Options(socket="", **options), advance)
    for done in made:
        if as_json:
            print(json.dumps(done))
        else:
            print(
                f"{done['model']}: {done['graphs']} graphs ({done['found']} found, {done['compiled']} compiled), "
                f"loaded in {done['load_s']:.1f} s, warm in {done['warm_s']:.1f} s; kept in {done['cache']}"
            )
    return 0


@app.command()
def parity(
    model: ModelArgument = str(SMALL_VOICE),
    frames: Annotated[int, Option(min=1, help="Of each request.")] = 50,
    device: Device = None,
    dtype: DType = None,
    compile: Annotated[bool, Option(help="Compile the served form.")] = True,
    codec: Codec = "float32",
    reference_python: ReferencePython = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
) -> int:
    """Measure how exact a model is: its served form against the plain fp32 one, and that against the
    reference implementation."""
    directory = resolved(model)

    from functools import partial

    from rich.console import Console
    from rich.table import Table

    from serving.tools.parity import parity as measure

    reference_python = reference_python or usual_reference(directory)
    result = measure(
        directory,
        device=device,
        dtype=dtype,
        compile=compile,
        frames=frames,
        codec=codec,
        reference_python=str(reference_python) if reference_python.exists() else None,
        log_line=partial(print, file=sys.stderr, flush=True),
    )
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return 0
    form = f"{'compiled' if compile else 'eager'} {result['dtype']}"
    table = Table(title=f"{model}: {result['family']} {result['variant']}", title_justify="left")
    for column in ("request", "ours", "theirs", "steps equal", "seconds equal", "most apart", "SNR"):
        table.add_column(column)
    compared = [(name, form, "plain float32", run) for name, run in result["served"].items()]
    if result["reference"] is not None:
        theirs = result["reference"]["name"]
        compared += [
            (name, "plain float32", theirs, run) for name, run in result["reference"]["runs"].items()
        ]
    for name, ours, theirs, run in compared:
        steps = f"{run['steps_equal']} of {run['steps']}" if "steps" in run else ""
        table.add_row(
            name,
            ours,
            theirs,
            steps,
            f"{run['equal_s']:.2f} of {run['expected_s']:.2f}",
            f"{run['largest_sample_difference']:.1e}",
            "no difference" if run["snr_db"] is None else f"{run['snr_db']:.0f} dB",
        )
    Console().print(table)
    for name, why in result["refused"].items():
        print(f"Not asked, since the model refuses it: {name} ({why})")
    print(f"Compiled after the warm-up: {result['compiles_after_warmup']}")
    if result["reference"] is None:
        print(
            f"Not compared with the reference: {reference_python} does not exist; `make fixtures` builds it in a source tree."
        )
    return 0


@app.command()
def demo_checkpoint(
    family: Annotated[str, Argument(help="Which family of models.")],
    directory: Annotated[Path, Argument(help="The directory to write; it must not exist, or be empty.")],
    size: Annotated[str, Option(help="tiny, or one of the family's published sizes.")] = "tiny",
    seed: Annotated[int, Option(min=0, max=2**63 - 1)] = 0,
) -> int:
    """Write a checkpoint of random weights in the published layout: it makes noise, at the speed and in the
    shape of the real one."""
    import zoo

    families = zoo.families()
    if family not in families:
        raise ValueError(f"there is no family {family!r}; there is: {', '.join(families)}")
    try:
        families[family].write_demo(directory, size=size, seed=seed)
    except OSError as error:
        raise ValueError(f"{directory} cannot be written: {error.strerror}") from None
    print(f"{directory}: {family}, {size}, seed {seed}")
    return 0


def usual_reference(model: str) -> Path:
    """The Python of the environment that `make fixtures` builds for the model's family. Raises ValueError."""
    import zoo

    return Path(f".venv-parity-{zoo.find(model)[0].NAME}/bin/python")
