"""What the gateway process of models on demand starts: the survey, and an engine for each model."""

import asyncio
import sys
from pathlib import Path

import pytest
from fake_engine import MODEL

from serving import logs, protocol
from serving.on_demand import gateway_process
from serving.on_demand.gateway_process import SurveyFailed, environment, settings_of, starter, surveyed
from serving.on_demand.survey import Survey, SurveyedModel
from serving.settings import EngineArguments, Latency, Memory, OnDemand, Settings

FOUND = Survey([SurveyedModel(MODEL, "/models/fake", 3, 1 << 20, 1 << 22)], 1 << 30)
SETTINGS = Settings(
    models={"fake": "/models/fake", "other": "/models/other"},
    on_demand=OnDemand(),
    latency=Latency("fifo"),
    memory=Memory(reference_memory_bytes=7),
)


def survey_by(monkeypatch, script):
    """Survey with a script in the place of the process. Returns the survey and what it told before."""
    monkeypatch.setattr(gateway_process, "command", lambda *_: [sys.executable, "-c", script])
    told = []
    return asyncio.run(surveyed(EngineArguments(SETTINGS, "/tmp/s"), told.append)), told


def test_the_survey_tells_its_progress_and_the_models(monkeypatch):
    status = protocol.Status("loading", 0.5, "looking at fake")
    data = protocol.pack(status) + protocol.pack(FOUND)
    script = f"import sys; sys.stdout.buffer.write({data!r})"
    assert survey_by(monkeypatch, script) == (FOUND, [status])


@pytest.mark.parametrize(("script", "status"), [("raise SystemExit(2)", 2), ("", 1)])
def test_a_survey_that_fails_ends_the_gateway_with_its_status(monkeypatch, script, status):
    with pytest.raises(SurveyFailed) as error:
        survey_by(monkeypatch, script)
    assert error.value.status == status


def test_an_engine_gets_one_model_and_the_memory_of_its_plan():
    settings = settings_of(SETTINGS, FOUND.models[0])
    assert settings.models == {"fake": "/models/fake"} and settings.on_demand is None
    assert settings.memory == Memory(max_slots=3, kv_memory_bytes=1 << 20, reference_memory_bytes=7)
    assert settings.latency == SETTINGS.latency


def test_each_engine_has_a_socket_of_its_own():
    start = starter(SETTINGS, Path("/run/zoo"), 5)
    first, second = (Path(start(FOUND.models[0]).socket) for _ in range(2))
    assert first != second and first.parent == second.parent == Path("/run/zoo")
    assert len(first.name) <= len("engine.sock")  # a longer address may not fit


@pytest.mark.parametrize("form", ["json", "text"])
def test_engines_log_in_the_form_of_the_gateway(monkeypatch, form):
    monkeypatch.setenv(logs.VARIABLE, form)
    assert environment()[logs.VARIABLE] == form
