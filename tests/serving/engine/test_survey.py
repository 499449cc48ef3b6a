"""The survey of a directory of models, which reads no weight."""

import asyncio
import json
import subprocess

import pytest
import torch
from models import directory, family
from shell import ROOT

import zoo
from serving import protocol, supervisor
from serving.engine import survey
from serving.engine.memory.memory_plan import plan
from serving.engine.wire import describe
from serving.on_demand.survey import Survey, decoder
from serving.settings import EngineArguments, Memory, ModelOptions, Settings


def surveyed(models, told=lambda fraction, name: None, **memory):
    paths = {name: str(path) for name, path in models.items()}
    settings = Settings(paths, model=ModelOptions(device="cpu"), memory=Memory(**memory))
    return survey.survey(settings, told)


@pytest.fixture
def foreign(tmp_path):
    """Directories that no family reads."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return {"empty": tmp_path / "empty", "other": tmp_path / "other"}


def test_abilities_are_those_of_the_loaded_model():
    names = ("qwen3_tts", "voxcpm2")
    found = surveyed({f"my {name}": directory(name, "tiny") for name in names})
    for model, name in zip(found.models, names, strict=True):
        assert model.info == describe(f"my {name}", family(name).spec)
    assert found.room_bytes > 0


def test_memory_is_that_of_the_plan():
    place = directory("qwen3_tts", "tiny")
    [model] = surveyed({"a": place}, max_slots=3).models
    made = plan(zoo.load(place, "meta", "float32", keeps_bf16=True), 3, is_for_cpu=True)
    assert (model.max_slots, model.kv_memory_bytes) == (3, made.kv_cache)
    assert model.planned_bytes == made.total + survey.PROCESS_BYTES["cpu"]
    [larger] = surveyed({"a": place}, max_slots=3, kv_memory_bytes=made.kv_cache + 1000).models
    assert larger.planned_bytes == model.planned_bytes + 1000


def test_a_directory_that_breaks_a_family_leaves_the_others(tmp_path, foreign, monkeypatch, capfd):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text("[" * 100_000)
    models = {"deep": tmp_path / "deep", "a": directory("qwen3_tts", "tiny")}
    assert [model.info.id for model in surveyed(models).models] == ["a"]
    assert "zoo: deep is not served" in capfd.readouterr().err

    def load(path, *more, **options):
        if path == str(foreign["other"]):
            raise TypeError("a width that is a list")
        return real(path, *more, **options)

    real = zoo.load
    monkeypatch.setattr(zoo, "load", load)
    assert [model.info.id for model in surveyed({**models, "other": foreign["other"]}).models] == ["a"]
    assert "zoo: other is not served: an error in reading it" in capfd.readouterr().err


def test_what_no_family_reads_is_a_line_in_the_log(foreign, capfd):
    told = []
    models = {**foreign, "a": directory("qwen3_tts", "tiny")}
    found = surveyed(models, lambda fraction, name: told.append((fraction, name)))
    assert [model.info.id for model in found.models] == ["a"]
    assert [doing for _, doing in told] == [f"looking at {name}" for name in models] and told[0][0] == 0
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith("zoo: empty is not served: ")
    assert "model_type 'bert'" in said[1]


def test_a_directory_without_models_is_refused(foreign):
    with pytest.raises(ValueError, match="has no model"):
        surveyed(foreign)


def test_the_room_is_what_is_free_and_no_more_than_the_process_may_use(monkeypatch, tmp_path):
    facts = tmp_path / "meminfo"
    facts.write_text("MemTotal:  400 kB\nMemAvailable:   200 kB\nHugePages_Free: 0\n")
    monkeypatch.setattr(survey, "MEMORY_FACTS", facts)
    monkeypatch.setattr(survey.limits, "memory_bytes", lambda: 1 << 30)
    assert survey.room_bytes(torch.device("cpu")) == int(0.9 * (200 << 10))
    monkeypatch.setattr(survey.limits, "memory_bytes", lambda: 1000)
    assert survey.room_bytes(torch.device("cpu")) == 900


@pytest.mark.slow
def test_the_process_tells_its_progress_and_the_survey():
    models = {"a": str(directory("qwen3_tts", "tiny"))}
    settings = Settings(models=models, model=ModelOptions(device="cpu"))
    command = supervisor.command("serving.engine.survey", EngineArguments(settings, "unused"))
    done = subprocess.run(command, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

    async def messages():
        reader = asyncio.StreamReader()
        reader.feed_data(done.stdout)
        reader.feed_eof()
        return [message async for message in protocol.read(reader, decoder)]

    status, found = asyncio.run(messages())
    assert status == protocol.Status("loading", 0.0, "looking at a") and isinstance(found, Survey)
