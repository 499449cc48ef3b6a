"""Measure how soon an uploaded voice speaks: at first use, later, after a restart, and compared with a preset
voice.

    python benchmarks/kept_voice.py [--size 0.6b] [--reference-s 6] [--rounds 8] [SERVE_OPTION ...]

One server holds two Qwen3-TTS demo checkpoints of the same size, one for clones and one with preset voices.
It is started seven times: with nothing stored, with the voice that the first run encoded, and with that file
removed. First audio is in ms by the client's clock; requests run one at a time, each with another text.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import soundfile
from served import served

from zoo.qwen3_tts import write_demo

RATE_HZ = 24000
THINGS = (
    "sea",
    "wind",
    "room",
    "old man",
    "story",
    "window",
    "bread",
    "house",
    "river",
    "child",
    "garden",
    "letter",
)
RESTARTS = 3


def first_audio_ms(client: httpx.Client, round_: int, **fields: object) -> float:
    text = f"The {THINGS[round_ % len(THINGS)]} was quiet this morning."
    body = {"input": text, "seed": round_, "response_format": "pcm", "max_new_tokens": 6}
    began_s = time.perf_counter()
    with client.stream("POST", "/v1/audio/speech", json=body | fields) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        ms = 1000 * (time.perf_counter() - began_s)
        for _ in chunks:
            pass
    return ms


def after_a_restart(models: list[str], flags: list[str], voice: str) -> float:
    """Return the clone's first audio in ms at its first use after a start."""
    with served([*models, *flags]) as url, httpx.Client(base_url=url, timeout=300) as client:
        first_audio_ms(client, 0, model="preset", voice=voice)
        return first_audio_ms(client, 1, model="clone", voice="anna")


def recording(duration_s: float) -> bytes:
    t = np.arange(int(duration_s * RATE_HZ)) / RATE_HZ
    noise = np.random.default_rng(1).normal(0, 0.02, len(t))
    samples = 0.3 * np.sin(2 * np.pi * (120 + 20 * np.sin(3 * t)) * t) * (1 + np.sin(9 * t)) / 2 + noise
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), RATE_HZ, format="WAV")
    return file.getvalue()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--size", default="0.6b")
    options.add_argument("--reference-s", type=float, default=6.0)
    options.add_argument("--rounds", type=int, default=8)
    given, serve_options = options.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        sizes = {"clone": f"{given.size}-base", "preset": given.size}
        models = [f"{name}={write_demo(here / name, size)}" for name, size in sizes.items()]
        flags = ["--voices-dir", str(here / "voices"), *serve_options]
        rounds = range(given.rounds)
        with served([*models, *flags]) as url, httpx.Client(base_url=url, timeout=300) as client:
            form = {"name": "anna", "ref_text": "The old man told the children a story about the sea."}
            client.post(
                "/v1/audio/voices", data=form, files={"audio_sample": recording(given.reference_s)}
            ).raise_for_status()
            voice = client.get("/v1/models/preset").json()["voices"][0]
            preset = [first_audio_ms(client, i, model="preset", voice=voice) for i in rounds]
            clone = [first_audio_ms(client, i, model="clone", voice="anna") for i in rounds]
        kept = [after_a_restart(models, flags, voice) for _ in range(RESTARTS)]
        files = list((here / "voices" / "anna").glob("qwen3_tts-*.safetensors"))
        num_bytes = sum(file.stat().st_size for file in files)
        forgotten = []
        for _ in range(RESTARTS):
            for file in (here / "voices" / "anna").glob("qwen3_tts-*.safetensors"):
                file.unlink()
            forgotten.append(after_a_restart(models, flags, voice))
    result = {
        "preset_ms": round(median(preset[1:]), 1),
        "clone_first_use_ms": round(clone[0], 1),
        "clone_second_use_ms": round(clone[1], 1),
        "clone_later_ms": round(median(clone[1:]), 1),
        "restarted_first_use_ms": [round(ms, 1) for ms in kept],
        "restarted_first_use_nothing_kept_ms": [round(ms, 1) for ms in forgotten],
        "kept_bytes": num_bytes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
