"""The server that is fuzzed, and how it must be afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attack.target import CHILDREN, Target, until

MODELS = "tiny tiny-base"  # one with voices of its own, one that clones
LIMITS = (
    "--max-text",
    "400",
    "--max-reference-bytes",
    "1MiB",
    "--max-reference-s",
    "20",
    "--max-voices",
    "50",
)


@contextmanager
def fuzzed(directory: Path) -> Iterator[Target]:
    """Raises AssertionError where the server is not as it was."""
    with Target(MODELS, directory, *LIMITS) as target:
        before = target.speak(seed=1).content
        yield target
        for name, module in CHILDREN.items():
            assert target._pid(module) == target.pids[name], f"the {name} process was started again"
        assert target.process.poll() is None, "the server ended"
        assert target.speak(seed=1).content == before, "it speaks otherwise than before"
        assert "zoo_engine_restarts_total 0.0" in target.http.get("/metrics").text, "the engine went away"
        assert until(lambda: is_idle(target), 5), "there are slots that nobody holds"
    lines = [json.loads(line) for line in target.lines if line.startswith("{")]
    wrong = [line for line in lines if line["level"] in ("error", "critical")]
    assert not wrong, f"the log holds {len(wrong)} errors; the first: {wrong[0]}"


def is_idle(target: Target) -> bool:
    """By what the engine says once a second."""
    metrics = target.http.get("/metrics").text
    return all(f'zoo_requests_running{{model="{model}"}} 0.0' in metrics for model in target.models)
