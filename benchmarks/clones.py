"""The part `clones` of benchmarks/under_load.py: first audio of a preset voice while another model of the
server encodes the recordings of clones."""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import tempfile
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.zoo_server import SETTLE_S, Server, demo, offered, serving, told
from serving.tools.load.client import Target, connections, speak
from serving.tools.load.learn import address
from serving.tools.load.plan import Planned

CLONES = 40
ROUNDS, PAUSE_S = 4, 0.1  # rounds, and the shortest pause between two probes


def clones(options: argparse.Namespace) -> dict[str, Any]:
    """Measure first audio of a preset voice while another model on the server runs eight slots.

    The other model speaks in a voice that it knows, or in forty new ones."""
    with tempfile.TemporaryDirectory() as place:
        cloning = options.clone_model or demo(Path(place) / "base", "tiny-1.7b-base")
        voices = ("--voices-dir", f"{place}/voices")
        with serving(options, *voices, models=[f"preset={options.model}", f"clone={cloning}"]) as server:
            frames = {"max_new_tokens": options.frames or 40}
            upload(server, "known", recording(0))
            known = {"model": "clone", "voice": "known", "input": "One of eight speakers.", **frames}
            fresh = {"model": "clone", "input": "One of forty clones.", "ref_text": "A recording.", **frames}
            alone, eight, clone, control = (
                "no others",
                "8 speakers",
                f"{CLONES} clones",
                "8 speakers and another program",
            )
            beside = {
                alone: Beside(),
                eight: Beside(8, known),
                clone: Beside(CLONES, fresh, has_recordings=True),
                control: Beside(8, known, encoder=cloning),
            }
            probe = {
                "model": "preset",
                "voice": offered(server)[0],
                "input": "Good morning.",
                "max_new_tokens": 5,
            }
            heard: dict[str, list[Probed]] = {name: [] for name in beside}
            # The conditions alternate, since the machine's speed changes from minute to minute.
            for name in (alone, *(eight, clone, control) * ROUNDS):
                heard[name].append(asyncio.run(probed(server, probe, beside[name], options.rung_s / ROUNDS)))
                told(f"next to {name}: {json.dumps(facts_of(heard[name]))}")
                # every clone that was heard in the round, or while it settled, had been encoded
                if name == clone:
                    beside[control].encodes_per_s = len(heard[clone][-1].others_ms) / (
                        options.rung_s / ROUNDS + SETTLE_S
                    )
                time.sleep(SETTLE_S)
    found = {name: facts_of(rounds) for name, rounds in heard.items()}
    p50 = {name: facts["ttfa_p50_ms"] for name, facts in found.items()}
    ratios = {
        "ratio_p50": p50[clone] / p50[eight],
        "ratio_p50_to_another_program": p50[clone] / p50[control],
    }
    return {"beside": found} | ratios


@dataclass
class Probed:
    """First audio of each probe and of the other requests, in ms, and the number of running requests."""

    ttfa_ms: list[float] = field(default_factory=list)
    others_ms: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)


def facts_of(rounds: Sequence[Probed]) -> dict[str, Any]:
    """Return the figures of all rounds, and each round's median, which shows the noise."""
    ttfa_ms, others_ms, running = (
        [value for one in rounds for value in getattr(one, name)]
        for name in ("ttfa_ms", "others_ms", "running")
    )
    return {
        "probes": len(ttfa_ms),
        "ttfa_p50_ms": float(np.median(ttfa_ms)),
        "ttfa_p90_ms": float(np.quantile(ttfa_ms, 0.9)),
        "ttfa_p50_ms_by_round": [float(np.median(one.ttfa_ms)) for one in rounds],
        "running_mean": float(np.mean(running)),
        "others_heard": len(others_ms),
        "others_ttfa_p50_ms": float(np.median(others_ms)) if others_ms else None,
    }


async def probed(server: Server, probe: dict[str, Any], beside: Beside, duration_s: float) -> Probed:
    """Measure first audio of `probe` a few times a second while other clients send requests all the time.

    The others are a separate process, because a client that writes recordings notices audio late."""
    target, found = Target(address(server.url), None, 24000), Probed()
    mine, theirs = get_context("spawn").Pipe()
    others = [get_context("spawn").Process(target=follow, args=(target, beside, theirs))]
    if beside.encoder:
        work = (beside.encoder, beside.encodes_per_s, theirs)
        others.append(get_context("spawn").Process(target=encode, args=work, daemon=True))
    for process in others:
        process.start()
        mine.recv()  # until the clients send and the encoder runs
    theirs.close()
    async with connections(target) as session:
        await asyncio.sleep(SETTLE_S)
        end_s = time.monotonic() + duration_s
        for index in itertools.count():
            if time.monotonic() > end_s:
                break
            record = await speak(session, target, Planned(probe, "pcm"), index, time.monotonic())
            assert record.playback is not None and record.playback.first_s is not None, record.outcome
            found.ttfa_ms.append(1e3 * (record.playback.first_s - record.submitted_s))
            found.running.append((await asyncio.to_thread(server.metrics))["zoo_requests_running"])
            await asyncio.sleep(PAUSE_S + PAUSE_S * np.random.default_rng(index).random())
    mine.send("enough")
    found.others_ms = mine.recv()
    for process in others[1:]:
        process.terminate()
    for process in others:
        process.join()
    return found


@dataclass
class Beside:
    """The load next to a probe: `count` clients that always send `body`, and perhaps another program.

    With has_recordings, each request has another voice. The other program is independent of the server: it
    encodes `encodes_per_s` recordings with the model in the directory `encoder`."""

    count: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    has_recordings: bool = False
    encoder: Path | None = None
    encodes_per_s: float = 0


def follow(target: Target, beside: Beside, pipe: Connection) -> None:
    """Send requests until a message comes through the pipe, then send each first audio in ms through it."""
    heard_ms: list[float] = []
    is_over = asyncio.Event()

    async def one(session: aiohttp.ClientSession, index: int) -> None:
        while not is_over.is_set():
            fresh = {"ref_audio": recording(index)} if beside.has_recordings else {}
            planned = Planned(beside.body | fresh, "pcm")
            record = await speak(session, target, planned, index, time.monotonic())
            if record.playback is not None and record.playback.first_s is not None:
                heard_ms.append(1e3 * (record.playback.first_s - record.submitted_s))
            index += beside.count

    async def all_of_them() -> None:
        async with connections(target) as session:
            tasks = [asyncio.create_task(one(session, index)) for index in range(beside.count)]
            pipe.send("asking")
            await asyncio.to_thread(pipe.recv)
            is_over.set()  # a cancelled request has a record as well
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    pipe.send(heard_ms)


def encode(model: Path, per_s: float, pipe: Connection) -> None:
    """Build the prompts of clones in one thread, as a server does, until the process is terminated."""
    import zoo
    from compile_cache import threads
    from zoo.request import AudioClip, Reference, Request

    threads.use_one_thread()
    family = zoo.load(model, device="cpu")
    for index in itertools.count():
        begun_s = time.monotonic()
        data = base64.b64decode(recording(index).partition(",")[2])[44:]  # 44: the WAV header
        clip = AudioClip(np.frombuffer(data, "<i2").astype(np.float32) / 32768, 24000)
        family.prompt(Request(text="One of forty clones.", references=(Reference(clip, "A recording."),)))
        if index == 0:
            pipe.send("encoding")
        time.sleep(max(0, begun_s + 1 / per_s - time.monotonic()))


def recording(seed: int, seconds: float = 5.0, rate_hz: int = 24000) -> str:
    """Return noise that differs for every seed, as a data URL."""
    samples = noise(round(seconds * rate_hz)).copy()
    samples[:32] = np.random.default_rng(seed).normal(0, 3000, 32)
    file = BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((1, 2, rate_hz, 0, "NONE", ""))
        wav.writeframes(samples.tobytes())
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


@cache
def noise(num_samples: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3000, num_samples).astype("<i2")


def upload(server: Server, name: str, audio: str) -> None:
    async def post() -> None:
        form = aiohttp.FormData({"name": name, "ref_text": "A recording."})
        data = base64.b64decode(audio.partition(",")[2])
        form.add_field("audio_sample", data, filename="voice.wav", content_type="audio/wav")
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/audio/voices", data=form) as answer,
        ):
            assert answer.status < 300, await answer.text()

    asyncio.run(post())
