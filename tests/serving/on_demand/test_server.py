"""A complete `zoo serve --model-dir` with tiny models: it loads, unloads and loads again."""

import os
import shutil
import time
from pathlib import Path

import httpx
import pytest
from models import directory
from served import serving

pytestmark = pytest.mark.slow

NAMES = ("qwen3_tts", "voxcpm2")


@pytest.fixture
def models(tmp_path):
    """A directory of two models, and one that no family reads."""
    folder = tmp_path / "models"
    for name in NAMES:
        shutil.copytree(directory(name, "tiny"), folder / name)
    (folder / "notes").mkdir()
    return folder


def until(fact, seconds=60.0):
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, f"still false after {seconds} s"
        time.sleep(0.05)


def engines():
    """Return the process ids of the engines of models on demand below this process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_text()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(path.name)] = parent, "serving.engine.engine_process" in line
    return [pid for pid, (_, is_engine) in found.items() if is_engine and descends(pid, found)]


def descends(pid, found):
    while pid in found and pid != os.getpid():
        pid = found[pid][0]
    return pid == os.getpid()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_models_are_loaded_unloaded_and_loaded_again(tmp_path, models):
    options = ("--model-dir", models, "--keep-alive", "2s", "--deterministic")
    with serving(tmp_path, *options, key=None) as url, httpx.Client(base_url=url, timeout=90) as client:

        def states():
            return {name: model["state"] for name, model in client.get("/health").json()["models"].items()}

        def speak(model):
            body = {"model": model, "input": "Hi.", "seed": 3, "max_new_tokens": 4, "response_format": "wav"}
            return client.post("/v1/audio/speech", json=body)

        assert states() == dict.fromkeys(NAMES, "cold") and not engines()
        first = {}
        for name in NAMES:
            answer = speak(name)
            assert answer.status_code == 200, answer.text
            first[name] = answer.content
            assert states()[name] == "loaded" and engines()
        until(lambda: set(states().values()) == {"cold"})
        assert not engines()
        assert speak(NAMES[0]).content == first[NAMES[0]]
    assert not engines()
