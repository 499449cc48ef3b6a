"""The server to fuzz, and its expected state afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attack.target import CHILDREN, Target, until
from zoo.step_audio2 import write_demo

MODELS = "tiny tiny-base"  # one with its own voices, one that clones
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
    """Yield a server. Raise AssertionError if its state or its speech has changed afterwards."""
    talker = write_demo(directory / "talker")  # it answers, calls tools and transcribes
    options = (*LIMITS, "--works-dir", str(directory / "works"))
    with Target(MODELS, directory, str(talker), *options) as target:
        before = target.speak(seed=1, stream=False).content  # a stream's bytes depend on the time, too
        yield target
        for name, module in CHILDREN.items():
            assert target._pid(module) == target.pids[name], f"the {name} process was restarted"
        assert target.process.poll() is None, "the server ended"
        for work in target.http.get("/v1/audio/works").json()["data"]:
            assert target.http.delete(f"/v1/audio/works/{work['id']}").status_code == 200
        # Uploaded pronunciations may change the speech; they are meant to.
        assert target.http.put("/v1/audio/pronunciations", json={"pronunciations": []}).is_success
        again = target.speak(seed=1, stream=False)
        assert again.is_success, again.text
        assert again.content == before, "the same request gives different audio than before"
        assert "zoo_engine_restarts_total 0.0" in target.http.get("/metrics").text, "the engine was restarted"
        assert until(lambda: is_idle(target), 5), "slots are occupied without a request"
    lines = [json.loads(line) for line in target.lines if line.startswith("{")]
    wrong = [line for line in lines if line["level"] in ("error", "critical")]
    assert not wrong, f"the log holds {len(wrong)} errors; the first: {wrong[0]}"


def is_idle(target: Target) -> bool:
    """Return whether no requests run, by the engine's report of every second."""
    metrics = target.http.get("/metrics").text
    return all(f'zoo_requests_running{{model="{model}"}} 0.0' in metrics for model in target.models)
