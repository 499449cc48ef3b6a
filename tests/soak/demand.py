"""A second server in a soak: its models are loaded on demand, and unloaded as soon as they are idle."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp

from tests.soak import answers
from tests.soak.answers import check_status
from tests.soak.cases import SHORT
from tests.soak.watched import Watched, alive, command_line, write_demo

MODELS = {"first": ("qwen3_tts", "tiny"), "second": ("higgs_v3", "tiny")}
GATEWAY = {"gateway": "serving.on_demand.gateway_process", "http": "serving.http.app"}
ENGINE = "serving.engine.engine_process"
OPTIONS = ("--keep-alive", "1s", "--load-wait", "120", "--max-slots", "4", "--no-compile", "--no-warm")
SPEECH = "/v1/audio/speech"
FRAMES = 12


class OnDemand(Watched):
    """`zoo serve --model-dir`. `firsts` has the first answer of each model."""

    modules = GATEWAY

    def __init__(self, directory: Path):
        self.home = directory / "demand"
        self.home.mkdir()
        super().__init__(" ".join(MODELS), directory, TMPDIR=str(directory / "tmp"), ZOO_LOG="json")
        self.firsts: dict[str, bytes] = {}

    @property
    def command(self) -> list[str]:
        for name, (family, size) in MODELS.items():
            write_demo(self.home / "models" / name, family, size)
        where = ["--model-dir", str(self.home / "models"), "--voices-dir", str(self.home / "voices")]
        return [sys.executable, "-m", "serving", "serve", "--device", "cpu", "--port", "0", *where, *OPTIONS]

    def engines(self) -> list[int]:
        """Return the process ids of the models that are loaded."""
        return [pid for pid in alive(self.process.pid) if ENGINE in command_line(pid)]

    def record(self) -> None:
        """Speak with each model once, and keep the answers."""
        for name in MODELS:
            answer = self.http.post(SPEECH, json=body_of(name) | {"stream": False})
            assert answer.status_code == 200, f"{name} on demand: {answer.text}"
            self.firsts[name] = answer.content


def body_of(model: str) -> dict[str, object]:
    voice = {"voice": "vivian"} if MODELS[model][0] == "qwen3_tts" else {}
    fields = {"model": model, "input": SHORT, "response_format": "pcm", "seed": 3, "max_new_tokens": FRAMES}
    return fields | voice


async def speak(session: aiohttp.ClientSession, server: OnDemand, model: str) -> None:
    """Speak with a model, which may have to be loaded. Raises Refused, Wrong."""
    async with session.post(server.url + SPEECH, json=body_of(model)) as answer:
        data = await answer.read()
        check_status(answer.status, data, answer.headers.get("retry-after"))
    answers.check_stream("pcm", data, server.firsts[model])
