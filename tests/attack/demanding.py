"""Models on demand that are damaged, killed, or asked for in turn: other models and other clients must not notice."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx

from tests.attack.report import Row
from tests.attack.target import Target, command_line, until, write_demo
from tests.soak.watched import alive

GATEWAY = {"gateway": "serving.on_demand.gateway_process", "http": "serving.http.app"}
ENGINE = "serving.engine.engine_process"
GOOD = ("first", "second")
NUM_TURNS = 4  # each loads both models
GONE_S, BACK_S = 20.0, 90.0
OPTIONS = ("--keep-alive", "500ms", "--load-wait", "60")
DAMAGED = ("cut-weights", "no-weights", "empty", "odd-config", "wrong-shapes", "loop")


class OnDemand(Target):
    """`zoo serve --model-dir` with the models in `directory`/models."""

    modules = GATEWAY

    @property
    def command(self) -> list[str]:
        quick = ["--no-compile", "--no-warm", "--device", "cpu", "--port", "0"]
        where = [
            "--model-dir",
            str(self.directory / "models"),
            "--voices-dir",
            str(self.directory / "voices"),
        ]
        return [sys.executable, "-m", "serving", "serve", *where, *quick, *self.options]

    def engines(self) -> list[int]:
        return [pid for pid in alive(self.process.pid) if ENGINE in command_line(pid)]

    def loaded(self) -> list[str]:
        models = self.http.get("/health").json()["models"]
        return [name for name, model in models.items() if model["state"] == "loaded"]


def attack(directory: Path) -> Iterator[Row]:
    plant(directory)
    with OnDemand(" ".join(GOOD), directory, *OPTIONS) as target:
        yield damaged_directories(target)
        yield in_turn(target)
        yield killed_model(target)
        yield abandoned_loads(target)
        yield nothing_left(target)


def plant(directory: Path) -> None:
    """Write two good models, a link to a good one outside, and damaged ones."""
    models, good = directory / "models", directory / "outside"
    models.mkdir()
    write_demo(good, "tiny")
    for name in (*GOOD, *DAMAGED[:2], *DAMAGED[3:5]):
        shutil.copytree(good, models / name)
    weights = models / "cut-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (models / "no-weights" / "model.safetensors").unlink()
    (models / "empty").mkdir()
    (models / "odd-config" / "config.json").write_text("[" * 100_000)
    (models / "wrong-shapes" / "model.safetensors").write_bytes(b"\xff" * 8 + bytes(100))
    (models / "loop").symlink_to(models / "loop")
    (models / "nowhere").symlink_to(directory / "nothing")
    (models / "linked").symlink_to(good, target_is_directory=True)


def speak(target: OnDemand, model: str, **fields: object) -> httpx.Response:
    return target.speak(model=model, voice="vivian", seed=1, **fields)


def damaged_directories(target: OnDemand) -> Row:
    """A damaged model is left out, or refused with a reason that names no path; a link to a good one is served."""
    listed = [model["id"] for model in target.http.get("/v1/models").json()["data"]]
    answers = {name: speak(target, name) for name in (*DAMAGED, "nowhere", "linked", *GOOD)}
    wrong = [name for name in (*GOOD, "linked") if answers[name].status_code != 200]
    for name in (*DAMAGED, "nowhere"):
        status = answers[name].status_code
        is_right = status == (503 if name in listed else 404)
        if not is_right or str(target.directory) in answers[name].text:
            wrong.append(f"{name} {status} {answers[name].text[:200]}")
    seen = ", ".join(f"{name} {answer.status_code}" for name, answer in answers.items())
    return Row("damaged directories of models", len(answers), len(wrong), "; ".join([seen, *wrong]))


def in_turn(target: OnDemand) -> Row:
    """Models are loaded and unloaded in turn, while requests run. Equal requests give equal answers."""
    firsts = {name: speak(target, name, stream=False).content for name in GOOD}
    wrong = 0
    for _ in range(NUM_TURNS):
        with ThreadPoolExecutor(2 * len(GOOD)) as pool:
            asked = [(name, pool.submit(speak, target, name, stream=False)) for name in (*GOOD, *GOOD)]
            wrong += sum(answer.result().content != firsts[name] for name, answer in asked)
        wrong += not until(lambda: not target.engines(), GONE_S)
    loads = sum(
        float(line.split()[1]) for line in metrics(target) if line.startswith("zoo_model_loads_total")
    )
    return Row("models loaded in turn", 2 * NUM_TURNS * len(GOOD), wrong, f"{loads:.0f} loads, {wrong} wrong")


def metrics(target: OnDemand) -> list[str]:
    return target.http.get("/metrics").text.splitlines()


def killed_model(target: OnDemand) -> Row:
    """Streams of a model whose process is killed end with an error, and the next request loads it again."""
    whole = speak(target, GOOD[0], text="Hello. " * 20, max_new_tokens=200, response_format="pcm").content
    ends: Counter[str] = Counter()

    def listen() -> str:
        try:
            fields = {"text": "Hello. " * 20, "max_new_tokens": 200, "response_format": "pcm"}
            answer = speak(target, GOOD[0], **fields)
        except httpx.TransportError:
            return "broken"
        if answer.status_code != 200:
            return str(answer.status_code)
        return "whole" if len(answer.content) == len(whole) else "BAD"

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(listen) for _ in range(4)]
        until(lambda: GOOD[0] in target.loaded(), BACK_S)
        time.sleep(0.3)
        for pid in target.engines():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ends.update(answer.result() for answer in answers)
    is_back = until(lambda: speak(target, GOOD[0]).status_code == 200, BACK_S)
    wrong = ends["BAD"] + sum(number for end, number in ends.items() if end.isdigit() and end != "503")
    seen = ", ".join(f"{number} {end}" for end, number in ends.items())
    return Row("SIGKILL to a model's process, 4 open", 4, wrong + (not is_back), f"{seen}; back: {is_back}")


def abandoned_loads(target: OnDemand) -> Row:
    """Clients that leave while a model is loaded leave nothing behind."""
    until(lambda: not target.engines(), GONE_S)
    for name in (*GOOD, *GOOD):
        with httpx.Client(base_url=target.url, timeout=0.2) as client, suppress(httpx.TimeoutException):
            target.speak(client=client, model=name, voice="vivian")
    is_gone = until(lambda: not target.engines(), BACK_S)
    return Row(
        "clients that leave while a model is loaded", 4, int(not is_gone), f"unloaded again: {is_gone}"
    )


def nothing_left(target: OnDemand) -> Row:
    """The idle server holds as many descriptors after a model was loaded and unloaded as before."""
    is_gone = until(lambda: not target.engines(), GONE_S)
    target.http.get("/health")  # the same connections are open before and after
    before = num_descriptors(target)
    speak(target, GOOD[0])
    until(lambda: not target.engines(), GONE_S)
    is_flat = until(lambda: num_descriptors(target) <= before, GONE_S)
    seen = f"{before} descriptors, then {num_descriptors(target)}"
    return Row("after all models are unloaded", 1, (not is_gone) + (not is_flat), seen)


def num_descriptors(target: OnDemand) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in target.pids.values())
