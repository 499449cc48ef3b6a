"""What Prometheus is told."""

import platform

import httpx
import metrics
import pytest
from fake_engine import NUMBERS, STATS
from http_server import Server, until


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as server:
        yield server


def test_how_requests_ended(server):
    assert metrics.outcomes(server) == {
        "stop": 0,
        "length": 0,
        "no_audio": 0,
        "cancelled": 0,
        "refused": 0,
        "unavailable": 0,
        "failed": 0,
    }
    for text in ("frames 3", "silent", "reject voice", "full", "fail 0", "fail 1"):
        try:
            server.speak(text)
        except httpx.RemoteProtocolError:
            assert text == "fail 1"
    server.http.post("/v1/audio/speech", json={"inptu": "x"})
    server.http.post("/v1/audio/speech/", content=b"{")
    server.http.get("/v1/models/nothing")  # no speech request
    with server.stream("hold 1") as answer:
        next(answer.iter_raw())
    until(lambda: metrics.outcomes(server)["cancelled"] == 1)
    assert metrics.outcomes(server) == {
        "stop": 1,
        "length": 0,
        "no_audio": 1,
        "cancelled": 1,
        "refused": 1,
        "unavailable": 1,
        "failed": 2,
    }
    assert metrics.outcomes(server, "") == {"refused": 2}  # whose model was never known


def test_times(server):
    server.speak("frames 3")
    server.speak("silent")
    samples = metrics.samples(server)
    # not of silence
    assert (
        samples["zoo_time_to_first_audio_seconds_count", "fake"]
        == samples["zoo_real_time_factor_count", "fake"]
        == 1
    )
    assert 0 < samples["zoo_time_to_first_audio_seconds_sum", "fake"] < 5
    assert samples["zoo_audio_seconds_total", "fake"] == pytest.approx(300 / 24000)
    assert samples["zoo_time_to_first_audio_seconds_bucket", "10.0", "fake"] == 1


def test_what_the_engine_holds(server):
    until(lambda: ("zoo_pages",) in metrics.samples(server))
    samples = metrics.samples(server)
    expected = {
        ("zoo_pages",): STATS.pages,
        ("zoo_pages_free",): STATS.pages_free,
        ("zoo_pages_shared_total",): STATS.pages_shared,
        ("zoo_pages_evicted_total",): STATS.pages_evicted,
        ("zoo_compiles_after_warmup_total",): STATS.compiles_after_warmup,
        ("zoo_slots", "fake"): NUMBERS.slots,
        ("zoo_requests_running", "fake"): NUMBERS.running,
        ("zoo_requests_waiting", "fake"): NUMBERS.waiting,
        ("zoo_underruns_total", "fake"): NUMBERS.underruns,
        ("zoo_graph_misses_total", "fake"): NUMBERS.graph_misses,
        ("zoo_requests_admitted_total", "fake"): NUMBERS.admitted,
        ("zoo_queue_seconds_total", "fake"): NUMBERS.queue_s,
        ("zoo_turns_total",): STATS.turns,
        ("zoo_turn_seconds_total",): STATS.turn_s,
        ("zoo_engine_resident_memory_bytes",): STATS.resident_bytes,
        ("zoo_engine_restarts_total",): 0,
        ("zoo_ready",): 1,
    }
    assert {name: samples[name] for name in expected} == expected


def test_an_engine_that_is_away_holds_nothing(server):
    until(lambda: ("zoo_pages",) in metrics.samples(server))
    server.call(server.engine.away)
    until(lambda: ("zoo_pages",) not in metrics.samples(server))
    assert not any(name == "zoo_slots" for name, *_ in metrics.samples(server))
    assert metrics.samples(server)["zoo_ready",] == 0
    assert metrics.samples(server)["zoo_engine_restarts_total",] == 1


def test_the_key_does_not_guard_the_metrics(tmp_path):
    with Server(tmp_path, api_key="sk-test") as server:
        assert server.http.get("/metrics").status_code == 200


def test_what_runs_and_for_how_long(server):
    samples = metrics.samples(server)
    [build] = [key for key in samples if key[0] == "zoo_build_info"]
    assert platform.python_version() in build and samples[build] == 1
    assert samples["process_resident_memory_bytes",] > 1 << 20
    server.speak("frames 1")
    assert ("zoo_time_to_first_audio_seconds_bucket", "120.0", "fake") in metrics.samples(server)
