"""How device.py runs its parts: a process for each, all at once, and one alone while it measures.

A result file of an earlier call is continued: a part that is complete in it does not run again. `--cache-dir` is the
one folder of everything that the parts compile:

    inductor, triton    shared by all parts and by later calls with the same --cache-dir. Inductor's own keys decide
                        what is found: they cover the graph and torch, so code of an unchanged graph is found after
                        a change elsewhere in the source, and also after a part was cut off
    flashinfer          FlashInfer's modules
    zoo                 the project's own store, which the parts do not use here, since an entry appears there only
                        once it is complete

Which of two kernels is faster is measured again in each call. Triton notes absolute paths in its cache, so a copy of the
folder has to lie at the same place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

KINDS = "figures", "kernels", "fp8", "codec", "flashinfer", "checks"  # of parts, in their order
ALONE = "is alone"  # a part announces that it measures, and waits until the others have stopped
NICE = 10  # of all parts but the figures, whose compilers go first
CACHE = "DEVICE_CACHE"  # the environment variable of --cache-dir, for the parts
# Ends the parts when this process has ended without doing so: it reads their process groups until we are gone.
GUARD = 'while read -r group; do all="$all -$group"; done; kill -s KILL -- $all'


def environment(directory: Path | None) -> dict[str, str]:
    """Return the variables that place everything the parts compile in a directory."""
    if directory is None:
        return {}
    root = directory.resolve()
    return {
        CACHE: str(root),
        "ZOO_CACHE_DIR": str(root / "zoo"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "TORCHINDUCTOR_BUNDLE_TRITON_INTO_FX_GRAPH_CACHE": "0",  # it would hold all of Triton's a second time
        "FLASHINFER_WORKSPACE_BASE": str(root / "flashinfer"),
    }


@contextmanager
def cached(family: Any) -> Iterator[Any]:
    """Open the place of a family's compiled code: the store's, or, with --cache-dir, Inductor's folder there."""
    from compile_cache import choices
    from serving.engine.device.prepare_for_host import cached as of_store

    if CACHE not in os.environ:
        with of_store(family) as entry:
            yield entry
        return
    with tempfile.TemporaryDirectory() as directory, choices.kept_in(Path(directory)):
        yield None


def continued(out: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a new call: what an earlier one found, with the new call's header."""
    earlier: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return earlier | header | {"calls": [*earlier.get("calls", ()), header]}


def to_run(parts: Sequence[str], result: dict[str, Any], again: Sequence[str]) -> list[str]:
    """Return the parts that are not complete in a result, and those of `again`, which names parts or their kinds."""

    def is_open(part: str) -> bool:
        found = result.get(part, {})
        return "seconds" not in found or "error" in found or part in again or part.partition("=")[0] in again

    return [part for part in parts if is_open(part)]


def run_all(
    command: Sequence[str],
    parts: Sequence[str],
    result: dict[str, Any],
    out: Path,
    ends_s: float,
    beside: Sequence[str] = (),
) -> None:
    """Run all parts at once, each with `command --part PART`, until they end or the clock says ends_s. Every
    finding is written to the file immediately; those of an earlier call are replaced one by one. beside: parts
    that are not stopped while others measure, since they have half of the cores to themselves."""
    writing = threading.Lock()
    processes: dict[str, subprocess.Popen[str]] = {}
    for part in parts:
        earlier = {
            name: value for name, value in result.get(part, {}).items() if name not in ("error", "seconds")
        }
        result[part] = earlier | {"in_calls": [*earlier.get("in_calls", ()), len(result["calls"])]}

    def tell_others(part: str, signal_number: int) -> None:
        for other, process in processes.items():
            if other != part and other not in beside and process.poll() is None:
                tell(process, signal_number)

    def write() -> None:
        out.write_text(json.dumps(result, indent=1) + "\n")

    def follow(part: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        is_alone = False
        for line in process.stdout:
            found = json.loads(line)
            with writing:
                if ALONE in found:
                    is_alone = found[ALONE]
                    tell_others(part, signal.SIGSTOP if is_alone else signal.SIGCONT)
                    continue
                result[part] |= found
                write()
        if is_alone:
            tell_others(part, signal.SIGCONT)

    followers = []
    is_late = False
    with guarded() as guard:
        try:
            with writing:
                for part in parts:
                    processes[part] = started(command, part, cores(part in beside) if beside else None)
                    print(processes[part].pid, file=guard, flush=True)
            for part, process in processes.items():
                followers.append(threading.Thread(target=follow, args=(part, process)))
                followers[-1].start()
            for process in processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(ends_s - time.monotonic(), 0))
        finally:
            for process in processes.values():
                is_late |= process.poll() is None
                tell(process, signal.SIGKILL)  # also what an ended part left running
            for follower in followers:
                follower.join()
    for part, process in processes.items():
        if "seconds" not in result[part]:
            status = process.wait()
            why = (
                "it was cut off by --limit-s" if is_late and status == -signal.SIGKILL else f"status {status}"
            )
            result[part].setdefault("error", f"the part did not end by itself: {why}")
    write()


def cores(is_beside: bool) -> list[int]:
    """Return the half of this process's cores that parts beside others have, or that the others have."""
    known = sorted(os.sched_getaffinity(0))
    half = len(known) // 2
    return known[half:] if is_beside else known[: max(half, 1)]


def started(command: Sequence[str], part: str, on: Sequence[int] | None) -> subprocess.Popen[str]:
    """Start a part in a process group of its own, on some cores alone if they are given."""
    nice = ["nice", "-n", "0" if part.startswith(KINDS[0]) else str(NICE)]
    return subprocess.Popen(
        [*nice, *command, "--part", part],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=None if on is None else partial(os.sched_setaffinity, 0, on),
    )


@contextmanager
def guarded() -> Iterator[Any]:
    """Run the guard in this context, and yield the file in which it reads process groups."""
    guard = subprocess.Popen(
        ["sh", "-c", GUARD],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield guard.stdin
    finally:
        guard.kill()
        guard.wait()


def tell(process: subprocess.Popen[str], signal_number: int) -> None:
    """Send a signal to a part and to the compilers that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)
