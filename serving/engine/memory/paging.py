"""Paging: which streams hold pages when there are too few for all.

A request gets the pages that speech of its text usually takes, and grows page by page. When none is left,
one job is paused: its pages are copied to the host, and others use them. Flexible requests give way first,
then jobs that take no step (their client reads too slowly, or no text is there), then the stream that is
furthest ahead of its listener. It comes back, bit for bit, before its listener has played its audio; so the
pause is not heard, as long as the streams together are made in real time.

    speaking ──no page is free, and no other is further ahead──> paused (keeps its slot; the renderer goes on
       ^                                                         │       with the frames on its tape)
       └── pages are free again, or its buffer is empty and ─────┘
           another request with a larger one is paused instead

Pages are never promised twice. The arena and the reserved memory of the host together hold the largest need
of every pass, and twice the largest single need stays unpromised on the host. The reason: a pause copies a
whole stream to free one page, and two streams that change places are both on the host for a moment. So saved
pages never exceed the limit. (A later pass may need more than the one before it; its listener does not wait.)

Pages are copied, not prefilled again, because a copy is exact in every dtype and for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from serving.engine.job import Job
from serving.engine.memory.pages import Pages
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.numbers import ADMIT_S, RESUME_AT_RISK_S, RESUME_MARGIN_S


class Paging:
    """Over all models. max_saved: pages whose contents may be kept on the host; 0: a request gets all that it
    can ever need, and no stream is paused. fail: ends a job for whose pages the device has too little
    memory."""

    def __init__(
        self,
        models: Callable[[], Collection[ModelWorker]],
        pages: Pages,
        max_saved: int,
        fail: Callable[[Job], None],
    ):
        self.models = models
        self.fail = fail
        self.pages = pages
        self.max_saved = max_saved
        # A job stays here until `_paused` looks, and may be paused again by then.
        self.paused: dict[Job, None] = {}
        self.num_pauses = 0

    def may_commit(self, num: int) -> bool:
        """Return whether a newcomer can be promised `num` pages."""
        running = (job for model in self.models() for job in model.running.values())
        committed = [num, *(job.pages.committed for job in running)]
        on_host = max(self.max_saved - 2 * max(committed), 0)
        return sum(committed) <= self.pages.num_pages + on_host

    @property
    def may_admit(self) -> bool:
        return all(
            job.model.buffered_s(job) >= ADMIT_S for job in self._paused() if job.model.needs_pages(job)
        )

    @property
    def is_idle(self) -> bool:
        """Whether no paused job could speak on, if it had pages."""
        return not any(job.model.needs_pages(job, is_flexible_time=True) for job in self._paused())

    def deal(self) -> None:
        """Before steps are launched, give a page to each slot that takes one and lacks it, and resume what
        can be resumed."""
        short = [job for model in self.models() for job in model.short_jobs()] if self.max_saved else []
        for job in short:
            self._grow(job)
        for job in sorted(self._paused(), key=buffer):
            if job.model.needs_pages(job) and not self._resume(job):
                return

    def begin_pass(self, job: Job) -> None:
        """Begin the next pass of an answer in its slot. If it lacks pages, it is paused, and gets those of
        others before its listener has played its audio."""
        if not job.model.begin_pass(job):
            self.paused[job] = None

    def make_room(self, job: Job) -> bool:
        """Pause flexible requests and jobs that take no step, until a listener's first pages are free. Return
        whether they are."""
        if not self.max_saved or job.listener.is_flexible:
            return False
        others = [other for other in self._holders() if not other.model.may_step(other) or is_flexible(other)]
        return self._pause_until(sum(job.model.needed_to_admit(job)), others)

    def _paused(self) -> list[Job]:
        """Return the paused jobs that are to speak on."""
        self.paused = {job: None for job in self.paused if job.pages.saved is not None}
        return [job for job in self.paused if job.model.has_use_for_pages(job)]

    def _grow(self, job: Job) -> None:
        try:
            while job.slot >= 0 and job.pages.saved is None and not job.model.grow(job):
                self._pause(self._holders()[0])
        except torch.OutOfMemoryError:
            self.fail(job)

    def _resume(self, job: Job) -> bool:
        """Return whether a paused job has its pages again, if need be those of others, or has failed."""
        others = [other for other in self._holders() if gives_way(other, job)] if self.max_saved else []
        if not self._pause_until(sum(job.model.needed_to_resume(job)), others):
            return False
        try:
            return job.model.resume(job)
        except torch.OutOfMemoryError:
            self.fail(job)
            return True

    def _pause_until(self, num: int, others: list[Job]) -> bool:
        """Pause the fewest other requests that free `num` pages. Pause none if all of them hold too few."""
        theirs = sum(other.pages.num_held for other in others)
        if self.pages.free + theirs < num:
            return False
        for other in others:
            if self.pages.free >= num:
                break
            self._pause(other)
        return self.pages.free >= num

    def _holders(self) -> list[Job]:
        """Return the jobs that could be paused, in the order in which they give way."""
        running = (job for model in self.models() for job in model.running.values())
        holders = [job for job in running if job.pages.num_held and not job.model.is_done(job.slot)]
        return sorted(holders, key=precedence, reverse=True)

    def _pause(self, job: Job) -> None:
        """Take a job's pages. Without memory for the copy it fails, which gives its pages back, too."""
        try:
            job.model.pause(job)
        except torch.OutOfMemoryError:
            return self.fail(job)
        self.paused[job] = None
        self.num_pauses += 1


def buffer(job: Job) -> tuple[float, int]:
    """Return how far a job is ahead of its listener; of equals, the one that came last is."""
    return job.model.buffered_s(job), job.arrival


def precedence(job: Job) -> tuple[bool, bool, tuple[float, int]]:
    """Return a key: the job with the largest one is paused first."""
    return is_flexible(job), not job.model.may_step(job), buffer(job)


def is_flexible(job: Job) -> bool:
    return job.listener.is_flexible


def gives_way(other: Job, job: Job) -> bool:
    """Return whether a job may be paused so that another one, which is paused, speaks on."""
    if not other.model.may_step(other) or (is_flexible(other) and not is_flexible(job)):
        return True
    buffered_s = job.model.buffered_s(job)
    is_ahead = other.model.buffered_s(other) > buffered_s + RESUME_MARGIN_S
    return buffered_s < RESUME_AT_RISK_S and is_ahead
