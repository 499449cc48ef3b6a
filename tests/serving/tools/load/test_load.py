"""`zoo load` from end to end, with our server and a fake engine."""

import json
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
import shell
from http_server import Server, until
from shell import ROOT

from serving.tools.load.plan import Texts, Work
from serving.tools.load.run import client_limits
from serving.tools.load.worker import Effort

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as server:
        yield server


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts"
    path.write_text("tone 5\ntone 6\n")
    return path


def asked(server):
    """Return the texts and seeds of the requests that reached the engine, sorted."""
    return sorted((request["text"], request["seed"]) for request in server.engine.asked.values())


def load(server, texts, *more):
    done = shell.zoo("load", server.url, "--texts", texts, *more, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # the server's log comes before it


def test_an_open_loop_is_a_ladder(server, texts, tmp_path):
    found = load(
        server,
        texts,
        "--rate",
        20,
        "--rate",
        40,
        "--requests",
        8,
        "--warmup",
        2,
        "--plot",
        tmp_path / "a.svg",
    )
    assert found["model"] == "fake" and found["formats"] == ["pcm"] and found["pcm_sample_rate_hz"] == 24000
    assert [run["rate_requests_per_s"] for run in found["runs"]] == [20, 40] and not found["interrupted"]
    for run in found["runs"]:
        assert (
            run["requests"] == run["completed"] == 8 and run["warmup_requests"] == 2 and not run["failures"]
        )
        assert 8 * 5 * 0.08 <= run["audio_s"] <= 8 * 6 * 0.08  # to the sample: frames of 80 ms
        assert run["ttfa_p50_ms"] > 0 and run["chunk_viability"] is not None and run["c200"] is not None
        assert run["client_lag_p99_ms"] >= 0 and run["client_is_limit"] == bool(run["client_limits"])
    assert found["runs"][0]["offered_s"] == pytest.approx(2 * found["runs"][1]["offered_s"])
    # One request learns what the server offers; both rungs then make the same requests.
    first, *both = [server.engine.asked[id] for id in server.engine.asked]
    assert (len(both) == 20 and asked(server)[0] in [(first["text"], first["seed"])] * 3) or len(
        set(asked(server))
    ) == 10
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_a_closed_loop_is_the_same_with_any_number_of_workers(server, texts):
    seen = []
    for workers in (1, 2):
        server.engine.asked.clear()
        found = load(
            server, texts, "--streams", 3, "--requests", 5, "--warmup", 0, "--workers", workers, "--seed", 4
        )
        assert found["runs"][0]["completed"] == 5 and found["workers"] == workers
        seen.append(asked(server))
    assert seen[0] == seen[1] and len(seen[0]) == 6


def test_the_output_is_a_table_with_failures_below(server, tmp_path):
    path = tmp_path / "texts"
    path.write_text("tone 5\n")
    done = shell.zoo("load", server.url, "--texts", path, "--streams", 1, "--requests", 2, "--format", "wav")
    assert done.returncode == 0 and "TTFA" in done.stdout and "100.0%" in done.stdout
    assert re.search(r"Client: (1 process|[2-4] processes), seed 0\.", done.stdout)
    path.write_text("tone 2\n" + "full\n" * 3)
    works = (Work(["wav"], Texts.named(str(path)), seed=seed) for seed in range(100))
    # The first request is also the one that learns what the server offers, so it must succeed.
    seed = next(work.seed for work in works if "tone" in work.request(0).body["input"])
    done = shell.zoo(
        "load", server.url, "--texts", path, "--streams", 2, "--requests", 12, "--seed", seed, "--warmup", 0
    )
    assert "of kind http_503" in done.stdout and "256 requests wait already" in done.stdout, (
        done.stdout + done.stderr
    )


def test_an_interrupted_run_returns_the_results_so_far(server, tmp_path):
    path = tmp_path / "texts"
    path.write_text("tone 5\n")
    command = [
        sys.executable,
        "-m",
        "serving",
        "load",
        server.url,
        "--texts",
        str(path),
        "--streams",
        "2",
        "--json",
    ]
    command += ["--duration", "600", "--warmup", "0", "--workers", "2"]
    # A process that a shell starts in the background ignores SIGINT, and its children would inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    try:
        until(lambda: len(server.engine.asked) > 6, 60)
        process.send_signal(signal.SIGINT)
        found = json.loads(process.communicate(timeout=60)[0])
    finally:
        process.kill()
    assert process.returncode == 130 and found["interrupted"]
    [run] = found["runs"]
    assert run["completed"] >= 3 and run["failed"] == 0 and run["ttfa_p50_ms"] > 0


def test_the_client_reports_when_it_is_the_limit():
    assert client_limits([Effort(0.3, 2.0, 1.0)] * 2) == []
    for effort, says in (
        (Effort(0.95, 2, 1), "95% of a core"),
        (Effort(0.3, 25, 1), "25 ms late"),
        (Effort(0.3, 2, 40), "sent 40 ms"),
    ):
        [reason] = client_limits([Effort(0.3, 2.0, 1.0), effort])
        assert says in reason
