"""How exact a model is on this machine: `zoo parity`.

Two questions. Does the served form (compiled, in its dtype, through pages and windows) say what the plain fp32 form says? Both take the
same steps, each from the state that the plain form left, so a first difference does not hide the next ones. And does the plain form say
what the reference implementation says, where its environment is at hand?
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import zoo
from serving.engine.prepare_for_host import prepare_for_host
from serving.engine.runner import PAGE_TOKENS, Arena, Runner, token_bytes
from serving.engine.scheduler import Chunk, Render
from serving.tools.bench import REFERENCES
from zoo.contract import AudioClip, Family, Request, Spec, State, View
from zoo.loop import SoloBatches
from zoo.nn import kernels

TEXT = "Good morning. The train to the north leaves at a quarter to eight."
SAME = 1e-3  # samples this near are the same speech


def parity(
    directory: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    compile: bool = True,
    frames: int = 50,
    reference_python: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """One greedy request for each thing the model can do. reference_python: of the reference's environment, or None to leave it out.
    Raises ValueError."""
    plain = zoo.load(directory, device=device, dtype="float32")
    served = zoo.load(directory, device=device, dtype=dtype)
    prepare_for_host(served, compile=compile)
    work = requests(plain.spec, frames)
    result: dict[str, Any] = {
        "family": plain.spec.family,
        "variant": plain.spec.variant,
        "device": str(plain.device),
        "dtype": str(served.dtype).removeprefix("torch."),
        "compiled": compile,
        "torch": torch.__version__,
        "served": {},
        "reference": None,
    }
    for name, request in work.items():
        say(f"{name}: the served form and the plain one")
        result["served"][name] = follow(plain, served, request, compile)
    if reference_python is not None:
        say("the reference")
        noise = torch.from_numpy(np.random.default_rng(0).standard_normal((frames, *plain.spec.noise_shape), np.float32))
        said = reference(directory, plain.spec, reference_python, work, noise)
        result["reference"] = {"name": said.pop("name"), "runs": {}}
        for name, samples in said["samples"].items():
            say(f"{name}: the reference and the plain form")
            ours = zoo.generate(plain, work[name], noise=noise if plain.spec.noise_shape else None)
            result["reference"]["runs"][name] = compare(ours.samples.numpy(), samples, ours.sample_rate_hz)
    return result


def requests(spec: Spec, frames: int) -> dict[str, Request]:
    """By what they show. Greedy, where there is something to choose."""
    greedy: dict[str, Any] = {"text": TEXT, "max_frames": frames, "temperature": None if spec.noise_shape else 0.0}
    work = {}
    if "voice" in spec.modes or not spec.modes:
        work["voice"] = Request(**greedy, voice=spec.voices[0] if spec.voices else None)
    if "design" in spec.modes:
        work["design"] = Request(**greedy, instructions="An old sailor, slow and hoarse.")
    if "clone" in spec.modes:
        work["clone"] = Request(**greedy, reference=buzz(), reference_text="It hums and hums.")
    return work


def buzz() -> AudioClip:
    """Three seconds of a sound with a moving pitch."""
    at = np.arange(3 * 24000) / 24000
    phase = 2 * np.pi * 110 * (at + 0.02 * np.sin(9 * at))
    sound = sum(np.sin(k * phase) / k for k in range(1, 12))
    return AudioClip((0.1 * sound * (1.2 + np.sin(20 * at))).astype(np.float32), 24000)


@torch.inference_mode()
def follow(plain: Family, served: Family, request: Request, compile: bool) -> dict[str, Any]:
    """Step by step: the plain form, and the served one from where the plain one stood."""
    prompt = plain.prompt(request)
    batches = SoloBatches(plain, prompt)
    state = plain.state(1)
    plain.admit(state, 0, prompt)
    needed = max(prompt.max_positions(plain.spec))
    lanes, pages = len(prompt.lanes), -(-needed // PAGE_TOKENS)
    runner = Runner(served, 1, Arena([served], (lanes * pages + 1) * PAGE_TOKENS * token_bytes(served)), compile)
    runner.warm(lambda progress, stage: None)
    runner.open(0, served.prompt(request), [range(1 + lane * pages, 1 + (lane + 1) * pages) for lane in range(lanes)], [0] * lanes)
    for i, (lane, length) in enumerate(zip(prompt.lanes, batches.lengths, strict=True)):
        if length:
            plain.hidden(lane.inputs[:-1], batches.prefill(i))
            runner.prefill([Chunk(0, 0, length, is_last=True, lane=i)])
    gaps = []
    while not state.done[0]:
        copy(state, runner.state)
        before = int(state.ready[0])
        with kernels.plain():
            plain.step(state, batches.step())
        runner.step(np.zeros(1, np.int64)).read()
        if state.ready[0] != runner.state.ready[0] or state.done[0] != runner.state.done[0]:
            gaps.append(float("inf"))  # one of them ended
        else:
            made = slice(before, before + plain.spec.delay + 1)  # a step's codes may belong to several frames
            gaps.append(difference(state.tape[0, made], runner.state.tape[0, made]))
    copy(state, runner.state)
    count = int(state.ready[0])
    start = torch.zeros(1, dtype=torch.int64, device=plain.device)
    expected = plain.render(state, View(start, start, start + count, count))[0].cpu().numpy() if count else np.zeros(0, np.float32)
    heard, window = [np.zeros(0, np.float32)], max(served.spec.window.sizes)
    for first in range(0, count, window):
        rows, least = np.zeros(1, np.int64), min(window, count - first)
        samples = runner.render(Render(rows, rows + first, rows + least, window)).read()[0]
        heard.append(samples[: least * served.spec.frame_samples])
    return {
        "steps": len(gaps),
        "steps_equal": sum(gap == 0 for gap in gaps),
        "largest_frame_difference": max(gaps, default=0.0),
        **compare(np.concatenate(heard), expected, served.spec.sample_rate_hz),
    }


def copy(source: State, target: State) -> None:
    """The first slot, whole."""
    for name, value in vars(source).items():
        if isinstance(value, Tensor):
            getattr(target, name)[0] = value[0]


def difference(one: Tensor, other: Tensor) -> float:
    """Of codes, how many differ; of latents, by how much at most, in parts of the largest."""
    if not one.is_floating_point():
        return float((one != other).sum())
    return float((one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=1e-9))


def compare(ours: np.ndarray, theirs: np.ndarray, rate_hz: int) -> dict[str, float]:
    """Two renderings of the same speech, [N] each."""
    shared = min(len(ours), len(theirs))
    gap = np.abs(ours[:shared] - theirs[:shared])
    apart = np.flatnonzero(gap > SAME)
    noise, signal = float(np.square(gap).mean()) if shared else 0.0, float(np.square(theirs[:shared]).mean()) if shared else 0.0
    return {
        "audio_s": len(ours) / rate_hz,
        "expected_s": len(theirs) / rate_hz,
        "equal_s": (int(apart[0]) if apart.size else shared) / rate_hz,
        "largest_sample_difference": float(gap.max(initial=0.0)),
        "snr_db": float(10 * np.log10(signal / noise)) if noise and signal else float("inf"),
    }


def reference(directory: str, spec: Spec, python: str, work: dict[str, Request], noise: Tensor) -> dict[str, Any]:
    """What the reference implementation says, greedy, or from the same noise, in fp32. Raises ValueError if it cannot be run."""
    script = REFERENCES / f"reference_{spec.family}.py"
    if not script.exists():
        raise ValueError(f"{script} does not exist: comparing with the reference needs a source tree that has one for this family")
    with tempfile.TemporaryDirectory(prefix="zoo-parity-") as place:
        out, said = Path(place) / "samples.npz", {}
        for name, request in work.items():
            fields = {key: value for key, value in asdict(request).items() if value is not None and key != "reference"}
            if request.reference is not None:
                np.savez(Path(place) / "clip.npz", samples=request.reference.samples, rate_hz=request.reference.sample_rate_hz)
                fields["reference"] = str(Path(place) / "clip.npz")
            if spec.noise_shape:
                np.save(Path(place) / "noise.npy", noise.numpy())
                fields["noise"] = str(Path(place) / "noise.npy")
            said[name] = fields
        order = {"directory": str(Path(directory).resolve()), "out": str(out), "requests": said}
        env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        try:
            ran = subprocess.run([python, str(script), json.dumps(order)], stdout=subprocess.PIPE, check=True, env=env, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"the reference did not run with {python}: {error}") from None
        with np.load(out) as samples:
            return {"name": json.loads(ran.stdout.splitlines()[-1])["name"], "samples": dict(samples)}
