"""One model in the engine: its queue, its slots, its launches, and its requests.

    queue ──admit──> slot, pages ──rounds (model_round.py)──> finished ──release──> free again

The engine drives it, one round an iteration. With the other models it shares the pages, which it takes and
gives back, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from serving.engine.counters import ModelCounters
from serving.engine.device.arena import Arena, paged_past
from serving.engine.device.runner import Runner
from serving.engine.device.streams import AsyncCopy
from serving.engine.events import NOT_FINITE
from serving.engine.expectations import Expectations
from serving.engine.job import Job
from serving.engine.memory.late_lanes import LateLanes
from serving.engine.memory.pages import Pages
from serving.engine.memory.slot_pages import SlotPages
from serving.engine.model_queue import ModelQueue
from serving.engine.model_round import ModelRound
from serving.engine.schedule.admission import Forecaster, LaunchTimes
from serving.engine.schedule.numbers import (
    GPU_RENDERS_IN_FLIGHT,
    REPRODUCIBLE_CHUNK_PAGES,
)
from serving.engine.schedule.policy import Policy
from serving.engine.schedule.render_times import RenderTimes
from serving.engine.schedule.scheduler import Scheduler
from serving.engine.tenants import Tenants
from zoo.contract import Family, Prompt
from zoo.request import RequestError


@dataclass(frozen=True)
class WorkerSettings:
    """is_timed: only as many streams as can be made in real time. grows: a request gets the pages that it
    usually needs, and more as it goes; else all that it can ever need. report_lag: steps whose reports are
    left for the next iteration. max_unread_s: audio that a metered listener may leave. make_runner: as
    Runner."""

    num_slots: int
    policy: Policy
    compile: bool = True
    report_lag: int = 0
    is_timed: bool = False
    grows: bool = False
    max_unread_s: float = math.inf
    is_reproducible: bool = False
    codec: str = "float32"
    attention: str = "auto"
    make_runner: Callable[..., Any] = Runner


class ModelWorker:
    """A family with its slots, on pages that all models share. after_delivery: called when some of
    an iteration's audio was given, and more may be made; between: after each window, when requests may come
    and go."""

    def __init__(
        self,
        family: Family[Any],
        arena: Arena,
        pages: Pages,
        settings: WorkerSettings,
        clock: Callable[[], float],
        after_delivery: Callable[[], None],
        between: Callable[[], None],
    ):
        self.family = family
        self.settings = settings
        self.clock = clock
        self.scheduler = scheduler_of(family, arena, settings)
        self.runner = settings.make_runner(
            family,
            settings.num_slots,
            arena,
            settings.compile,
            settings.is_reproducible,
            self.scheduler.max_prefill_tokens,
            settings.codec,
            settings.attention,
        )
        if not self.runner.is_synchronous:
            self.scheduler.timing.window_cost = None  # steps wait for no window
        chunk_pages = REPRODUCIBLE_CHUNK_PAGES if settings.is_reproducible else 1
        self.pages = SlotPages(self.runner, pages, chunk_pages)
        self.lanes = LateLanes(self.pages, self.scheduler)
        first_frames = self.scheduler.shapes.first_frames
        steps = family.spec.steps_per_frame
        first_iterations = first_frames * steps + settings.report_lag + 1
        frame_s = self.scheduler.timing.frame_s
        self.forecaster = Forecaster(settings.num_slots, frame_s, first_iterations, settings.is_timed, steps)
        self.queue = ModelQueue(self.forecaster, self.scheduler, clock)
        self.counters = ModelCounters()
        self.running: dict[int, Job] = {}  # by slot
        self.expectations = Expectations(self.scheduler, self.forecaster, self.running)
        self.failing: dict[Job, str] = {}  # as ModelRound
        self.tenants = Tenants(settings.num_slots)
        self.round = ModelRound(
            scheduler=self.scheduler,
            runner=self.runner,
            forecaster=self.forecaster,
            pages=self.pages,
            tenants=self.tenants,
            counters=self.counters,
            running=self.running,
            failing=self.failing,
            clock=clock,
            report_lag=settings.report_lag,
            is_reproducible=settings.is_reproducible,
            max_renders=GPU_RENDERS_IN_FLIGHT if family.device.type == "cuda" else math.inf,
            open_lane=self.lanes.open,
            after_delivery=after_delivery,
            between=between,
        )

    def seed(self, times: LaunchTimes) -> None:
        """Begin with what the warm-up measured."""
        sizes = self.family.spec.window.sizes
        self.forecaster.seed(times, sizes)
        if self.family.device.type == "cuda":
            rows_of = self.runner.sizes.render_buckets
            step_s = times.step_s(self.settings.num_slots)
            self.use_render_times(RenderTimes.measured(times.render_s, sizes, rows_of, step_s))

    def use_render_times(self, times: RenderTimes) -> None:
        """Choose launches of renders by their measured times."""
        self.scheduler.timing.render_times = times
        self.round.max_renders = times.max_in_flight
        self.round.pace_s = times.pace_s

    @property
    def has_work(self) -> bool:
        return bool(self.running) or not self.round.is_over

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done before more text arrives."""
        return self.round.is_over and self.scheduler.is_idle

    # coming and going

    def candidates(self, count: int) -> list[Job]:
        """Return the first queued jobs that may have a slot now."""
        return self.queue.candidates(count, self.running.values()) if self.tenants.free else []

    def admit(self, job: Job) -> bool:
        """Give a job a slot, and the pages that speech of its text usually takes. Return whether there were
        enough."""
        if self.pages.pages.free <= job.pages.too_few:
            return False
        skips = self.pages.take(job, self.needed_to_admit(job))
        if skips is None:
            job.pages.too_few = self.pages.pages.free
            return False
        self.queue.jobs.remove(job)
        self.counters.queue_times.add(self.clock() - job.queued_s)
        job.slot = self.tenants.free.pop()
        job.pages.committed = self.num_pages(job.prompt)
        self.running[job.slot] = job
        is_reproducible = job.listener.is_reproducible or self.settings.is_reproducible
        listener = replace(job.listener, is_reproducible=is_reproducible)
        self._begin(job, skips, partial(self.scheduler.open, listener=listener))
        return True

    def begin_pass(self, job: Job) -> bool:
        """Begin a job's next pass in its slot: its listener waits for no place. Return whether it has pages;
        without any it is paused."""
        job.past.frames += job.pass_frames
        self.pages.give_back(job)
        job.pages.drop()
        job.pages.committed = self.num_pages(job.prompt)
        self.tenants.renew(job.slot)
        skips = self.pages.take(job, self.needed_to_admit(job))
        if skips is None and self.settings.grows:
            first_frames = self.scheduler.shapes.first_frames
            skips = self.pages.take(job, self.pages.num_needed(job.prompt, first_frames))
        has_pages = skips is not None
        if skips is None:
            skips = [0 for _ in job.prompt.lanes]
            job.pages.lanes = [[] for _ in range(self.family.spec.lanes)]
            job.pages.saved = self.runner.save([])
            job.pages.past = []
        self._begin(job, skips, self.scheduler.begin_pass)
        self.scheduler.slots.lacks_pages[job.slot] = not has_pages
        return has_pages

    def needed_to_admit(self, job: Job) -> list[int]:
        """Return the pages with which a job begins, as of `SlotPages.num_needed`. Some may be shared."""
        return self.pages.num_needed(
            job.prompt, self.expectations.usual_frames(job) if self.settings.grows else None
        )

    def _begin(self, job: Job, skips: list[int], begin: Callable[..., None]) -> None:
        closed = [0] * (self.family.spec.lanes - len(skips))
        begin(
            job.slot,
            [len(lane.inputs) - 1 for lane in job.prompt.lanes] + closed,
            skips + closed,
            grid_offset=job.prompt.grid_offset,
            steps=job.prompt.num_fed_steps,
            expected_frames=self.expectations.frames(job),
            is_final=job.prompt.is_final,
        )
        job.num_cached += skips[0]
        self.runner.open(job.slot, job.prompt, job.pages.lanes, skips)
        self.pages.open(job)

    def release(self, job: Job) -> None:
        """Take back whatever a job holds. Work in flight for its slot still runs before anything the next
        tenant launches."""
        if job.slot < 0:
            self.queue.jobs.remove(job)
            return
        del self.running[job.slot]
        job.past.frames += job.pass_frames
        if self.failing.pop(job, None) == NOT_FINITE:
            self.pages.forget(job)
        self.scheduler.close(job.slot)
        self.runner.close(job.slot)
        self.tenants.leave(job.slot, self.pages.give_back_lanes(job))
        job.slot = -1
        job.pages.drop()

    def feed(self, job: Job, tokens: Sequence[int], is_last: bool) -> None:
        """Give a job in a slot more text. Raises RequestError for more than the slot holds, and behind the
        last of the text."""
        if self.scheduler.has_all_text(job.slot):
            instead = "feed a request that is_open, and not after its last text"
            raise RequestError("text", f"more text came, but the text was complete: {instead}")
        steps = self.runner.feed(job.slot, tokens, is_last)
        self.scheduler.feed(job.slot, None if is_last else steps)

    def consume(self, job: Job, frames: int) -> None:
        """Record that a job's listener consumed `frames` frames."""
        if job.slot >= 0:
            self.scheduler.consume(job.slot, frames, self.clock())

    def stalled_jobs(self, since_s: float) -> list[Job]:
        """Return the jobs that have been paused by backpressure since before then."""
        stalled = np.flatnonzero(self.scheduler.slots.listener.backpressure_since_s < since_s)
        return [self.running[slot] for slot in stalled.tolist()]

    # pages

    def num_pages(self, prompt: Prompt) -> int:
        """Return all pages that a request can ever need."""
        return sum(self.pages.num_needed(prompt))

    def short_jobs(self) -> list[Job]:
        """Return the jobs that are to take a step and have no page for it."""
        if not self.running:
            return []
        slots = self.scheduler.decoding_slots()
        short = [self.running[slot] for slot in self.pages.short_slots(slots, self._frames_ahead(slots))]
        return self.lanes.short(self.running.values()) + short

    def _frames_ahead(self, slots: np.ndarray) -> np.ndarray:
        """Return how many frames the slots have at most after the next step. [B]"""
        return self.scheduler.slots.tape.num_ready[slots] + self.settings.report_lag + 1

    def grow(self, job: Job) -> bool:
        """Give a job the pages that it lacks for its next step. Return whether there were enough."""
        if job.opens_lane_at is not None:
            return self.lanes.try_again(job)
        return self.pages.grow(job, int(self._frames_ahead(np.array([job.slot]))[0]))

    def may_step(self, job: Job, is_flexible_time: bool | None = None) -> bool:
        """Return whether a job would take steps if it had pages. is_flexible_time: None for now's."""
        if is_flexible_time is None:
            is_flexible_time = self.scheduler.is_flexible_time
        return bool(self.scheduler.slots.may_step(is_flexible_time)[job.slot])

    def needs_pages(self, job: Job, is_flexible_time: bool | None = None) -> bool:
        """Return whether a paused job could go on if it had pages: take steps, or have frames rendered."""
        return self.may_step(job, is_flexible_time) or self.scheduler.waits_to_render(job.slot)

    def has_use_for_pages(self, job: Job) -> bool:
        """Return whether a paused job may come to need pages."""
        return not self.is_done(job.slot) or self.scheduler.waits_to_render(job.slot)

    def buffered_s(self, job: Job) -> float:
        """Return the audio that a job's listener has not played yet."""
        return float(self.scheduler.buffered_s(self.clock())[job.slot])

    def pause(self, job: Job) -> None:
        """Give a job's pages to others; their contents are kept on the host."""
        self.pages.save(job)
        self.scheduler.slots.lacks_pages[job.slot] = True

    def needed_to_resume(self, job: Job) -> list[int]:
        """Return the pages without which a paused job cannot go on, as of `SlotPages.num_needed`."""
        if self.settings.grows:
            return self.pages.needed_to_resume(job, int(self._frames_ahead(np.array([job.slot]))[0]))
        return self.pages.num_needed(job.prompt)

    def resume(self, job: Job) -> bool:
        """Return whether there were enough pages for a paused job."""
        is_back = self.pages.restore(job, self.needed_to_resume(job))
        if is_back:
            self.scheduler.slots.lacks_pages[job.slot] = False
            if job.opens_lane_at is not None:
                self.lanes.try_again(job)  # with the pages that it got for it
        return is_back

    # the end of a pass

    def num_ready(self, slot: int) -> int:
        return int(self.scheduler.slots.tape.num_ready[slot])

    def is_done(self, slot: int) -> bool:
        return bool(self.scheduler.slots.tape.is_done[slot])

    def copy_tape(self, job: Job) -> AsyncCopy:
        """Return the frames of a job's pass so far [F, *frame], on their way to the host."""
        return self.runner.frames(job.slot, self.num_ready(job.slot))

    def tape(self, job: Job) -> Tensor:
        """Return the same on the host. Waits for the device."""
        [frames] = self.copy_tape(job).tensors()
        return frames

    def finished(self) -> list[Job]:
        """Return the jobs whose pass is over and whose listener has all of it."""
        return [self.running[int(slot)] for slot in self.scheduler.finished_slots()]

    def publish_turn(self, job: Job) -> None:
        """Keep an ended pass for the conversation's next turn, and index its pages."""
        frames = self.tape(job)
        with self.runner.streams.prompts.here():  # where the next turn's prompt reads what is kept
            made = self.family.end_turn(job.prompt, frames)
        self._publish(job, made)

    def keep_answer(self, job: Job) -> None:
        """Keep an answer's tokens up to now, and index its pages for later turns."""
        job.keep_answer(self.tape(job))
        self._publish(job, job.answer.tokens)

    def _publish(self, job: Job, made: Sequence[int]) -> None:
        """Let later prompts find a pass, as far as reports have shown it to be finite. made: the keys of the
        positions behind its prompt."""
        keys = (*job.prompt.lanes[0].prefix_keys, *made)
        self.pages.publish(0, keys[: self.pages.num_finite[job.slot]], job)

    def record_pass(self, job: Job) -> None:
        """Learn from a pass that is over, and count it if its text can hardly have speech of that length."""
        self.expectations.record_lead(job)
        odd = job.end_pass(self.family.spec)
        self.counters.num_long += odd == "long"
        self.counters.num_short += odd == "short"


def scheduler_of(family: Family[Any], arena: Arena, settings: WorkerSettings) -> Scheduler:
    spec = family.spec
    # If equal requests must give equal bytes, prompts are always cut and shared in pieces of this size.
    chunk_tokens = REPRODUCIBLE_CHUNK_PAGES * arena.page_tokens(family) if settings.is_reproducible else None
    return Scheduler(
        settings.num_slots,
        settings.policy,
        spec.window,
        1 / spec.frame_rate_hz,
        spec.lanes,
        chunk_tokens,
        settings.max_unread_s,
        hold_s=spec.window.hold_samples / spec.sample_rate_hz,
        is_one_by_one=family.strategy.cuts_renders,
        renders_from_pages=paged_past(family) is not None,
    )
