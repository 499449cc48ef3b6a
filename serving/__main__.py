"""The command `zoo`. What a user gets wrong is one line on stderr and exit status 2."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from zoo.hub import name_of, resolved

if TYPE_CHECKING:
    from serving.http.voices import Voices
    from serving.protocol import AudioClip
    from zoo.contract import Spec
    from zoo.request import Value

app = typer.Typer(
    add_completion=False, help="Speech language models: serve them, or let them speak from the shell."
)
voices = typer.Typer(help="Uploaded voices: recordings that a model for clones can speak in, by name.")
app.add_typer(voices, name="voices")

FORMAT_OF = {
    ".wav": "wav",
    ".mp3": "mp3",
    ".opus": "opus",
    ".ogg": "opus",
    ".aac": "aac",
    ".flac": "flac",
    ".pcm": "pcm",
}
MAX_REFERENCE_S = 60.0
FLAG = {
    "references": "--reference",
    "transcript": "--reference-text",
    "max_frames": "--max-new-tokens",
}  # of a field
MAX_BYTES = 1 << 50
LOOPBACK = ("127.0.0.1", "::1", "localhost")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

Model = Annotated[str, Option("-m", "--model", help="A directory, or ORG/NAME on the Hugging Face Hub.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; the GPU where there is one.")]
Codec = Annotated[
    Literal["float32", "tf32"],
    Option(help="How a GPU multiplies in the codec; tf32 is faster, zoo parity says what it costs."),
]
VoicesDir = Annotated[
    Path | None,
    Option(
        envvar="ZOO_VOICES_DIR",
        help="Where uploaded voices are kept; speechzoo/voices in your data directory otherwise.",
    ),
]
DType = Annotated[
    Literal["float32", "bfloat16"] | None,
    Option(help="bfloat16 on a GPU and float32 on a CPU, when left out."),
]


ReferencePython = Annotated[
    Path | None,
    Option(
        help="The Python of the reference's environment; otherwise that of .venv-parity-FAMILY, which `make fixtures` builds."
    ),
]


@app.command()
def serve(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="Directories, or ORG/NAME on the Hugging Face Hub; MODEL+DIR adds an adapter (LoRA), NAME=MODEL "
            "chooses the id for clients.",
        ),
    ],
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    device: Device = None,
    dtype: DType = None,
    max_slots: Annotated[
        int | None,
        Option(
            min=1,
            max=1024,
            help="How many requests speak at once, of each model: 8 on a CPU, on a GPU as many as fit, up to 64.",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        Option(
            help="Memory for the KV cache, of all models: 4GiB, 512MiB or bytes; on a GPU, what weights and states leave."
        ),
    ] = None,
    policy: Annotated[
        Literal["streaming", "throughput"], Option(help="First audio early, or most audio in all.")
    ] = "streaming",
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="Equal requests give equal bytes, whoever else speaks; slower where few do.",
        ),
    ] = False,
    codec: Codec = "float32",
    warm: Annotated[bool, Option(help="Run every shape before the first request.")] = True,
    compile: Annotated[bool, Option(help="Compile the model, or run it eagerly.")] = True,
    cache_dir: Annotated[Path | None, Option(help="Where compiled code is kept between starts.")] = None,
    api_key: Annotated[
        str | None, Option(envvar="ZOO_API_KEY", help="Ask clients for this key (Authorization: Bearer KEY).")
    ] = None,
    max_text: Annotated[int, Option(min=1, help="The longest input, in characters.")] = 8000,
    voices_dir: VoicesDir = None,
    max_voices: Annotated[int, Option(min=0, help="How many voices may be uploaded.")] = 1000,
    max_reference_bytes: Annotated[
        str, Option(help="The largest reference audio: 10MiB or bytes.")
    ] = "10MiB",
    max_reference_s: Annotated[
        float, Option(min=1, max=MAX_REFERENCE_S, help="The longest reference audio.")
    ] = MAX_REFERENCE_S,
    allow_url_references: Annotated[
        bool, Option(help="Fetch reference audio from URLs that clients send.")
    ] = False,
    max_reading: Annotated[
        int,
        Option(min=1, help="How many large bodies and recordings are read at once; others get 503."),
    ] = 16,
    cors_origins: Annotated[
        list[str],
        Option(
            "--cors-origin", metavar="ORIGIN", help="A site whose pages may use this server; several times."
        ),
    ] = [],  # noqa: B006
    hosts: Annotated[
        list[str],
        Option("--allowed-host", metavar="NAME", help="A name that this server is asked by; several times."),
    ] = [],  # noqa: B006
    grace_s: Annotated[
        int, Option(min=0, help="How long open answers may go on when the server is stopped.")
    ] = 5,
) -> int:
    """Serve models over HTTP, as OpenAI's speech API."""
    from serving import supervisor

    engine = {
        "models": named_directories(models),
        "device": device,
        "dtype": dtype,
        "max_slots": max_slots,
        "kv_bytes": None if kv_memory is None else num_bytes(kv_memory),
        "policy": policy,
        "codec": codec,
        "deterministic": deterministic,
        "warm": warm,
        "compile": compile,
    }
    env = dict(os.environ)
    if api_key is None and "ZOO_API_KEY" in os.environ:
        raise ValueError("ZOO_API_KEY is empty, which would let everybody in: set it to a key, or unset it")
    if api_key is not None:
        if not re.fullmatch("[!-~]+", api_key):
            raise ValueError("an API key is made of printable ASCII characters without blanks")
        env["ZOO_API_KEY"] = api_key
    if cache_dir is not None:
        env["ZOO_CACHE_DIR"] = str(cache_dir.resolve())
    limits = {
        "text_chars": max_text,
        "reference_bytes": num_bytes(max_reference_bytes),
        "reference_s": max_reference_s,
        "reference_urls": allow_url_references,
        "voices": max_voices,
        "num_reading": max_reading,
    }
    http = {
        "limits": limits,
        "voices_dir": None if voices_dir is None else str(voices_dir.resolve()),
        "cors_origins": cors_origins,
        "hosts": [*hosts, *LOOPBACK] if host in LOOPBACK else hosts,
    }
    return supervisor.serve(host, port, engine, http, env, grace_s)


@app.command()
def say(
    text: Annotated[str, Argument(help="What to say; - reads it from stdin.")],
    model: Model,
    out: Annotated[
        Path, Option("-o", "--out", help="The file to write: .wav, .mp3, .opus, .aac, .flac or .pcm.")
    ] = Path("out.wav"),
    voice: Annotated[str | None, Option(help="One of the model's voices (zoo inspect).")] = None,
    reference: Annotated[
        Path | None, Option(help="A recording of the voice to speak in, for models that take one.")
    ] = None,
    reference_text: Annotated[str | None, Option(help="What the recording says, word for word.")] = None,
    language: Annotated[str | None, Option(help="One of the model's languages.")] = None,
    instructions: Annotated[str | None, Option(help="How to speak, in words.")] = None,
    seed: Annotated[int, Option(min=0, max=2**63 - 1)] = 0,
    temperature: Annotated[float | None, Option(min=0, max=2, help="0 is greedy.")] = None,
    top_k: Annotated[int | None, Option(min=0, help="0 is off.")] = None,
    top_p: Annotated[float | None, Option(min=0, max=1)] = None,
    repetition_penalty: Annotated[float | None, Option(min=0.5, max=2)] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="The most frames to speak.")] = None,
    options: Annotated[
        list[str],
        Option(
            "-O",
            "--option",
            metavar="NAME=VALUE",
            help="An option of the model (zoo inspect); may be given several times.",
        ),
    ] = [],  # noqa: B006
    device: Device = None,
    dtype: DType = None,
) -> int:
    """Speak one text into a file."""
    form = output_format(out)
    text = text_to_say(text)
    directory = resolved(model)
    references = [] if reference is None else [recording(reference)]

    import zoo
    from serving.audio import pcm16
    from serving.engine.engine_process import reference_of
    from serving.engine.job import NO_AUDIO
    from serving.http import encode
    from serving.protocol import Reference

    family = zoo.load(directory, device=device, dtype=dtype)
    if family.spec.licence:
        print(f"zoo: the weights are under a licence: {family.spec.licence}", file=sys.stderr)
    request = zoo.Request(
        text=text,
        voice=voice,
        language=language,
        instructions=instructions,
        references=tuple(reference_of(Reference(clip, reference_text)) for clip in references),
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        max_frames=max_new_tokens,
        options=dict(parsed_option(option, family.spec) for option in options),
    )
    began = time.perf_counter()
    try:
        speech = zoo.generate(family, request)
    except zoo.RequestError as error:
        raise ValueError(f"{FLAG[error.param]}: {error}" if error.param in FLAG else str(error)) from None
    took_s = time.perf_counter() - began
    if not len(speech.samples):
        fail(NO_AUDIO, 1)
    out.write_bytes(encode.file(form, pcm16(speech.samples.numpy()), speech.sample_rate_hz))
    audio_s = len(speech.samples) / speech.sample_rate_hz
    frames = f"{len(speech.frames)} frames, {audio_s:.2f} s of audio"
    print(f"{out}: {frames} in {took_s:.2f} s, RTF {took_s / audio_s:.2f}")
    if speech.text:
        print(speech.text)
    return 0


def output_format(out: Path) -> str:
    """The format that a file's name asks for. Raises ValueError for one that is none, or a file that cannot
    be written."""
    if (form := FORMAT_OF.get(out.suffix.lower())) is None:
        raise ValueError(f"{out} must end in one of: {', '.join(FORMAT_OF)}")
    there = out if out.exists() else out.absolute().parent
    if out.is_dir() or not out.absolute().parent.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"{out} cannot be written: it must be a file in a directory that exists and may be written to"
        )
    return form


def text_to_say(text: str) -> str:
    """`-` is what stdin holds. Raises ValueError for a text with nothing to say."""
    from zoo.request import BLANK

    if text == "-":
        text = sys.stdin.read()
    if not text.strip(BLANK):
        raise ValueError("there is no text to say")
    return text


def parsed_option(given: str, spec: Spec) -> tuple[str, Value]:
    """NAME=VALUE -> the name, and the value as the model's option has it. Raises ValueError."""
    from zoo.request import SAMPLING

    name, equals, value = given.partition("=")
    if not equals:
        raise ValueError(f"--option {given!r} must be NAME=VALUE")
    if name in SAMPLING:
        raise ValueError(f"{name} has a flag of its own: --{name.replace('_', '-')} {value}")
    known = {option.name: option for option in spec.options if option.name not in SAMPLING}
    if name not in known:
        raise ValueError(f"{spec.family} has no option {name!r}; possible: {', '.join(known) or 'none'}")
    return name, known[name].parse(value)


@app.command()
def inspect(
    model: Annotated[str, Argument(help="A directory, or ORG/NAME on the Hugging Face Hub.")],
    slots: Annotated[int, Option(min=1, max=1024, help="Of the memory plan: requests at once.")] = 8,
    dtype: DType = None,
    device: Annotated[str | None, Option(help="cpu, cuda, cuda:1; the GPU where there is one.")] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
) -> int:
    """What a model is and what memory it takes, without loading its weights, and what computes its attention
    on a device."""
    import zoo

    facts = zoo.inspect(model, device)
    facts["memory"] = memory(model, slots, dtype or "bfloat16")
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


def memory(model: str, slots: int, dtype: str) -> dict[str, int | str]:
    """The memory plan; why there is none, where a file of weights is missing or wrong."""
    import zoo
    from serving.engine.memory_plan import plan

    try:
        made = plan(zoo.load(model, "meta", dtype), slots)
    except ValueError as error:
        return {"unknown": str(error)}
    parts = asdict(made) | {"total": made.total}
    return {"slots": parts.pop("slots"), "dtype": dtype} | {f"{name}_bytes": n for name, n in parts.items()}


@app.command()
def bench(
    model: Annotated[str, Argument(help="A model directory.")],
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
    models: Annotated[list[str], Argument(metavar="MODEL...", help="Model directories.")],
    device: Device = None,
    dtype: DType = None,
    max_slots: Annotated[int, Option(min=1, help="As the server will be started with.")] = 8,
    cache_dir: Annotated[
        Path | None,
        Option(help="Where compiled code is kept; ZOO_CACHE_DIR or ~/.cache/speechzoo otherwise."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object a model, for programs.")] = False,
) -> int:
    """Compile a model ahead of time, so that a server of it is ready in seconds."""
    directories = {model: resolved(model) for model in models}
    if cache_dir is not None:
        os.environ["ZOO_CACHE_DIR"] = str(cache_dir.resolve())

    from serving.tools.warm import warm as compile_all

    for model, directory in directories.items():
        with progress_bar(model) as advance:
            done = compile_all(directory, device=device, dtype=dtype, max_slots=max_slots, progress=advance)
        if as_json:
            print(json.dumps(done))
        else:
            print(
                f"{model}: {done['graphs']} graphs ({done['found']} found, {done['compiled']} compiled), "
                f"loaded in {done['load_s']:.1f} s, warm in {done['warm_s']:.1f} s; kept in {done['cache']}"
            )
    return 0


@app.command()
def parity(
    model: Annotated[str, Argument(help="A model directory.")],
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


@voices.command("add")
def add_voice(
    name: Annotated[str, Argument(help="The voice's name: letters, digits, '_', '-' and '.'.")],
    sample: Annotated[
        Path, Argument(help="A recording of the voice: WAV, FLAC, MP3, Ogg, AAC, M4A or WebM.")
    ],
    text: Annotated[
        str | None, Option(help="What the recording says, word for word; a clone sounds better with it.")
    ] = None,
    voices_dir: VoicesDir = None,
) -> int:
    """Keep a recording as a voice."""
    there = store(voices_dir)
    try:
        voice = there.add(name, recording(sample), text)
    except OSError as error:
        raise ValueError(f"voices cannot be kept in {there.directory}: {error.strerror}") from None
    print(f"{voice.name}: {voice.duration_s:.2f} s" + ("" if voice.ref_text else ", without a text"))
    return 0


@voices.command("list")
def list_voices(
    as_json: Annotated[bool, Option("--json", help="One JSON object, for programs.")] = False,
    voices_dir: VoicesDir = None,
) -> int:
    """The voices that are kept."""
    import msgspec

    there = store(voices_dir)
    kept, damaged = there.survey()
    if as_json:
        print(
            json.dumps(
                {"directory": str(there.directory), "voices": msgspec.to_builtins(kept), "damaged": damaged}
            )
        )
    else:
        for voice in kept:
            print(f"{voice.name}: {voice.duration_s:.2f} s, {voice.ref_text or 'without a text'}")
        for name in damaged:
            print(f"{name}: damaged; add it again, or remove it")
    return 0


@voices.command("remove")
def remove_voice(
    name: Annotated[str, Argument(help="The voice's name.")], voices_dir: VoicesDir = None
) -> int:
    """Forget a voice."""
    there = store(voices_dir)
    try:
        removed = there.remove(name)
    except OSError as error:
        raise ValueError(f"voices cannot be removed from {there.directory}: {error.strerror}") from None
    if not removed:
        raise ValueError(
            f"there is no voice {name!r} in {there.directory}; there is: {', '.join(there.names()) or 'none'}"
        )
    return 0


def store(directory: Path | None) -> Voices:
    from serving.http.voices import Voices, default_directory

    return Voices(directory or default_directory())


def recording(path: Path) -> AudioClip:
    """Raises ValueError."""
    from serving.http.decode import decode

    try:
        return decode(path.read_bytes(), MAX_REFERENCE_S)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None


def named_directory(model: str) -> tuple[str, str]:
    """MODEL or NAME=MODEL -> the name for clients and the directory, with its adapter. Raises ValueError."""
    name, equals, named = model.partition("=")
    if not equals or Path(model).is_dir():
        return name_of(model), resolved(model)
    if not name:
        raise ValueError(f"{model!r} has no name before '='; needed is MODEL or NAME=MODEL")
    return name, resolved(named)


def named_directories(models: list[str]) -> dict[str, str]:
    """Their directories by name. Raises ValueError."""
    directories: dict[str, str] = {}
    for name, directory in map(named_directory, models):
        if name in directories:
            raise ValueError(f"two models have the name {name!r}; NAME=MODEL gives one another name")
        directories[name] = directory
    return directories


def usual_reference(model: str) -> Path:
    """The Python of the environment that `make fixtures` builds for the model's family. Raises ValueError."""
    import zoo

    return Path(f".venv-parity-{zoo.find(model)[0].NAME}/bin/python")


def num_bytes(text: str) -> int:
    """'4GiB' -> 4294967296. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|)", text)
    count = float(match[1]) * UNITS[match[2]] if match is not None else 0.0
    if not 1 <= count < MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is not an amount of memory; 4GiB, 512MiB or a number of bytes is")
    return int(count)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr, where that is a terminal -> what moves it: the fraction that is done, and what comes
    next."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[title]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0, title=title)
        yield lambda fraction, stage: bar.update(task, completed=fraction, description=stage)


def readable(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(str, value))
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def main() -> None:
    command = typer.main.get_command(app)
    try:
        status = command.main(prog_name="zoo", standalone_mode=False)
    except typer.TyperException as error:
        fail(f"{error.format_message().removesuffix('.')} (zoo --help says more)", error.exit_code)
    except ValueError as error:
        fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    sys.exit(status)


def fail(line: str, status: int) -> None:
    print(f"zoo: {line}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
