"""The metrics for Prometheus."""

import platform
from types import SimpleNamespace

import httpx
import metrics
import pytest
from fake_engine import NUMBERS, STATS
from http_server import Server, until
from msgspec.structs import replace


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as server:
        yield server


def test_requests_are_counted_by_outcome(server):
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
    server.http.get("/v1/models/nothing")  # not a speech request, so not counted
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
    assert metrics.outcomes(server, "") == {"refused": 2}  # their model was never known


def test_the_media_type_has_one_charset(server):
    """A strict client refuses a type that names a parameter twice."""
    assert server.http.get("/metrics").headers["content-type"].count("charset") == 1


def test_time_to_first_audio_and_audio_are_measured(server):
    server.speak("frames 3")
    server.speak("silent")
    samples = metrics.samples(server)
    # The request without audio does not count.
    assert (
        samples["zoo_time_to_first_audio_seconds_count", "fake"]
        == samples["zoo_real_time_factor_count", "fake"]
        == 1
    )
    assert 0 < samples["zoo_time_to_first_audio_seconds_sum", "fake"] < 5
    assert samples["zoo_audio_seconds_total", "fake"] == pytest.approx(300 / 24000)
    assert samples["zoo_time_to_first_audio_seconds_bucket", "10.0", "fake"] == 1


def test_late_chunks_and_underruns_are_counted(server, monkeypatch):
    """With a clock that stands still, no chunk is late. With one that advances a second per reading, all
    are."""
    clock = SimpleNamespace(now_s=0.0, tick_s=0.0)

    def perf_counter():
        clock.now_s += clock.tick_s
        return clock.now_s

    monkeypatch.setattr("serving.http.speech.time", SimpleNamespace(perf_counter=perf_counter))

    def told():
        found = metrics.samples(server)
        names = (
            "zoo_stream_chunks_total",
            "zoo_stream_chunks_late_total",
            "zoo_stream_underrun_seconds_count",
        )
        viable = found["zoo_stream_underrun_seconds_bucket", "0.0", "fake"]
        return [*(found[name, "fake"] for name in names), viable]

    assert told() == [0, 0, 0, 0]
    server.speak("frames 3")
    assert told() == [2, 0, 1, 1]
    clock.tick_s = 1.0
    server.speak("frames 3", stream_format="sse")
    assert told() == [4, 2, 2, 1]
    assert metrics.samples(server)["zoo_stream_underrun_seconds_sum", "fake"] > 1
    server.speak("frames 1")  # a single chunk cannot be late
    server.speak("frames 3", stream=False)  # a whole file has no chunks that could be late
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak("fail 3")  # failed streams do not count as underruns
    assert told() == [6, 4, 2, 1]


def test_the_engines_statistics_are_exposed(server):
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
        ("zoo_requests_admitted_total", "fake"): 2,
        ("zoo_queue_seconds_total", "fake"): 1.5,
        ("zoo_requests_preparing", "fake"): NUMBERS.preparing,
        ("zoo_requests_turned_away_total", "fake"): NUMBERS.refused,
        ("zoo_requests_left_early_total", "fake"): NUMBERS.left_early,
        ("zoo_requests_held", "fake"): NUMBERS.held,
        ("zoo_requests_paused", "fake"): NUMBERS.paused,
        ("zoo_pauses_total",): STATS.pauses,
        ("zoo_places", "fake"): NUMBERS.places,
        ("zoo_predicted_turn_seconds", "fake"): NUMBERS.predicted_turn_s,
        ("zoo_reference_bytes",): STATS.reference_bytes,
        ("zoo_short_passes_total", "fake"): NUMBERS.short_passes,
        ("zoo_long_passes_total", "fake"): NUMBERS.long_passes,
        ("zoo_not_finite_total", "fake"): NUMBERS.not_finite,
        ("zoo_turns_total",): 4,
        ("zoo_turn_seconds_total",): STATS.turn_times.sum_s,
        ("zoo_engine_resident_memory_bytes",): STATS.resident_bytes,
        ("zoo_engine_restarts_total",): 0,
        ("zoo_turn_time_seconds_bucket", "0.01"): 2,
        ("zoo_turn_time_seconds_bucket", "+Inf"): 4,
        ("zoo_turn_time_seconds_count",): 4,
        ("zoo_turn_time_seconds_sum",): STATS.turn_times.sum_s,
        ("zoo_queue_time_seconds_count", "fake"): 2,
        ("zoo_queue_time_seconds_bucket", "0.001", "fake"): 1,
        ("zoo_ready",): 1,
    }
    assert {name: samples[name] for name in expected} == expected


def test_there_are_no_statistics_while_the_engine_is_away(server):
    until(lambda: ("zoo_pages",) in metrics.samples(server))
    server.call(server.engine.away)
    until(lambda: ("zoo_pages",) not in metrics.samples(server))
    assert not any(name == "zoo_slots" for name, *_ in metrics.samples(server))
    assert metrics.samples(server)["zoo_ready",] == 0
    assert metrics.samples(server)["zoo_engine_restarts_total",] == 1


def test_metrics_need_no_key_by_default(tmp_path):
    with Server(tmp_path, api_key="sk-test") as server:
        assert server.http.get("/metrics").status_code == 200


def test_versions_and_process_metrics_are_exposed(server):
    samples = metrics.samples(server)
    [build] = [key for key in samples if key[0] == "zoo_build_info"]
    assert platform.python_version() in build and samples[build] == 1
    assert samples["process_resident_memory_bytes",] > 1 << 20
    server.speak("frames 1")
    assert ("zoo_time_to_first_audio_seconds_bucket", "120.0", "fake") in metrics.samples(server)


def test_private_metrics_need_the_key(tmp_path):
    with Server(tmp_path, api_key="sk-test", private_metrics=True) as server:
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers={"authorization": "Bearer sk-test"}).status_code == 200
        assert server.http.get("/health").status_code == 200


def test_figures_of_replicas_have_a_label(server):
    """Each sample is there once, with the name of its replica."""
    from serving.totals import total

    figures = replace(total({"a": STATS, "b": STATS}), engine_restarts=3)
    server.call(server.engine.tell, figures)
    server.engine.is_awake = False
    until(lambda: 'zoo_pages{replica="a"}' in server.http.get("/metrics").text)
    lines = server.http.get("/metrics").text.splitlines()
    for name, labels in (
        ("zoo_pages", ""),
        ("zoo_requests_running", 'model="fake",'),
        ("zoo_turn_time_seconds_bucket", 'le="0.005",'),
        ("zoo_underruns_total", 'model="fake",'),
    ):
        found = [line for line in lines if line.startswith(f"{name}{{{labels}")]
        assert [line.partition('replica="')[2][0] for line in found] == ["a", "b"], found
    assert sum(line == "# TYPE zoo_pages gauge" for line in lines) == 1
    assert sum(line.startswith("zoo_ready ") for line in lines) == 1
    assert "zoo_engine_restarts_total 3.0" in lines  # of all replicas
