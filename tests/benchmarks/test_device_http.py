"""The figures over HTTP: an engine of this process is served by the HTTP process and asked by `zoo load`."""

from __future__ import annotations

import re

import pytest
from models import directory

import zoo
from benchmarks import device_http
from serving.engine.engine import Engine
from serving.http.decode import decode
from serving.tools.bench import beside
from serving.tools.requests import buzz
from zoo.request import Reference, Request


@pytest.fixture
def engine():
    return Engine(zoo.load(directory("qwen3_tts", "tiny"), device="cpu"), max_slots=2, compile=False)


@pytest.fixture
def without(tmp_path, monkeypatch):
    """Make a package impossible to import for other processes."""

    def block(name: str) -> None:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is away')\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return block


@pytest.mark.slow
def test_the_same_engine_is_measured_over_http_without_ffmpeg(engine, without):
    without("av")
    assert device_http.why_not() is None
    found = {}

    def put(name, value):
        found[name] = value

    before = engine.after_turn
    beside(engine, lambda: device_http.over_http(engine, [2], [5.0], 4, 0.7, put))
    assert list(found) == [
        "2 streams, each followed by the next, over HTTP",
        "5 requests a second, over HTTP",
    ]
    for run in found.values():
        assert run["requests"] > 0 and run["failed"] == 0, run
        assert 0 < run["ttfa_p50_ms"] <= run["ttfa_p95_ms"] and run["audio_s_per_s"] > 0
    assert engine.after_turn == before


def test_a_model_without_a_voice_gets_a_recording(tmp_path):
    request = Request(text="a", references=(Reference(buzz(1.0, 110), "It hums."),))
    assert device_http.of_voice(request, tmp_path) == [
        *("--reference", str(tmp_path / "voice.wav"), "--reference-text", "It hums.")
    ]
    clip = decode((tmp_path / "voice.wav").read_bytes(), 2.0)
    assert clip.sample_rate_hz == 24000 and len(clip.samples) == 4 * 24000
    assert device_http.of_voice(Request(text="a", voice="v"), tmp_path) == ["--voice", "v"]


def test_a_missing_package_is_named(engine, without):
    without("litestar")
    assert device_http.why_not() == "ImportError: litestar is away"
    with pytest.raises(device_http.Failed, match=re.escape("status 1: ImportError: litestar is away")):
        beside(engine, lambda: device_http.over_http(engine, [1], [], 4, 0.3, print))
