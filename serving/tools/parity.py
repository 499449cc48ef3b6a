"""`zoo parity`: measure how exact a model is on this machine.

It makes two comparisons. The first is the served form (compiled, in its dtype, through the server's slots,
pages and windows) against the plain fp32 form. Both take each step from the state that the plain form left,
so a first difference does not hide later ones. The second is the plain form against the reference
implementation, if its environment exists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import zoo
from compile_cache.counts import counts
from serving.engine.device.prepare_for_host import cache_place, cached, prepare_for_host
from serving.engine.engine import Audio, Engine, Event
from serving.engine.job import Job, QueuedRequest
from serving.engine.model_worker import ModelWorker
from serving.protocol import Listener
from serving.tools import reference
from serving.tools.requests import every_request
from zoo import kernels
from zoo.contract import NEVER, Family, Prompt, State, View
from zoo.loop import SoloBatches
from zoo.request import Request

SAME = 1e-3  # samples that differ by at most this much count as equal
SILENCE = np.zeros(0, np.float32)
QUIET = 1e-20  # least energy of a signal, so that silence has a level in dB too


def parity(
    model: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    weights: str = "published",
    compile: bool = True,
    frames: int = 50,
    max_slots: int = 8,
    codec: str = "float32",
    attention: str = "auto",
    depth: str = "layers",
    reference_python: str | None = None,
    log_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure one greedy request for each capability of the model. Returns JSON, with null for infinity.

    max_slots, codec, attention, depth: the settings of the server, so that its compiled code is found in the cache.
    reference_python: the Python of the reference's environment; None skips the reference. Raises ValueError.
    """
    plain = zoo.load(model, device=device, dtype="float32")
    served = zoo.load(model, device=device, dtype=dtype)
    # This sets the number of threads, so it comes before any computation.
    prepare_for_host(served, compile=compile, weights=weights, depth=depth)
    work, refused = every_request(plain, frames)
    if not work:
        raise ValueError(f"{model} refuses every request: {'; '.join(refused.values())}")
    theirs = None
    if reference_python is not None:  # first, because it may fail to run
        theirs = against(plain, zoo.find(model)[1], reference_python, work, frames, log_line)
    engine = Engine(served, max_slots=max_slots, compile=compile, codec=codec, attention=attention)
    before = counts()
    engine.warm(lambda fraction, stage: log_line(f"warming {fraction:4.0%} {stage}"), cached)
    made = counts() - before
    [worker] = engine.models.values()
    runs = {}
    for name, request in work.items():
        log_line(f"{name}: comparing the served form with the plain form")
        runs[name] = follow(plain, worker, request)
    return {
        "family": plain.spec.family,
        "variant": plain.spec.variant,
        "device": str(plain.device),
        "dtype": str(served.dtype).removeprefix("torch."),
        "weights": weights,
        "depth": depth,
        "compiled": compile,
        "torch": torch.__version__,
        "cache": str(cache_place(served)),
        "graphs": made.graphs,
        "graphs_compiled": made.compiled,  # the cache had the others
        "compiles_after_warmup": engine.stats()["compiles_after_warmup"],
        "served": runs,
        "refused": refused,
        "reference": theirs,
    }


# The served form against the plain form.


@torch.inference_mode()
def follow(plain: Family[Any], worker: ModelWorker, request: Request) -> dict[str, Any]:
    """Compare step by step; the served form starts every step from the state of the plain form."""
    heard: list[np.ndarray] = [np.zeros(0, np.float32)]

    def hear(event: Event) -> None:
        if isinstance(event, Audio):
            heard.append(event.samples)

    passes = worker.family.passes(request)
    queued = QueuedRequest("parity", worker, hear, Listener(is_reproducible=True))
    job = Job(queued, next(passes), passes)
    plain_passes = plain.passes(request)
    with kernels.plain():
        prompt = next(plain_passes)
    gaps = []
    expected = []
    while True:
        state = plain.state(1)
        plain.admit(state, 0, prompt)
        gaps += follow_pass(plain, prompt, state, worker, job)
        expected.append(render_whole(plain, state))
        if prompt.is_final:
            break
        frames = state.tape[0, : int(state.ready[0])].cpu()
        job.next_pass(passes.send(frames))
        with kernels.plain():
            prompt = plain_passes.send(frames)
    largest = max(gaps, default=0.0)
    return {
        "steps": len(gaps),
        "steps_equal": sum(gap == 0 for gap in gaps),
        "largest_frame_difference": largest if np.isfinite(largest) else None,
        **compare(np.concatenate(heard), np.concatenate(expected), plain.spec.sample_rate_hz),
    }


def follow_pass(
    plain: Family[Any], prompt: Prompt, state: State, worker: ModelWorker, job: Job
) -> list[float]:
    """Return the `gap` of each step of a pass. The job receives the audio of the whole pass."""
    streams = worker.runner.streams
    with streams.lm.here():  # one stream for both forms, so that each reads the other's writes
        gaps = follow_steps(plain, prompt, state, worker, job)
    streams.renders.wait_for(streams.lm.mark())
    render_all(worker, job, int(state.ready[0]))
    worker.release(job)
    return gaps


def follow_steps(
    plain: Family[Any], prompt: Prompt, state: State, worker: ModelWorker, job: Job
) -> list[float]:
    batches = SoloBatches(plain, prompt)
    with kernels.plain():
        for i, lane in enumerate(prompt.lanes):
            if batches.lengths[i]:
                plain.hidden(lane.inputs[:-1], batches.prefill(i))
    worker.queue.jobs.append(job)
    assert worker.admit(job), (
        f"a single request needs {worker.num_pages(job.prompt)} pages and was not admitted"
    )
    gaps = []
    served = worker.runner.state
    while not state.done[0]:
        first = int(state.ready[0])
        served.take_row(job.slot, state)
        with kernels.plain():
            plain.step(state, batches.step())
        launch_step(worker)
        if plain.spec.opens_late and not batches.is_open and int(state.lane_at[0]) < NEVER:
            open_lane(plain, state, batches, worker, job)
        worker.scheduler.report(np.array([job.slot]), state.ready[:1].cpu().numpy(), np.array([False]))
        gaps.append(gap(state, served, job.slot, first))
    served.take_row(job.slot, state)
    return gaps


def open_lane(plain: Family[Any], state: State, batches: SoloBatches, worker: ModelWorker, job: Job) -> None:
    """Open the second lane in both forms."""
    step = int(state.lane_at[0])
    lane = plain.second_lane(batches.length_at(step))
    with kernels.plain():
        plain.hidden(lane.inputs, batches.open(lane))
    worker.lanes.open(job, step)


def launch_step(worker: ModelWorker) -> None:
    """Launch until the worker has taken a step; the first launches may only prefill. A job that has filled
    its pages gets more, as in the engine's loop."""
    taken = len(worker.round.steps)
    while len(worker.round.steps) == taken:
        for job in worker.short_jobs():
            assert worker.grow(job), f"{worker.num_pages(job.prompt)} pages for a single request are too many"
        worker.round.launch()


def render_all(worker: ModelWorker, job: Job, frames: int) -> None:
    """Render a complete tape in the windows of a server."""
    worker.round.steps.clear()  # their reports hold the served form's own stops
    worker.scheduler.report(np.array([job.slot]), np.array([frames]), np.array([True]))
    while not worker.finished():
        worker.round.collect(launched=False)


def render_whole(plain: Family[Any], state: State) -> np.ndarray:
    """Render the whole tape of slot 0 at once. [N]"""
    frames = int(state.ready[0])
    if frames == 0:
        return np.zeros(0, np.float32)
    slots, start, count = torch.tensor([[0], [0], [frames]], device=plain.device)
    view = View(slots, start, count, count > 0, frames, plain.spec.window.length_bucket(frames))
    with kernels.plain():
        samples, valid = plain.render(state, view)
    return samples[0, : int(valid[0])].cpu().numpy()


def gap(state: State, served: State, slot: int, first: int) -> float:
    """Return the difference of a step's frames: those from `first` on, since its codes may belong to several
    frames. It is infinite if only one form ended, or if they wrote different text."""
    for name in ("ready", "done", "written"):
        if getattr(state, name)[0] != getattr(served, name)[slot]:
            return float("inf")
    return difference(state.tape[0, first:], served.tape[slot, first:])


def difference(one: Tensor, other: Tensor) -> float:
    """Return how many codes differ, or the largest difference of latents relative to the largest latent. It
    is infinite if a latent is not finite."""
    if not one.is_floating_point():
        return float((one != other).sum())
    apart = (one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=1e-9)
    return float(apart) if apart.isfinite() else float("inf")


def compare(ours: np.ndarray, theirs: np.ndarray, rate_hz: int) -> dict[str, float | None]:
    """Compare two renderings of the same speech, [N] each. snr_db is None if no sample differs. A sample that
    only one of them has, or that is not finite, counts as silence and as different."""
    num = max(len(ours), len(theirs))
    both = [np.pad(part, (0, num - len(part)), constant_values=np.nan) for part in (ours, theirs)]
    is_number = np.isfinite(both).all(0)
    heard, expected = (np.nan_to_num(part, posinf=0.0, neginf=0.0) for part in both)
    difference = np.abs(heard - expected)
    apart = np.flatnonzero((difference > SAME) | ~is_number)
    noise, signal = (float(np.square(part, dtype=np.float64).sum()) for part in (difference, expected))
    return {
        "audio_s": len(ours) / rate_hz,
        "expected_s": len(theirs) / rate_hz,
        "equal_s": (int(apart[0]) if apart.size else num) / rate_hz,
        "largest_sample_difference": float(difference.max(initial=0.0)),
        "snr_db": float(10 * np.log10(max(signal, QUIET) / noise)) if noise else None,
    }


# The plain form against the reference.


def against(
    plain: Family[Any],
    directory: Path,
    python: str,
    work: dict[str, Request],
    frames: int,
    log_line: Callable[[str], None],
) -> dict[str, Any]:
    """Compare with the reference in fp32, greedy or from the same noise. Raises ValueError if it fails."""
    shape = plain.spec.noise_shape
    noise = None
    if shape:
        noise = torch.from_numpy(np.random.default_rng(0).standard_normal((frames, *shape), np.float32))
    log_line("running the reference")
    name, spoken, texts = ask(plain.spec.family, directory, python, work, noise)
    runs: dict[str, dict[str, Any]] = {}
    for request in dict.fromkeys((*spoken, *texts)):
        log_line(f"{request}: comparing the plain form with the reference")
        ours = zoo.generate(plain, work[request], noise=noise)
        runs[request] = compare(ours.samples.numpy(), spoken.get(request, SILENCE), ours.sample_rate_hz)
        if request in texts:
            runs[request]["text_is_equal"] = ours.text == texts[request]
    return {"name": name, "runs": runs}


def ask(
    family: str, directory: Path, python: str, work: dict[str, Request], noise: Tensor | None
) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    """Run the reference. Returns its name, and its samples [N] and texts by request. Raises ValueError."""
    with tempfile.TemporaryDirectory(prefix="zoo-parity-") as temporary:
        place = Path(temporary)
        requests = {name: reference.fields(request, place, name) for name, request in work.items()}
        order: dict[str, Any] = {"directory": str(directory.resolve()), "requests": requests}
        order["out"] = str(place / "samples.npz")
        if noise is not None:
            np.save(place / "noise.npy", noise.numpy())
            order["noise"] = str(place / "noise.npy")
        answer = reference.run(family, python, order)
        with np.load(place / "samples.npz") as samples:
            return answer["name"], dict(samples), answer.get("texts", {})
