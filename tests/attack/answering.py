"""Requests whose answers would be wrong or late: values out of range, other clients' recordings, portions of
text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from websockets.sync.client import connect

from tests.attack.flooding import silence, upload
from tests.attack.report import Row
from tests.attack.target import Target, until, write_demo
from tests.attack.trusting import metric

NUM_SICK, NUM_RECORDINGS = 4, 16
TEXT = "Good morning, everybody who is here today. The old man told the children a story about the sea. It was long ago."


def attack(directory: Path) -> Iterator[Row]:
    write_demo(directory / "sick", "tiny")
    overflow(directory / "sick" / "model.safetensors")
    with Target("tiny sick", directory) as target:
        yield values_that_are_not_finite(target)
        yield portions(target)
    with Target("tiny-base", directory) as target:
        yield stored_voice(target)


def overflow(file: Path) -> None:
    """Make a model compute infinity, with weights that are all finite."""
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[name] = torch.full_like(tensors[name], 3e38)
    save_file(tensors, file, {"format": "pt"})


def values_that_are_not_finite(target: Target) -> Row:
    """Such an answer is an error, is counted, and leaves other models alone."""
    answers = [target.speak(model="sick", voice="vivian", stream=i % 2 == 0) for i in range(NUM_SICK)]
    codes = [answer.json()["error"]["code"] if answer.status_code == 500 else "spoken" for answer in answers]
    well = target.speak(model="tiny", voice="vivian").status_code
    wrong = NUM_SICK - codes.count("not_finite") + (well != 200)
    counter = 'zoo_not_finite_total{model="sick"}'
    is_counted = until(lambda: metric(target, counter) == [NUM_SICK], 5)  # figures come once a second
    seen = f"{', '.join(sorted(set(codes)))}; counted: {metric(target, counter)}"
    return Row("values that are not finite", NUM_SICK, wrong + (not is_counted), seen)


def portions(target: Target) -> Row:
    """A text of several passes says the same in any portions."""
    ways = [[TEXT], TEXT.split(" "), list(TEXT)]
    ways[1] = [f"{word} " for word in ways[1][:-1]] + ways[1][-1:]
    heard = [spoken(target, way) for way in ways]
    wrong = sum(not is_alike(pcm, heard[0]) for pcm in heard)
    return Row("one text in portions", len(ways), wrong, f"bytes of audio: {[len(pcm) for pcm in heard]}")


def is_alike(heard: bytes, expected: bytes) -> bool:
    """Whether two streams differ by rounding only."""
    first, second = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (heard, expected))
    return len(first) == len(second) > 0 and int(np.abs(first - second).max()) <= 2


def spoken(target: Target, texts: Sequence[str]) -> bytes:
    config = {"model": "tiny", "voice": "vivian", "seed": 5, "temperature": 0, "max_new_tokens": 60}
    pcm = b""
    with connect(target.url.replace("http", "ws") + "/v1/audio/speech/stream") as client:
        client.send(json.dumps({"type": "session.config", **config}))
        for text in texts:
            client.send(json.dumps({"type": "input.text", "text": text}))
        client.send(json.dumps({"type": "input.done"}))
        while True:
            message = client.recv(timeout=60)
            if isinstance(message, bytes):
                pcm += message
            elif json.loads(message)["type"] in ("audio.done", "error"):
                return pcm


def stored_voice(target: Target) -> Row:
    """A stored voice is spoken before recordings that came earlier and must be encoded."""
    upload(target)
    ended: list[str] = []

    def clone(seconds: float) -> None:
        recording = base64.b64encode(silence(seconds, 16000)).decode()
        target.speak(voice=None, ref_audio=recording, x_vector_only_mode=True)
        ended.append("recording")

    with ThreadPoolExecutor(NUM_RECORDINGS) as pool:
        for number in range(NUM_RECORDINGS):
            pool.submit(clone, 40 + number)
        status = target.speak(voice="other").status_code
        num_before = len(ended)
    late = int(status != 200 or num_before > NUM_RECORDINGS // 2)
    return Row(
        "a stored voice behind recordings", NUM_RECORDINGS, late, f"{num_before} were spoken before it"
    )
