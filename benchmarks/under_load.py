"""Measure what the server promises under load. Each part starts `zoo serve` and acts as `zoo load` does.

    python benchmarks/under_load.py RESULT.json [--model DIR] [--only PART ...] [--minutes 5] [--rung-s 20] [--cache DIR]

    ladder      first audio and viability by request rate, for --policy streaming and fifo; the highest rate at which every
                stream is viable and p90 of first audio is within a limit (--limits-ms)
    throughput  192 requests, 64 always in flight, for --policy streaming and throughput with their defaults: audio-s/s
                from the first request to the end of the last one
    overload    1, 2 and 5 times the server's capacity, with clients that disconnect and clients that read slowly:
                goodput, continuity, and the resources that are left behind
    clones      first audio of a preset voice next to forty clones that are being encoded, next to eight speakers without
                encoding, and next to those while another program encodes as many recordings (a control for the machine)
    start       seconds from the command to ready and to first audio, with an empty cache and with a full one

RESULT.json gets the figures, and a file of the same name with .svg the ladder's plot. Parts that do not run
again keep their figures, so parts may run one by one. --no-async is not measured, because a launch on a CPU
returns when it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.clones import clones
from benchmarks.zoo_server import SETTLE_S, Server, demo, offered, serving, told
from serving.tools.load.client import Target, connections, speak
from serving.tools.load.learn import address, learn
from serving.tools.load.metrics import Slo
from serving.tools.load.plan import Planned, Texts, Work
from serving.tools.load.run import Plan, Rung, measure, usable_workers
from zoo import SMALL_VOICE

FRACTIONS = (0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of capacity: the rungs of the ladder
LIMITS_MS = (200, 300, 500)  # limits of p90 of first audio; VoxServe uses 500
SLO = Slo(ttfa_s=1.0, underrun_s=0.05)  # defines goodput under overload
MAX_TTFA_S = 0.8  # the server's --max-ttfa then; lower than the SLO, since predictions are sometimes short
CANCELS, SLOW_READERS = 0.2, 0.05
OVERLOADS = (1, 2, 5)
STREAMS = 64
# a --max-ttfa that refuses no request but still admits only streams that can be generated in real time
PATIENT_S = 600.0


def main() -> None:
    options = arguments()
    result = json.loads(options.result.read_text()) if options.result.exists() else {}
    result["machine"] = {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as place:
        options.cache = options.cache or Path(place) / "cache"
        for part in options.only or PARTS:
            told(f"-- {part}")
            asked_for = {
                name: getattr(options, name) for name in ("rung_s", "minutes", "frames", "requests", "serve")
            }
            result[part] = PARTS[part](options) | {"model": Path(options.model).name, "options": asked_for}
            options.result.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.result.with_suffix(".svg"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument(
        "--model", default=str(SMALL_VOICE), help="model directory (default: the small voice)"
    )
    parser.add_argument(
        "--clone-model", help="second model, which clones (default: a random Qwen3-TTS Base of size tiny)"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run only these parts")
    parser.add_argument("--minutes", type=float, default=5, help="minutes of each rung of overload")
    parser.add_argument("--rung-s", type=float, default=20, help="seconds of each other rung")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="requests/s of the ladder (default: shares of capacity)"
    )
    parser.add_argument("--requests", type=int, default=30, help="requests in each rung of the ladder")
    parser.add_argument(
        "--limits-ms",
        type=float,
        nargs="+",
        default=LIMITS_MS,
        help="limits of the ladder's p90 of first audio",
    )
    parser.add_argument(
        "--frames", type=int, help="most frames of an answer, for models with random weights that do not stop"
    )
    parser.add_argument("--cache", type=Path, help="directory of compiled code (default: a new one)")
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="pass all following arguments to `zoo serve`"
    )
    return parser.parse_args()


# --- the client ---


def asked(
    options: argparse.Namespace,
    server: Server,
    rungs: list[Rung],
    duration_s: float | None,
    slo: Slo = SLO,
    num_requests: int | None = None,
    **work: Any,
) -> list[dict[str, Any]]:
    """Return what `zoo load` reports for each rung.

    With num_requests, a rung has that many requests instead of duration_s, and all of them count."""
    fields = {} if options.frames is None else {"max_new_tokens": options.frames}
    voices = offered(server)[:1]
    given = Work([], Texts("short"), voices=voices, fields=fields, **work)
    num_warmup = None if num_requests is None else 0
    target, workers = Target(address(server.url)), usable_workers()
    plan = Plan(target, given, rungs, duration_s, num_requests, num_warmup, workers, slo)

    async def all_of_it() -> list[dict[str, Any]]:
        await learn(plan.target, plan.work, None, [], told)
        runs, _ = await measure(plan, lambda part, name: told(f"  {name}"))
        return runs

    runs = asyncio.run(all_of_it())
    for run in runs:
        told(line_of(run))
    return runs


def line_of(run: dict[str, Any]) -> str:
    at = f"{run['rate_requests_per_s']:.2f}/s" if run["streams"] is None else f"{run['streams']} streams"
    facts = {
        "first audio p50": ("ttfa_p50_ms", "{:.0f}"),
        "p90": ("ttfa_p90_ms", "{:.0f} ms"),
        "viable": ("stream_viability", "{:.1%}"),
        "chunks": ("chunk_viability", "{:.2%}"),
        "C50": ("c50", "{:.1%}"),
        "audio-s/s": ("audio_s_per_s", "{:.1f}"),
        "good/s": ("goodput_requests_per_s", "{:.2f}"),
    }
    told_of = [
        f"{name} {form.format(run[key])}" for name, (key, form) in facts.items() if run[key] is not None
    ]
    refused = [f"{count} {kind}" for kind, count in run["failures"].items()]
    return ", ".join([f"{at:>12}: {run['completed']} of {run['requests']}", *told_of, *refused]) + (
        " (the client was at its limit)" if run["client_is_limit"] else ""
    )


def capacity(options: argparse.Namespace, server: Server) -> float:
    """Return the requests a second that the server completes while every slot is always occupied."""
    [run] = asked(options, server, [Rung(streams=round(server.metrics()["zoo_slots"]))], options.rung_s)
    return run["requests_per_s"]


# --- the parts ---


def ladder(options: argparse.Namespace) -> dict[str, Any]:
    """Send the same requests at the same rates to each policy. None is refused, and all of them count."""
    runs: dict[str, list[dict[str, Any]]] = {}
    rates: list[float] = options.rates or []
    for policy, settings in (("streaming", ("--max-ttfa", str(PATIENT_S))), ("fifo", ("--max-ttfa", "0"))):
        with serving(options, "--policy", policy, *settings) as server:
            # lets the server learn how long steps take
            asked(options, server, [Rung(streams=2)], None, num_requests=8)
            if not rates:
                most = capacity(options, server)
                rates = [float(f"{part * most:.3g}") for part in FRACTIONS]
            rungs = [Rung(rate=rate) for rate in rates]
            runs[policy] = asked(options, server, rungs, None, num_requests=options.requests)
    limits = sorted(options.limits_ms)
    highest = {f"{ms:g} ms": {policy: highest_rate(of, ms) for policy, of in runs.items()} for ms in limits}
    ratios = {limit: ratio(rate["streaming"], rate["fifo"]) for limit, rate in highest.items()}
    found = {"limits_ttfa_p90_ms": limits, "highest_rate": highest, "ratio": ratios}
    told(json.dumps(found))
    return found | {"runs": runs}


def highest_rate(runs: Sequence[dict[str, Any]], max_ttfa_p90_ms: float) -> float:
    """Return the highest rate without failures, with first audio in time and all streams viable, or 0."""
    good = [
        run["rate_requests_per_s"]
        for run in runs
        if run["ttfa_p90_ms"] is not None
        and run["ttfa_p90_ms"] <= max_ttfa_p90_ms
        and run["stream_viability"] in (None, 1.0)
        and not run["failed"]
    ]
    return max(good, default=0.0)


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Run each policy with its defaults, except that no request is refused; then both with equal slots."""
    runs, slots = {}, {}
    same = ("--max-slots", str(STREAMS), "--max-ttfa", "0")
    for policy, settings in (
        ("streaming", ("--max-ttfa", str(PATIENT_S))),
        ("throughput", ()),
        ("streaming", same),
    ):
        with serving(options, "--policy", policy, *settings) as server:
            name = f"{policy}, {STREAMS} slots" if settings is same else policy
            # lets the server learn how long steps take
            asked(options, server, [Rung(streams=2)], None, num_requests=4)
            [runs[name]] = asked(options, server, [Rung(streams=STREAMS)], None, num_requests=3 * STREAMS)
            slots[name] = server.metrics()["zoo_slots"]
    made = {name: run["audio_s_per_s"] for name, run in runs.items()}
    found = {"audio_s_per_s": made, "slots": slots, "ratio": ratio(made["throughput"], made["streaming"])}
    told(json.dumps(found))
    return found | {"runs": runs}


def overload(options: argparse.Namespace) -> dict[str, Any]:
    runs, held = {}, {}
    with serving(options, "--max-ttfa", str(MAX_TTFA_S)) as server:
        rate = capacity(options, server)
        asked(
            options,
            server,
            [Rung(rate=2 * rate)],
            options.rung_s,
            cancel_share=CANCELS,
            slow_share=SLOW_READERS,
        )
        time.sleep(SETTLE_S)
        held["before"] = server.holds()
        for times in OVERLOADS:
            [runs[f"{times}x"]] = asked(
                options,
                server,
                [Rung(rate=times * rate)],
                60 * options.minutes,
                cancel_share=CANCELS,
                slow_share=SLOW_READERS,
            )
            time.sleep(SETTLE_S)
            held[f"after {times}x"] = server.holds()
            told(json.dumps(held[f"after {times}x"]))
    good = {name: run["goodput_requests_per_s"] for name, run in runs.items()}
    found = {
        "capacity_requests_per_s": rate,
        "max_ttfa_s": MAX_TTFA_S,
        "slo_ttfa_s": SLO.ttfa_s,
        "slo_underrun_s": SLO.underrun_s,
        "goodput_requests_per_s": good,
        "least_part_of_peak": min(good.values()) / max(good.values()),
        "c50": {name: run["c50"] for name, run in runs.items()},
    }
    told(json.dumps(found))
    return found | {"held": held, "runs": runs}


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Start a tiny random checkpoint with nothing compiled, then twice with what the first start compiled."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        options = argparse.Namespace(**vars(options) | {"cache": Path(place) / "cache"})
        model = demo(Path(place) / "tiny", "tiny")
        for name in ("empty cache", "full cache", "full cache again"):
            with serving(options, models=[str(model)]) as server:
                heard_s = asyncio.run(first_heard_s(server))
            found[name] = {"ready_s": server.ready_s, "first_audio_s": heard_s, "stages": server.stages}
            told(f"{name}: ready after {server.ready_s:.1f} s, heard after {heard_s:.1f} s")
    return {
        "starts": found,
        "part_of_cold": found["full cache again"]["ready_s"] / found["empty cache"]["ready_s"],
    }


async def first_heard_s(server: Server) -> float:
    """Return the seconds from the command to the first samples of an answer."""
    target = Target(address(server.url), None, 24000)
    body = {
        "input": "Good morning.",
        "voice": offered(server)[0],
        "response_format": "pcm",
        "max_new_tokens": 20,
    }
    async with connections(target) as session:
        record = await speak(session, target, Planned(body, "pcm"), 0, time.monotonic())
    assert record.playback is not None and record.playback.first_s is not None, record.outcome
    return record.playback.first_s - server.began_s


PARTS = {"ladder": ladder, "throughput": throughput, "overload": overload, "clones": clones, "start": start}


# --- helpers ---


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot the ladder, and goodput under overload, as far as they were measured."""
    figure = Figure(figsize=(7, 8), layout="constrained")
    first, viable, good = figure.subplots(3)
    for policy, runs in result.get("ladder", {}).get("runs", {}).items():
        rates = [run["rate_requests_per_s"] for run in runs]
        first.plot(rates, [run["ttfa_p90_ms"] for run in runs], marker="o", label=policy)
        viable.plot(rates, [100 * (run["stream_viability"] or 0) for run in runs], marker="o", label=policy)
    if "ladder" in result:
        for limit_ms in result["ladder"].get("limits_ttfa_p90_ms", ()):
            first.axhline(limit_ms, color="grey", linestyle=":")
        first.legend()
        viable.legend()
    first.set(yscale="log", ylabel="first audio, p90, ms", title=", ".join(models_of(result)))
    viable.set(ylabel="viable streams, %", xlabel="requests a second")
    runs = result.get("overload", {}).get("runs", {})
    good.bar(list(runs), [run["goodput_requests_per_s"] for run in runs.values()], width=0.5)
    good.set(ylabel="good requests a second", xlabel="of capacity")
    for axes in (first, viable, good):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def models_of(result: dict[str, Any]) -> list[str]:
    return sorted({part["model"] for part in result.values() if "model" in part})


def ratio(of: float, to: float) -> float | None:
    return of / to if to else None


def cpu() -> str:
    return next(
        iter(re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())), platform.machine()
    )


if __name__ == "__main__":
    main()
