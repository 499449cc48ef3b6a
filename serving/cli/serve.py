"""zoo serve."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from serving.cli.common import (
    MAX_REFERENCE_S,
    Codec,
    Device,
    DType,
    VoicesDir,
    app,
    named_directories,
    num_bytes,
)
from zoo import SMALL_VOICE

MAX_TTFA_S = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@app.command()
def serve(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="Directories, or ORG/NAME on the Hugging Face Hub; MODEL+DIR adds an adapter (LoRA), NAME=MODEL "
            "chooses the id for clients. Left out: the small voice that comes with this package.",
        ),
    ] = [],  # noqa: B006
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    device: Device = None,
    dtype: DType = None,
    max_slots: Annotated[
        int | None,
        Option(
            min=1,
            max=1024,
            help="How many requests speak at once, of each model: as many as fit, up to 64, on a GPU and for throughput; else 8.",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        Option(
            help="Memory for the KV cache, of all models: 4GiB, 512MiB or bytes; on a GPU, what weights and states leave."
        ),
    ] = None,
    swap_memory: Annotated[
        str | None,
        Option(
            help="Memory of the host for what paused streams' KV cache held: 4GiB or bytes; else three times --kv-memory, or a "
            "quarter of what there is; 0 reserves all that a request can need, and pauses nobody."
        ),
    ] = None,
    policy: Annotated[
        Literal["streaming", "throughput", "fifo"],
        Option(
            help="First audio early, most audio in all, or, to compare with, no regard to anybody's time."
        ),
    ] = "streaming",
    max_waiting: Annotated[
        int,
        Option(min=1, help="How many requests may be without a slot, of each model; others get 503 at once."),
    ] = 256,
    max_ttfa: Annotated[
        float | None,
        Option(
            min=0,
            help="Seconds: who would hear nothing for longer gets 503 at once, and only so many speak as are made faster "
            "than they are heard; 0 takes all. 10, or 0 with --policy throughput, when left out.",
        ),
    ] = None,
    max_unread: Annotated[
        float, Option(min=1, help="Seconds of audio that a client may leave unread; then its slot rests.")
    ] = 30,
    max_stall: Annotated[
        float, Option(min=1, help="Seconds for which a client may take nothing, or rest so; then it is left.")
    ] = 60,
    reference_memory: Annotated[
        str, Option(help="Memory for recordings that wait to be encoded: 256MiB or bytes; others get 503.")
    ] = "256MiB",
    run_async: Annotated[
        bool,
        Option(
            "--async/--no-async",
            help="On a GPU, read what a step says after the next one is under way, or wait for it.",
        ),
    ] = True,
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
    aliases: Annotated[
        list[str],
        Option(
            "--alias",
            metavar="NAME=MODEL",
            help="Another name for clients to ask for a served model by; several times.",
        ),
    ] = [],  # noqa: B006
    voice_aliases: Annotated[
        list[str],
        Option(
            "--alias-voice",
            metavar="NAME=VOICE",
            help="Another name for a voice, a model's or an uploaded one; several times.",
        ),
    ] = [],  # noqa: B006
    strict: Annotated[
        bool,
        Option(
            "--strict",
            help="Refuse OpenAI's names (tts-1, alloy, ...), which stand otherwise for the one model of a server, and its "
            "first voice, with a warning in the header x-warning.",
        ),
    ] = False,
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
    max_sessions: Annotated[
        int, Option(min=0, help="How many WebSockets (text in while it speaks) may be open; others get 503.")
    ] = 256,
    max_text_idle: Annotated[
        float,
        Option(
            min=0.1, help="Seconds for which a WebSocket that speaks may bring no text; then it is closed."
        ),
    ] = 30,
    max_session_idle: Annotated[
        float,
        Option(min=0.1, help="Seconds for which a WebSocket may say and hear nothing; then it is closed."),
    ] = 600,
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
    playground: Annotated[bool, Option(help="A page at / to try the models at.")] = True,
    private_metrics: Annotated[
        bool, Option("--private-metrics", help="Ask for the API key at /metrics too.")
    ] = False,
    log: Annotated[
        Literal["json", "text"] | None,
        Option(
            envvar="ZOO_LOG",
            help="Log lines as JSON objects or as text; else text on a terminal and JSON elsewhere.",
        ),
    ] = None,
    status_line: Annotated[
        bool,
        Option(
            help="On a terminal, a line below the log that says who speaks and waits, how much, and how soon."
        ),
    ] = True,
    otel: Annotated[
        bool,
        Option(
            "--otel",
            help="Send a trace of each request to OTEL_EXPORTER_OTLP_ENDPOINT (http://localhost:4318); the extra `otel`.",
        ),
    ] = False,
    grace_s: Annotated[
        int, Option(min=0, help="How long open answers may go on when the server is stopped.")
    ] = 5,
) -> int:
    """Serve models over HTTP, as OpenAI's speech API."""
    from rich.console import Console

    from serving import supervisor
    from serving.status_line import StatusLine

    if max_ttfa is None:
        max_ttfa = 0.0 if policy == "throughput" else MAX_TTFA_S
    served = named_directories(models or [str(SMALL_VOICE)])
    engine = {
        "models": served,
        "device": device,
        "dtype": dtype,
        "max_slots": max_slots,
        "kv_bytes": None if kv_memory is None else num_bytes(kv_memory),
        "saved_bytes": 0 if swap_memory == "0" else num_bytes(swap_memory) if swap_memory else None,
        "policy": policy,
        "run_async": run_async,
        "max_waiting": max_waiting,
        "max_ttfa_s": max_ttfa or None,
        "max_unread_s": max_unread,
        "max_stall_s": max_stall,
        "reference_bytes": num_bytes(reference_memory),
        "codec": codec,
        "deterministic": deterministic,
        "warm": warm,
        "compile": compile,
    }
    if log is not None:
        os.environ["ZOO_LOG"] = log  # of this process and both that it starts
    if private_metrics and api_key is None:
        raise ValueError("--private-metrics asks for the API key, and there is none: --api-key gives one")
    if otel and find_spec("opentelemetry.sdk") is None:
        raise ValueError("--otel needs OpenTelemetry: pip install 'speechzoo[otel]'")
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
        "sessions": max_sessions,
        "text_idle_s": max_text_idle,
        "session_idle_s": max_session_idle,
    }
    http = {
        "limits": limits,
        "names": {
            "models": model_aliases(aliases, served),
            "voices": aliases_of("--alias-voice", "NAME=VOICE", voice_aliases),
            "is_strict": strict,
        },
        "voices_dir": None if voices_dir is None else str(voices_dir.resolve()),
        "stall_s": max_stall,
        "cors_origins": cors_origins,
        "hosts": [*hosts, *LOOPBACK] if host in LOOPBACK else hosts,
        "playground": playground,
        "private_metrics": private_metrics,
        "otel": otel,
    }
    line = None
    if status_line and sys.stderr.isatty() and log != "json" and os.environ.get("TERM") != "dumb":
        line = StatusLine(Console(file=sys.stderr))
        env = {
            "ZOO_LOG": "text",
            "FORCE_COLOR": "1",
            **env,
        }  # the children's lines come through us, to the terminal
    return supervisor.serve(host, port, engine, http, env, grace_s, line)


def aliases_of(flag: str, form: str, given: list[str]) -> dict[str, str]:
    """What each alias stands for. Raises ValueError."""
    aliases: dict[str, str] = {}
    for pair in given:
        name, equals, target = pair.partition("=")
        if not (name and equals and target):
            raise ValueError(f"{flag} {pair!r} is not of the form {form}")
        if aliases.setdefault(name, target) != target:
            raise ValueError(f"{flag} {name!r} is given twice: for {aliases[name]!r} and for {target!r}")
    return aliases


def model_aliases(given: list[str], served: Iterable[str]) -> dict[str, str]:
    """Raises ValueError."""
    aliases, ids = aliases_of("--alias", "NAME=MODEL", given), list(served)
    for name, id in aliases.items():
        if name in ids:
            raise ValueError(f"--alias {name!r} is the id of a model already")
        if id not in ids:
            raise ValueError(f"--alias {name}={id}: model {id!r} is not served; there is: {', '.join(ids)}")
    return aliases
