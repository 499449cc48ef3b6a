"""Estimates of the next iteration and of the requests of one model."""

from __future__ import annotations

from dataclasses import replace

from serving.engine.job import Job
from serving.engine.schedule.admission import Forecaster
from serving.engine.schedule.numbers import RECENT_WEIGHT
from serving.engine.schedule.scheduler import Scheduler


class Expectations:
    """running: the jobs with a slot, by slot."""

    def __init__(self, scheduler: Scheduler, forecaster: Forecaster, running: dict[int, Job]):
        self.scheduler = scheduler
        self.forecaster = forecaster
        self.running = running
        self.first_iterations = forecaster.outlook.first_iterations  # of a stream that does not write first
        self.lead_steps: float | None = None  # before the first frame; None: nothing is known yet

    def usual_frames(self, job: Job) -> int:
        """Return an upper estimate of a pass's frames."""
        usual = self.forecaster.lengths.usual(job.request.text_bytes) - job.past.frames
        return max(usual, self.scheduler.shapes.first_frames)

    def frames(self, job: Job) -> float:
        """Return the frames to expect of this pass and those behind it."""
        frames = self.forecaster.lengths.expected(job.request.text_bytes) - job.past.frames
        return min(frames, job.prompt.max_frames) if job.prompt.is_final else frames

    def record_lead(self, job: Job) -> None:
        """Record the steps before the first frame of a pass that is over: a running mean, apart from the
        length of its speech."""
        if not job.prompt.lead_steps or not job.pass_frames:
            return
        steps = sum(num_ready == 0 for _, num_ready in job.written)
        mean = job.prompt.lead_steps if self.lead_steps is None else self.lead_steps
        self.lead_steps = mean + RECENT_WEIGHT * (steps - mean)

    def refresh(self) -> None:
        """Refresh the estimates that the next iteration's decisions read."""
        scheduler, forecaster = self.scheduler, self.forecaster
        if self.lead_steps is not None:
            first_iterations = self.first_iterations + round(self.lead_steps)
            forecaster.outlook = replace(forecaster.outlook, first_iterations=first_iterations)
        forecaster.record_speakers(scheduler.frames_left, scheduler.tokens_left, self._speeds)
        scheduler.timing.iteration_s = forecaster.iteration_s
        scheduler.timing.other_models_s = forecaster.outlook.other_models_s
        scheduler.timing.step_s = forecaster.costs.iteration_s(slots=len(self.running))

    @property
    def _speeds(self) -> list[float]:
        """At which speeds listeners play."""
        return [job.listener.speed for job in self.running.values() if not job.listener.is_flexible]
