"""How device.py runs its parts: a process for each, several at once, and one alone while it measures.

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
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
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
    at_once: int,
) -> None:
    """Run parts in their order, each with `command --part PART` and at most `at_once` of them at a time, until they
    end or the clock says ends_s. Every finding is written to the file immediately; those of an earlier call are
    replaced one by one."""
    for part in parts:
        earlier = {
            name: value for name, value in result.get(part, {}).items() if name not in ("error", "seconds")
        }
        result[part] = earlier | {"in_calls": [*earlier.get("in_calls", ()), len(result["calls"])]}
    with guarded() as guard:
        running = Running(command, result, out, guard)
        with ThreadPoolExecutor(at_once) as pool:
            try:
                wait([pool.submit(running.run, part) for part in parts], max(ends_s - time.monotonic(), 0))
            finally:
                running.end()
    for part in parts:
        if "seconds" not in result[part]:
            result[part].setdefault("error", f"the part did not end by itself: {running.why_ended(part)}")
    running.write()


class Running:
    """The parts that run. One that measures is alone: the others are stopped, and none starts."""

    def __init__(self, command: Sequence[str], result: dict[str, Any], out: Path, guard: Any):
        self.command, self.result, self.out, self.guard = command, result, out, guard
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.alone: str | None = None
        self.is_over = False
        self.cut_off: set[str] = set()
        self.change = threading.Condition()  # guards all of it, and the file

    def run(self, part: str) -> None:
        with self.change:
            self.change.wait_for(lambda: self.alone is None or self.is_over)
            if self.is_over:
                return
            self.processes[part] = process = started(self.command, part)
            print(process.pid, file=self.guard, flush=True)
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            with self.change:
                if ALONE in found:
                    self.let_alone(part, found[ALONE])
                else:
                    self.result[part] |= found
                    self.write()
        process.wait()
        with self.change:
            self.let_alone(part, False)
            tell(process, signal.SIGKILL)  # what an ended part left running

    def let_alone(self, part: str, is_alone: bool) -> None:
        if not is_alone and self.alone != part:
            return
        self.alone = part if is_alone else None
        if is_alone:
            tell(self.processes[part], signal.SIGCONT)  # one before it may have stopped it meanwhile
        for other, process in self.processes.items():
            if other != part and process.poll() is None:
                tell(process, signal.SIGSTOP if is_alone else signal.SIGCONT)
        self.change.notify_all()

    def end(self) -> None:
        """Kill what still runs. No other part starts."""
        with self.change:
            self.is_over = True
            for part, process in self.processes.items():
                if process.poll() is None:
                    self.cut_off.add(part)
                tell(process, signal.SIGKILL)
            self.change.notify_all()

    def why_ended(self, part: str) -> str:
        if part not in self.processes:
            return "--limit-s came before its start"
        return (
            "it was cut off by --limit-s"
            if part in self.cut_off
            else f"status {self.processes[part].returncode}"
        )

    def write(self) -> None:
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")


def started(command: Sequence[str], part: str) -> subprocess.Popen[str]:
    """Start a part in a process group of its own."""
    nice = ["nice", "-n", "0" if part.startswith(KINDS[0]) else str(NICE)]
    return subprocess.Popen(
        [*nice, *command, "--part", part], stdout=subprocess.PIPE, text=True, start_new_session=True
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
    """Send a signal to a process in a session of its own, and to all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)
