"""The commands `zoo inspect`, `bench`, `warm`, `parity` and `demo-checkpoint`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from serving.cli.common import (
    MODEL,
    AsJson,
    Attention,
    Chunked,
    Codec,
    Compile,
    Depth,
    Device,
    DeviceMap,
    DType,
    KVMemory,
    MaxSlots,
    ModelArgument,
    Weights,
    app,
    directory_path,
    fail,
    named_directories,
    num_bytes,
    plural,
    progress_bar,
    readable,
)
from serving.cli.request_flags import ModelOptions
from serving.cli.say import parsed_option
from zoo import SMALL_VOICE
from zoo.hub import resolved

ReferencePython = Annotated[
    Path | None,
    Option(
        help="The reference runs with this Python. Default: the one in .venv-parity-FAMILY, which `make "
        "fixtures` builds."
    ),
]


@app.command()
def inspect(
    model: ModelArgument = str(SMALL_VOICE),
    slots: Annotated[
        int, Option(min=1, max=1024, help="The memory plan assumes this many requests at once.")
    ] = 8,
    as_json: AsJson = False,
    device: Device = None,
    dtype: DType = None,
    device_map: DeviceMap = None,
) -> int:
    """Show a model's properties, memory plan, attention kernel and options.

    The weights are not loaded. A model with a missing or damaged file has no memory plan; the exit status is then 1.
    """
    import zoo

    facts = zoo.inspect(model, device)
    facts["memory"] = memory(model, slots, dtype, device, device_map)
    problem = facts["memory"].get("unknown")
    if as_json:
        print(json.dumps(facts))
    else:
        show(model, facts)
    if problem is not None:
        fail(problem, 1)
    return 0


def show(model: str, facts: dict[str, Any]) -> None:
    """Print the facts of `inspect` as tables."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=model, show_header=False, title_justify="left")
    options = facts.pop("options")
    taken = facts.pop("memory")
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


def memory(
    model: str, slots: int, dtype: str | None, device: str | None, device_map: str | None
) -> dict[str, int | str]:
    """Return the memory plan, with what a device map puts elsewhere; or why there is none if a file of
    weights or the map is missing or wrong. dtype None: the one that `zoo serve` takes on the device."""
    import torch

    import zoo
    from serving.engine.memory import device_map as maps
    from serving.engine.memory.memory_plan import plan

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if where == "cpu" else "bfloat16")
    try:
        is_for_cpu = where == "cpu"
        family = zoo.load(model, "meta", dtype, keeps_bf16=is_for_cpu)
        made = plan(family, slots, is_for_cpu=is_for_cpu)
        elsewhere: dict[str, int] = {}
        if device_map is not None:
            devices = maps.device_map(device_map, family, made, maps.room_of_devices(torch.device(where)))
            elsewhere = maps.bytes_by_device(family, devices)
    except ValueError as error:
        return {"unknown": str(error)}
    parts = asdict(made) | {"total": made.total}
    parts |= {f"layers_on_{other}": n for other, n in elsewhere.items()}
    return {"slots": parts.pop("slots"), "dtype": dtype} | {f"{name}_bytes": n for name, n in parts.items()}


@app.command()
def bench(
    model: ModelArgument = str(SMALL_VOICE),
    streams: Annotated[
        list[int],
        Option(
            min=1, help="This many requests run at once. Repeat it to measure several numbers of streams."
        ),
    ] = [1, 8],  # noqa: B006
    frames: Annotated[int, Option(min=1, help="Each request speaks at most this many frames.")] = 50,
    rounds: Annotated[
        int, Option(min=1, help="Each stream makes this many requests, one after the other.")
    ] = 2,
    voice: Annotated[
        str | None, Option(help="The model speaks in this preset voice. Default: its first one.")
    ] = None,
    options: ModelOptions = [],  # noqa: B006
    against: Annotated[
        str | None,
        Option(help="--against reference also measures the reference implementation, on the same work."),
    ] = None,
    reference_python: ReferencePython = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Annotated[
        str | None,
        Option(
            help="The model computes in float32 or bfloat16. Default: bfloat16 on a GPU, float32 on a CPU.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    weights: Weights = "published",
    policy: Annotated[
        str,
        Option(
            help="The engine runs with this policy: streaming, throughput or fifo.", rich_help_panel=MODEL
        ),
    ] = "streaming",
    compile: Compile = True,
) -> int:
    """Measure a model's speed on this machine and compare it with the hardware's limit.

    The results are the real-time factor, time to first audio, audio seconds per second and the fraction of
    the limit.
    """
    if against not in (None, "reference"):
        raise ValueError(f"--against {against} is not possible; use --against reference")
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
        weights=weights,
        compile=compile,
        policy=policy,
        voice=voice,
        options=lambda spec: dict(parsed_option(option, spec) for option in options),
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
        Argument(
            metavar="MODEL",
            help="These are the models of one server, given as in zoo serve. Default: the bundled small "
            "voice.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    cache_dir: Annotated[
        Path | None,
        Option(
            parser=directory_path,
            metavar="DIR",
            help="Compiled code is kept in this directory. Default: ZOO_CACHE_DIR, else ~/.cache/speechzoo.",
        ),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="The command prints one JSON object per model, for programs.")
    ] = False,
    device: Device = None,
    dtype: DType = None,
    weights: Weights = "published",
    chunked: Chunked = False,
    codec: Codec = "float32",
    attention: Attention = "auto",
    depth: Depth = "layers",
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="The server will run with --deterministic.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    policy: Annotated[
        Literal["streaming", "throughput"],
        Option(help="The server will run with this policy.", rich_help_panel=MODEL),
    ] = "streaming",
    max_slots: MaxSlots = None,
    kv_memory: KVMemory = None,
) -> int:
    """Compile models ahead of time, so that zoo serve is ready in seconds.

    Use the same arguments as for zoo serve. On a CPU, a server with another number of slots, another KV
    memory or another set of the same models finds the code too.
    """
    directories = named_directories(models or [str(SMALL_VOICE)])
    kv_memory_bytes = None if kv_memory is None else num_bytes(kv_memory)
    if cache_dir is not None:
        os.environ["ZOO_CACHE_DIR"] = str(cache_dir.resolve())

    from serving.settings import Latency, Memory, ModelOptions, Settings
    from serving.tools.warm import warm as compile_all

    how = ModelOptions(
        device=device,
        dtype=dtype,
        weights=weights,
        chunked=chunked,
        deterministic=deterministic,
        codec=codec,
        attention=attention,
        depth=depth,
    )
    memory = Memory(max_slots, kv_memory_bytes)
    settings = Settings(directories, model=how, memory=memory, latency=Latency(policy))
    with progress_bar(", ".join(directories)) as advance:
        made = compile_all(settings, advance)
    for done in made:
        if as_json:
            print(json.dumps(done))
        else:
            print(
                f"{done['model']}: {plural(done['graphs'], 'graph')} ({done['found']} found, "
                f"{done['compiled']} compiled), "
                f"loaded in {done['load_s']:.1f} s, warm in {done['warm_s']:.1f} s; kept in {done['cache']}"
            )
    return 0


@app.command()
def parity(
    model: ModelArgument = str(SMALL_VOICE),
    frames: Annotated[int, Option(min=1, help="Each request speaks at most this many frames.")] = 50,
    reference_python: ReferencePython = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: DType = None,
    weights: Weights = "published",
    codec: Codec = "float32",
    attention: Attention = "auto",
    depth: Depth = "layers",
    compile: Compile = True,
) -> int:
    """Measure a model's numerical error.

    The served form is compared with the plain fp32 form, and the plain form with the reference
    implementation.
    """
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
        weights=weights,
        compile=compile,
        frames=frames,
        codec=codec,
        attention=attention,
        depth=depth,
        reference_python=str(reference_python) if reference_python.exists() else None,
        log_line=partial(print, file=sys.stderr, flush=True),
    )
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return 0
    form = f"{'compiled' if compile else 'eager'} {result['dtype']}"
    if weights != "published":
        form += f", weights {weights}"
    if depth != "layers":
        form += f", depth {depth}"
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
        text = {True: "text is equal", False: "text differs"}.get(run.get("text_is_equal"), "")
        steps = f"{run['steps_equal']} of {run['steps']}" if "steps" in run else text
        table.add_row(
            name,
            ours,
            theirs,
            steps,
            f"{run['equal_s']:.2f} of {max(run['expected_s'], run['audio_s']):.2f}",
            f"{run['largest_sample_difference']:.1e}",
            "no difference" if run["snr_db"] is None else f"{run['snr_db']:.0f} dB",
        )
    Console().print(table)
    for name, why in result["refused"].items():
        print(f"Skipped because the model refuses it: {name} ({why})")
    print(f"Graphs compiled after the warm-up: {result['compiles_after_warmup']}")
    if result["reference"] is None:
        print(
            f"Not compared with the reference: {reference_python} does not exist; `make fixtures` builds "
            "it in a source tree."
        )
    return 0


@app.command()
def demo_checkpoint(
    family: Annotated[str, Argument(help="The checkpoint is of this family of models.")],
    directory: Annotated[
        Path, Argument(help="The checkpoint goes into this directory, which must be empty or not exist.")
    ],
    size: Annotated[
        str,
        Option(
            help="The model has this size: tiny, mid, full (as published), or another size of the family."
        ),
    ] = "tiny",
    seed: Annotated[
        int, Option(min=0, max=2**63 - 1, help="The random weights are drawn with this seed.")
    ] = 0,
) -> int:
    """Write a checkpoint of random weights in the published layout.

    The model makes noise, at the speed and in the shape of the real one.
    """
    import zoo

    families = zoo.families()
    if family not in families:
        raise ValueError(f"there is no family {family!r}; possible families: {', '.join(families)}")
    try:
        with removed_if_incomplete(directory):
            families[family].write_demo(directory, size=size, seed=seed)
    except OSError as error:
        raise ValueError(f"{directory} cannot be written: {error.strerror or error}") from None
    print(f"{directory}: {family}, {size}, seed {seed}")
    return 0


@contextmanager
def removed_if_incomplete(directory: Path) -> Iterator[None]:
    """Remove a new directory, or what is in one that was empty, if this context ends with an error."""
    was_there = directory.is_dir()
    if was_there and any(directory.iterdir()):
        yield
        return
    with ExitStack() as undo:
        if was_there:
            undo.callback(directory.mkdir, exist_ok=True)
        undo.callback(shutil.rmtree, directory, ignore_errors=True)  # runs first
        yield
        undo.pop_all()


def usual_reference(model: str) -> Path:
    """Return the Python that `make fixtures` installs for the model's family. Raises ValueError."""
    import zoo

    return Path(f".venv-parity-{zoo.find(model)[0].NAME}/bin/python")
