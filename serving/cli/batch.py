"""The command `zoo batch`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from typer import Argument, Option

from serving.cli.common import (
    MODEL,
    Compile,
    Device,
    DType,
    SpeechModel,
    Weights,
    app,
    progress_bar,
    recording,
)
from serving.cli.flags import with_groups
from serving.cli.request_flags import Loudness, ModelOptions, Pronunciations, RequestFlags
from serving.cli.say import parsed_option
from zoo import SMALL_VOICE
from zoo.hub import resolved
from zoo.text.pronunciations import Pronunciation, read_file

if TYPE_CHECKING:
    from serving.engine.engine import Engine
    from serving.protocol import AudioClip
    from serving.tools.batch import Item, Results, Tally
    from zoo.contract import Family


@dataclass(frozen=True)
class EngineFlags:
    """Flags for the engine."""

    device: Device = None
    dtype: DType = None
    weights: Weights = "published"
    max_slots: Annotated[
        int | None,
        Option(
            min=1,
            max=1024,
            help="The model speaks at most this many lines at once. Default: what fits, up to 256 on a GPU and "
            "64 on a CPU.",
            rich_help_panel=MODEL,
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="Equal lines give equal bytes, whatever else is spoken, which is slower.",
            rich_help_panel=MODEL,
        ),
    ] = False
    compile: Compile = True


@app.command()
@with_groups
def batch(
    *,
    lines: Annotated[
        Path,
        Argument(
            metavar="IN.jsonl",
            help='The file has a JSON object on each line: {"text": ..., "id": ..., "voice": ...}.',
        ),
    ],
    out: Annotated[
        Path, Argument(metavar="OUT_DIR", help="The speech and results.jsonl go into this directory.")
    ],
    model: SpeechModel = str(SMALL_VOICE),
    form: Annotated[
        Literal["wav", "mp3", "opus", "ogg", "webm", "aac", "m4a", "flac", "pcm", "ulaw", "alaw"],
        Option("--format", help="Every file has this format."),
    ] = "wav",
    asked: RequestFlags,
    loudness: Loudness = None,
    pronunciations: Pronunciations = None,
    options: ModelOptions = [],  # noqa: B006
    running: EngineFlags,
) -> int:
    """Speak every line of a JSON Lines file into a directory.

    Finished files are not made again. Lines that cannot be used are reported and skipped; the exit status is
    then 1.

    The fields of a line are text, id (the file's name; by default the line number), and the options below
    with _ for -. Any other field is an option of the model. Relative paths in a line start at the directory
    of the file.
    """
    from serving.tools import batch as tool

    defaults = defaults_of(asked, loudness)
    items = tool.read_items(lines, defaults)
    results = tool.Results(out)
    words = [] if pronunciations is None else read_file(pronunciations)
    with results.held():
        base = lines.absolute().parent
        tally = made(items, results, form, model, running, options, base, words, defaults)
    print(f"{out}: {summary(tally)}")
    return 130 if tally.is_interrupted else int(tally.failed > 0)


def made(
    items: list[Item],
    results: Results,
    form: str,
    model: str,
    running: EngineFlags,
    options: list[str],
    base: Path,
    words: list[Pronunciation],
    defaults: Mapping[str, Any],
    are_alike: bool = False,
) -> Tally:
    """Make the files of items whose files do not exist yet. base: where relative paths of recordings start. defaults:
    the fields that an item has if its line does not set them. are_alike: the items differ only in their text. Raises
    ValueError, also if the model refuses a default, or the first of such equal items."""
    from serving.tools import batch as tool

    directory = resolved(model)
    common: list[object] = [directory, running.dtype, form, options]
    if running.weights != "published":
        common.append(running.weights)
    if words:
        common.append(msgspec.to_builtins(words))
    digests = {item.id: item.digest(base, common) for item in items if item.error is None}
    done = results.finished({item.id for item in items}, digests, f".{form}")
    tally = tool.Tally(found=len(done))
    wanted = [item for item in items if item.error is None and item.id not in done]
    of_model: dict[str, Any] = {}
    if wanted:
        sizes = sizes_of(directory, running)  # before the weights take memory
        family = loaded(directory, running)
        of_model = dict(parsed_option(option, family.spec) for option in options)
        tool.check_defaults(wanted, defaults, of_model, family.spec)
    for item in items:
        if item.error is not None:
            tally.failed += 1
            result = {"id": item.id, "line": item.line, "error": item.error}
            results.add(result)
            tell(result)
    if wanted:
        with progress_bar(str(results.directory)) as advance:
            report = partial(advance_past, len(items), advance)
            engine = opened(family, sizes, running, advance)
            [worker] = engine.models.values()
            clip = partial(recording_at, base)
            run = tool.Batch(engine, results, digests, form, clip, of_model, tally, report, words)
            if are_alike:
                next(worker.family.passes(run.request(wanted[0])))
            run.run(wanted)
    return tally


def summary(tally: Tally) -> str:
    pace = f", {tally.audio_s / tally.wall_s:.2f} audio-s/s" if tally.wall_s else ""
    end = ", interrupted" if tally.is_interrupted else ""
    return f"{tally.made} made ({tally.audio_s:.2f} s of audio{pace}), {tally.found} found, {tally.failed} failed{end}"


def defaults_of(asked: RequestFlags, loudness: float | None) -> dict[str, Any]:
    """Return the fields that a line has if it does not set them itself."""
    given = asdict(asked) | {"loudness": loudness}
    if asked.reference is not None:
        given["reference"] = str(asked.reference.resolve())
    if asked.speed == 1:
        del given["speed"]
    return {name: value for name, value in given.items() if value is not None}


def advance_past(
    num_items: int, advance: Callable[[float, str], None], tally: Tally, result: dict[str, Any]
) -> None:
    """Print why a line failed, if it did, and move the progress bar."""
    if "error" in result:
        tell(result)
    past = tally.found + tally.made + tally.failed
    advance(past / num_items, f"{past} of {num_items}, {tally.failed} failed")


def recording_at(base: Path, path: str) -> AudioClip:
    """Read a recording whose path is relative to `base`. Raises ValueError."""
    return recording(base / path)


def sizes_of(directory: str, running: EngineFlags) -> tuple[int, int | None]:
    """Return how many slots the model has, and the bytes of the KV cache. Raises ValueError."""
    from serving.engine.loading import sizes
    from serving.settings import Latency, Memory, ModelOptions, Settings

    settings = Settings(
        models={"batch": directory},
        model=ModelOptions(running.device, running.dtype),
        memory=Memory(running.max_slots),
        latency=Latency("throughput"),
    )
    return sizes(settings)


def loaded(directory: str, running: EngineFlags) -> Family:
    """Load the model. Raises ValueError."""
    import zoo

    family = zoo.load(directory, device=running.device, dtype=running.dtype, keeps_bf16=True)
    if family.spec.licence:
        print(f"zoo: the licence of the weights limits their use: {family.spec.licence}", file=sys.stderr)
    return family


def opened(
    family: Family,
    sizes: tuple[int, int | None],
    running: EngineFlags,
    advance: Callable[[float, str], None],
) -> Engine:
    """Return a warm engine for a loaded model. sizes: from `sizes_of`. Raises ValueError."""
    from serving.engine.device.prepare_for_host import cached, prepare_for_host
    from serving.engine.engine import Engine

    slots, kv_memory_bytes = sizes
    prepare_for_host(family, compile=running.compile, weights=running.weights)
    engine = Engine(
        family,
        max_slots=slots,
        kv_memory_bytes=kv_memory_bytes,
        max_waiting=2 * slots,
        policy="throughput",
        compile=running.compile,
        is_deterministic=running.deterministic,
    )
    engine.warm(lambda fraction, stage: advance(0.0, f"warming: {stage}"), cached)
    return engine


def tell(result: dict[str, Any]) -> None:
    """Print why a line failed."""
    print(f"zoo: line {result['line']} ({result['id']}): {result['error']}", file=sys.stderr)
