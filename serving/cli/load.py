"""The command `zoo load`."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from serving.cli.common import AsJson, app, plural, print_numbers, progress_bar
from serving.cli.flags import with_groups

if TYPE_CHECKING:
    from serving.tools.load.run import Plan

# Panels of `--help`.
LOAD = "Load"
REQUESTS = "Requests"
GOODPUT = "Goodput"

PLOTS = (".png", ".svg", ".pdf")
DURATION_S = 30.0
COLUMNS = {
    "TTFA\np50 ms": ("ttfa_p50_ms", "{:,.0f}"),
    "\np90 ms": ("ttfa_p90_ms", "{:,.0f}"),
    "\np99 ms": ("ttfa_p99_ms", "{:,.0f}"),
    "viable\nchunks": ("chunk_viability", "{:.1%}"),
    "\nstreams": ("stream_viability", "{:.1%}"),
    "C50": ("c50", "{:.1%}"),
    "RTF\np50": ("rtf_p50", "{:.2f}"),
    "audio\ns/s": ("audio_s_per_s", "{:.1f}"),
    "good\n/s": ("goodput_requests_per_s", "{:.2f}"),
}


@dataclass(frozen=True)
class LoadFlags:
    """Flags for the arrival of requests."""

    rates: Annotated[
        list[float],
        Option(
            "--rate",
            min=0.001,
            help="Open loop: this many requests arrive per second, as a Poisson process. Repeat it for a "
            "ladder.",
            rich_help_panel=LOAD,
        ),
    ] = field(default_factory=list)
    streams: Annotated[
        list[int],
        Option(
            "--streams",
            min=1,
            help="Closed loop: this many listeners make one request after the other. Repeat it for a ladder.",
            rich_help_panel=LOAD,
        ),
    ] = field(default_factory=list)
    duration: Annotated[
        float | None,
        Option(
            "--duration",
            min=0.1,
            help="Each rung of the ladder takes this many seconds. Default: 30 unless --requests is given.",
            rich_help_panel=LOAD,
        ),
    ] = None
    requests: Annotated[
        int | None,
        Option(min=1, help="Each rung of the ladder measures this many requests.", rich_help_panel=LOAD),
    ] = None
    warmup: Annotated[
        int | None,
        Option(
            min=0,
            help="Each rung starts with this many requests that do not count. Default: two seconds of "
            "arrivals, or one per listener.",
            rich_help_panel=LOAD,
        ),
    ] = None
    cancels: Annotated[
        float,
        Option(min=0, max=1, help="This share of clients disconnects within 3 s.", rich_help_panel=LOAD),
    ] = 0.0
    slow_readers: Annotated[
        float,
        Option(
            min=0, max=1, help="This share of clients reads at a quarter of the speed.", rich_help_panel=LOAD
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Option(
            min=0,
            help="The seed fixes arrivals, texts, voices and which clients disconnect or read slowly; "
            "requests carry seeds too.",
            rich_help_panel=LOAD,
        ),
    ] = 0
    workers: Annotated[
        int | None,
        Option(
            min=1,
            max=64,
            help="The client runs this many processes. Default: one per two cores, at most 4.",
            rich_help_panel=LOAD,
        ),
    ] = None


@dataclass(frozen=True)
class RequestsFlags:
    """Flags for the content of each request."""

    model: Annotated[
        str | None,
        Option(
            "-m",
            "--model",
            help="Requests name this model; a server with several models needs it.",
            rich_help_panel=REQUESTS,
        ),
    ] = None
    texts: Annotated[
        str,
        Option(
            help="The texts are short (about 4 s), long (30 s), mixed, or the lines of a file.",
            rich_help_panel=REQUESTS,
        ),
    ] = "short"
    voices: Annotated[
        list[str],
        Option(
            "--voice",
            help="Requests ask for this voice; if repeated, each picks one of them.",
            rich_help_panel=REQUESTS,
        ),
    ] = field(default_factory=list)
    reference: Annotated[
        Path | None,
        Option(help="Each request sends this recording of the voice to clone.", rich_help_panel=REQUESTS),
    ] = None
    reference_text: Annotated[
        str | None,
        Option(help="The recording says this text, word for word.", rich_help_panel=REQUESTS),
    ] = None
    formats: Annotated[
        list[str],
        Option(
            "--format",
            help="Requests ask for pcm, wav, mp3, opus or aac; if repeated, each picks one. Default: the "
            "first that works.",
            rich_help_panel=REQUESTS,
        ),
    ] = field(default_factory=list)
    sample_rate: Annotated[
        int,
        Option(
            min=0,
            help="pcm has this sample rate in Hz, if the server does not report one.",
            rich_help_panel=REQUESTS,
        ),
    ] = 0
    fields: Annotated[
        list[str],
        Option(
            "-O",
            "--option",
            metavar="NAME=VALUE",
            help="Each request has this additional field; VALUE is JSON or a string. May be repeated.",
            rich_help_panel=REQUESTS,
        ),
    ] = field(default_factory=list)
    timeout_s: Annotated[
        float,
        Option(
            min=0.1,
            help="A request fails if it takes longer than this many seconds.",
            rich_help_panel=REQUESTS,
        ),
    ] = 60.0
    api_key: Annotated[
        str | None,
        Option(
            envvar="ZOO_API_KEY",
            help="Requests send this key (Authorization: Bearer KEY).",
            rich_help_panel=REQUESTS,
        ),
    ] = None


@dataclass(frozen=True)
class GoodputFlags:
    """Flags for the definition of a good request."""

    slo_ttfa_ms: Annotated[
        float,
        Option(
            min=0,
            help="A good request has its first audio within this many milliseconds.",
            rich_help_panel=GOODPUT,
        ),
    ] = 500.0
    slo_underrun_ms: Annotated[
        float,
        Option(
            min=0,
            help="A good request has no pause over this many milliseconds; with 0, no chunk may be late.",
            rich_help_panel=GOODPUT,
        ),
    ] = 0.0


@app.command()
@with_groups
def load(
    *,
    url: Annotated[
        str, Argument(help="The server has OpenAI's speech route at this address: http://HOST:PORT.")
    ],
    as_json: AsJson = False,
    plot: Annotated[
        Path | None,
        Option(help="The command draws the ladder into this file: .png, .svg or .pdf."),
    ] = None,
    load: LoadFlags,
    requests: RequestsFlags,
    goodput: GoodputFlags,
) -> int:
    """Measure a speech server under load.

    The server may be ours or another one. The results are time to first audio, viability, underruns, audio
    seconds per second, and goodput.
    """
    check(load, requests.formats, plot)

    from serving.tools.load.learn import learn
    from serving.tools.load.run import measure

    plan = plan_of(url, load, requests, goodput)
    log_line = partial(print, "zoo:", file=sys.stderr, flush=True)

    async def all_of_it() -> tuple[list[dict[str, Any]], bool]:
        await learn(plan.target, plan.work, requests.model, requests.formats, log_line)
        with progress_bar(url) as advance:
            return await measure(plan, advance)

    runs, is_cut = asyncio.run(all_of_it())
    result = described(plan, requests.texts) | {"interrupted": is_cut, "runs": runs}
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        show(result)
    if plot is not None:
        from serving.tools.load.plot import plot as draw

        draw(result, plot)
    return 130 if is_cut else 0 if any(run["completed"] for run in runs) else 1


def plan_of(url: str, load: LoadFlags, requests: RequestsFlags, goodput: GoodputFlags) -> Plan:
    """Return what the client does. Raises ValueError."""
    from serving.tools.load.client import Target
    from serving.tools.load.learn import address
    from serving.tools.load.metrics import Slo
    from serving.tools.load.plan import Texts, Work
    from serving.tools.load.run import Plan, Rung, usable_workers

    work = Work(
        [],
        Texts.named(requests.texts),
        requests.voices,
        recording_fields(requests.reference, requests.reference_text) | dict(map(field_of, requests.fields)),
        cancel_share=load.cancels,
        slow_share=load.slow_readers,
        seed=load.seed,
    )
    is_bounded = load.duration is not None or load.requests is not None
    return Plan(
        Target(address(url), requests.api_key, requests.sample_rate, requests.timeout_s),
        work,
        [Rung(rate=rate) for rate in load.rates] + [Rung(streams=count) for count in load.streams],
        load.duration if is_bounded else DURATION_S,
        load.requests,
        load.warmup,
        load.workers or usable_workers(),
        Slo(goodput.slo_ttfa_ms / 1e3, goodput.slo_underrun_ms / 1e3),
    )


def check(load: LoadFlags, formats: list[str], plot: Path | None) -> None:
    """Check the arguments before anything is sent. Raises ValueError."""
    if bool(load.rates) == bool(load.streams):
        raise ValueError(
            "give either --rate (an open loop) or --streams (a closed loop); each may be repeated"
        )
    if not all(map(math.isfinite, (*load.rates, load.duration or 0.0))):
        raise ValueError("--rate and --duration must be finite")
    shares = load.cancels + load.slow_readers
    if shares > 1:
        raise ValueError(f"--cancels and --slow-readers add up to {shares:g}; at most 1 is possible")
    if plot is not None and (plot.suffix not in PLOTS or not plot.absolute().parent.is_dir()):
        raise ValueError(
            f"--plot {plot} must be a file in an existing directory, and end in one of: {', '.join(PLOTS)}"
        )
    needed = ["aiohttp"] + ["matplotlib"] * (plot is not None)
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(f"zoo load needs {' and '.join(missing)}: pip install -e '.[load]'")

    from serving.tools.load.samples import FORMATS

    for form in formats:
        if form not in FORMATS:
            raise ValueError(
                f"--format {form} is not possible; use {', '.join(FORMATS)} (flac's first samples cannot "
                "be timed)"
            )


def field_of(given: str) -> tuple[str, Any]:
    """Split NAME=VALUE. A value that is not JSON is a string. Raises ValueError."""
    name, equals, value = given.partition("=")
    if not equals or not name:
        raise ValueError(f"--option {given!r} must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def recording_fields(path: Path | None, text: str | None) -> dict[str, str]:
    """Return the request fields that hold the recording, as it is on disk. Raises ValueError."""
    if path is None:
        return {}
    try:
        audio = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    kind = path.suffix.removeprefix(".").lower() or "wav"
    return {"ref_audio": f"data:audio/{kind};base64,{audio}"} | ({} if text is None else {"ref_text": text})


def described(plan: Plan, texts: str) -> dict[str, Any]:
    """Return the settings of the run, for the result."""
    work = plan.work
    target = plan.target
    kept = {name: value for name, value in work.fields.items() if name not in ("model", "ref_audio")}
    return {
        "url": target.url,
        "model": work.fields["model"],
        "texts": texts,
        "voices": work.voices,
        "has_reference": "ref_audio" in work.fields,
        "fields": kept,
        "formats": work.formats,
        "pcm_sample_rate_hz": target.sample_rate_hz or None,
        "seed": work.seed,
        "sends_seeds": work.has_seeds,
        "cancel_share": work.cancel_share,
        "slow_share": work.slow_share,
        "workers": plan.num_workers,
        "timeout_s": target.timeout_s,
        "slo_ttfa_ms": 1e3 * plan.slo.ttfa_s,
        "slo_underrun_ms": 1e3 * plan.slo.underrun_s,
    }


def show(result: dict[str, Any]) -> None:
    """Print the table and its notes."""
    is_open = result["runs"][0]["arrivals"] == "poisson"
    title = f"{result['model']} at {result['url']}: {result['texts']} texts, {', '.join(result['formats'])}"
    columns = ["requests\n/s" if is_open else "streams", "sent", "failed", *COLUMNS]
    rows = [
        [
            f"{run['rate_requests_per_s' if is_open else 'streams']:g}" + "*" * run["client_is_limit"],
            str(run["requests"]),
            str(run["failed"]),
            *("" if run[name] is None else form.format(run[name]) for name, form in COLUMNS.values()),
        ]
        for run in result["runs"]
    ]
    print_numbers(title, columns, rows)
    for line in notes(result):
        print(line)


def notes(result: dict[str, Any]) -> list[str]:
    """Return the lines below the table: the goodput criterion, the client, failures and warnings."""
    slo = f"first audio within {result['slo_ttfa_ms']:g} ms, "
    slo += f"no pause over {result['slo_underrun_ms']:g} ms" if result["slo_underrun_ms"] else "no late chunk"
    client = plural(result["workers"], "process", "processes")
    lines = [f"Good: {slo}. Client: {client}, seed {result['seed']}."]
    for run in result["runs"]:
        at = f"{run['rate_requests_per_s'] or run['streams']:g}"
        failures = {
            **run["failures"],
            **{
                f"{kind} (clients that disconnect or read slowly)": n
                for kind, n in run["disturber_failures"].items()
            },
        }
        lines += [f"At {at}: {plural(num, 'failure')} of kind {kind}" for kind, num in failures.items()]
        lines += [f"  {kind}: {detail}" for kind, detail in run["failure_examples"].items()]
        lines += [f"* At {at} the client was at its limit: {why}" for why in run["client_limits"]]
    if result["interrupted"]:
        lines.append("Interrupted: the last row covers only the requests until then.")
    return lines
