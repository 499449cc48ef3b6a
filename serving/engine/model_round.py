"""One round of a model: launch prompts and a step, then read reports, render windows and deliver samples.

    launch ──> prompts, step ──> collect ──> reports ──> windows ──> samples ──> client

The round keeps what is in flight: steps whose reports are not read, and renders whose samples are not
there. Everything else belongs to the model worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from serving.engine.counters import ModelCounters
from serving.engine.device.launches import Chunk, Render, num_tokens
from serving.engine.device.streams import AsyncCopy
from serving.engine.events import NOT_FINITE, OUT_OF_MEMORY, Audio
from serving.engine.job import Job
from serving.engine.memory.slot_pages import SlotPages
from serving.engine.schedule.admission import Forecaster, IterationLoad
from serving.engine.schedule.scheduler import Scheduler
from serving.engine.tenants import Tenants
from zoo.contract import NEVER


class Step(NamedTuple):
    """A launched step, all [B]. generation: of its slots' tenants. kv_lens: positions of first lanes."""

    slots: np.ndarray
    generation: np.ndarray
    kv_lens: np.ndarray
    report: AsyncCopy


@dataclass(eq=False, kw_only=True)
class ModelRound:
    """report_lag: steps whose reports are left for the next round. is_reproducible: each chunk of a prompt
    is launched alone. max_renders: in flight. pace_s: from one step to the next while a render is under way.
    after_delivery: called when some of an iteration's audio was given, and more may be made; between: after
    each window, when requests may come and go."""

    scheduler: Scheduler
    runner: Any
    forecaster: Forecaster
    pages: SlotPages
    tenants: Tenants
    counters: ModelCounters
    running: dict[int, Job]  # by slot
    failing: dict[Job, str]  # jobs whose answer cannot be completed, with the code of the failure
    clock: Callable[[], float]
    report_lag: int
    is_reproducible: bool
    open_lane: Callable[[Job, int], None]  # called again until the lane is open
    after_delivery: Callable[[], None]
    between: Callable[[], None]
    max_renders: float
    pace_s: float = 0.0
    load: IterationLoad = field(default_factory=IterationLoad)  # of this iteration
    began_s: float = -math.inf
    steps: deque[Step] = field(default_factory=deque)
    renders: deque[tuple[Render, np.ndarray, AsyncCopy]] = field(default_factory=deque)

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight."""
        return not self.steps and not self.renders

    def launch(self) -> bool:
        """Launch one stretch of prompts, then one step of all slots that may take it. Return whether there
        was anything to launch."""
        self.began_s = self.clock()
        chunks = self._next_chunks()
        slots = self.scheduler.decoding_slots()
        is_mixed = bool(chunks) and bool(slots.size) and self.runner.has_mixed
        if chunks and not is_mixed:
            for launch in [[chunk] for chunk in chunks] if self.is_reproducible else [chunks]:
                self.runner.prefill(launch)
        if slots.size:
            report = self.runner.mixed(slots, chunks) if is_mixed else self.runner.step(slots)
            self.steps.append(Step(slots, self.tenants.generation[slots], self.runner.kv_lens[slots], report))
            self.scheduler.record_step(slots)
        self.load = IterationLoad(slots.size, num_tokens(chunks))
        return bool(chunks) or bool(slots.size)

    def _next_chunks(self) -> list[Chunk]:
        """Return the positions of prompts that this iteration reads. They count as launched from here on."""
        num_waiting = min(self.scheduler.tokens_left, self.scheduler.policy.prefill_tokens)
        prefill_s = self.forecaster.costs.prefill_s(num_waiting)
        chunks = self.scheduler.next_chunks(self.clock(), prefill_s)
        for chunk in chunks:
            self.scheduler.record_prefill(chunk)
        return chunks

    def collect(self, launched: bool, is_alone: bool = True) -> None:
        """Take reports, render the windows that are due because of them, and deliver samples.

        While there are steps in flight, the last `report_lag` of them are left alone. Windows are handed
        on as they are done; if no model has anything else to do (`is_alone`), the next one is waited for.
        """
        self._collect_reports(self.report_lag if launched else 0)
        self._render()
        self._deliver(is_waiting=is_alone and not launched)
        if launched:
            self._leave_to_render()

    def _leave_to_render(self) -> None:
        """Leave the device to a render that is under way: a step costs as much for few slots as for many, and
        slows down the render. The next one follows at the pace, or when the render is done."""
        left_s = self.began_s + self.pace_s - self.clock()
        if self.renders and left_s > 0:
            self.after_delivery()
            self.renders[0][2].wait(left_s)
            self._deliver(is_waiting=False)

    def _collect_reports(self, report_lag: int) -> None:
        while len(self.steps) > report_lag:
            step = self.steps.popleft()
            [report] = step.report.read()
            same = self.tenants.stayed(step.slots, step.generation)
            slots = step.slots[same]
            ready, done, written, finite, *opens = report[same].T
            is_sick = (finite == 0) & ~self.scheduler.slots.tape.is_done[slots]
            self.failing.update({self.running[slot]: NOT_FINITE for slot in slots[is_sick].tolist()})
            self._publish_prompts(slots[finite > 0], step.kv_lens[same][finite > 0])
            # A slot that was done already took a step in vain, whose report repeats the one before.
            has_text = ((written >= 0) | (done > 0)) & ~self.scheduler.slots.tape.is_done[slots]
            self.scheduler.report(slots, ready, done > 0)
            for slot, token, num_ready, is_done in zip(
                *(column[has_text].tolist() for column in (slots, written, ready, done)), strict=True
            ):
                job = self.running[slot]
                job.write(token, num_ready, bool(is_done))
                if job.writing.is_stopped and not is_done:
                    self.runner.end(slot)
            if opens:
                for slot, opens_at in zip(slots.tolist(), opens[0].tolist(), strict=True):
                    if opens_at < NEVER:
                        self._open_lane(self.running[slot], opens_at)

    def _publish_prompts(self, slots: np.ndarray, kv_lens: np.ndarray) -> None:
        """Let later prompts find those that these slots have read without NaN. kv_lens: as of `Step`."""
        for slot, lane in self.pages.record_finite(slots, kv_lens):
            job = self.running[slot]
            self.pages.publish(lane, job.prompt.lanes[lane].prefix_keys[:-1], job)

    def _open_lane(self, job: Job, step: int) -> None:
        try:
            self.open_lane(job, step)
        except torch.OutOfMemoryError:
            self.failing[job] = OUT_OF_MEMORY

    def _render(self) -> None:
        if len(self.renders) >= self.max_renders:
            return
        renders = self.scheduler.take_due_windows(self.clock())
        self.load.frames += sum(render.frames * len(render.slots) for render in renders)
        # A slot that changes hands between two windows is kept until its own is made, for no listener.
        generations = [self.tenants.generation[render.slots] for render in renders]
        for render in renders:
            self.tenants.num_rendering[render.slots] += 1
        for render, generation in zip(renders, generations, strict=True):
            self._launch_render(render, generation)
            # If a launch returns when it is done, an urgent listener does not wait for other windows.
            self._deliver(is_waiting=False)
            self.after_delivery()
            self.between()

    def _launch_render(self, render: Render, generation: np.ndarray) -> None:
        try:
            self.renders.append((render, generation, self.runner.render(render)))
        except torch.OutOfMemoryError:
            self.tenants.num_rendering[render.slots] -= 1
            slots = render.slots[self.tenants.stayed(render.slots, generation)]
            self.failing.update({self.running[slot]: OUT_OF_MEMORY for slot in slots.tolist()})

    def _deliver(self, is_waiting: bool) -> None:
        while self.renders and (is_waiting or self.renders[0][2].is_there):
            is_waiting = False
            render, generation, copy = self.renders.popleft()
            samples, valid = copy.read()
            self.tenants.num_rendering[render.slots] -= 1
            rows = np.flatnonzero(self.tenants.stayed(render.slots, generation))
            slots = render.slots[rows]
            counts = render.count[rows]
            num_samples = valid[rows]
            windows = zip(rows.tolist(), slots.tolist(), counts.tolist(), num_samples.tolist(), strict=True)
            for row, slot, frames, num in windows:
                self._give(self.running[slot], samples[row, :num].copy(), frames)
            given_s = num_samples / self.runner.family.spec.sample_rate_hz
            self.counters.audio_s += float(given_s.sum())
            is_last = render.is_last[rows]
            self.scheduler.record_delivery(slots, counts, given_s, is_last, render.handed_s, self.clock())
        self.tenants.free_up()

    def give_silence(self, job: Job, num_samples: int) -> None:
        """Give a job's listener silence before or behind a pass."""
        if num_samples:
            job.pause(num_samples)
            given_s = num_samples / self.runner.family.spec.sample_rate_hz
            self.scheduler.record_silence(job.slot, given_s, self.clock())

    def _give(self, job: Job, samples: np.ndarray, frames: int) -> None:
        if not np.isfinite(samples).all():
            self.failing[job] = NOT_FINITE
        if job in self.failing:
            return
        self.give_silence(job, job.prompt.silence_before)
        job.prompt.silence_before = 0
        job.deliver(Audio(samples, frames))
        job.past.num_samples += len(samples)
        if not len(samples) or job.past.is_heard:
            return
        job.past.is_heard = True
        took_s = self.clock() - job.request.accepted_s
        self.counters.first_audio_s = took_s
        if job.request.predicted_s is not None:
            self.forecaster.correction.record(job.request.predicted_s, took_s)
