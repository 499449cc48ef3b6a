"""Second lanes that open while their slot runs (`Spec.opens_late`).

    report names a step ──open──> pages ──prefill──> the second lane takes its first step there
                                   │ none are free
                                   └──> paging finds some before the next launch, or pauses the slot

The positions of a second lane before its first step are the same for all requests, so slots share nearly all
of its pages. A slot computes the last positions alone, and all that no earlier text was long enough to need.
"""

from __future__ import annotations

from collections.abc import Iterable

from serving.engine.job import Job
from serving.engine.memory.slot_pages import SlotPages
from serving.engine.schedule.scheduler import Scheduler
from zoo.contract import NEVER


class LateLanes:
    def __init__(self, pages: SlotPages, scheduler: Scheduler):
        self.pages = pages
        self.scheduler = scheduler

    def open(self, job: Job, step: int) -> None:
        """Open a job's second lane, which takes its first step at `step`. Reports say so until it ends."""
        runner = self.pages.runner
        if runner.table.opens_at[job.slot] < NEVER:
            return
        job.opens_lane_at = runner.length_at(job.slot, step)
        if job.pages.saved is None:
            self.try_again(job)

    def try_again(self, job: Job) -> bool:
        """Return whether there were pages for a second lane that is to open, and for the first lane's next
        step: both follow in one iteration."""
        assert job.opens_lane_at is not None, f"{job.id} opens no lane"
        slots = self.scheduler.slots
        has_next = self.pages.grow(job, int(slots.tape.num_ready[job.slot]) + 1)
        skip = self.pages.open_lane(job, job.opens_lane_at) if has_next else None
        if skip is None:
            return False
        slots.open_lane(job.slot, 1, job.opens_lane_at, skip, self.scheduler.iteration)
        job.opens_lane_at = None
        return True

    def short(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs that wait for pages of their second lane."""
        return [job for job in jobs if job.opens_lane_at is not None]
