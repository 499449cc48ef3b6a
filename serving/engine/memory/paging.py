"""Paging: which streams hold pages when there are too few for all.

A request gets the pages that speech of its text usually takes, and grows page by page. When none is left, the
stream that is furthest ahead of its listener is paused: its pages are copied to the host, and others use
them. It comes back, bit for bit, before its listener has played its audio; so the pause is not heard, as
long as the streams together are made in real time.

    speaking ──no page is left, and none is further ahead──> paused (keeps its slot; what is on its tape is
    rendered)
       ^                                                      │
       └── there are pages again, or its buffer is gone and ──┘
           another one's is larger, which is paused in its place

Pages are never promised twice: all that may come to be needed fits into the arena and the host's memory that
is set apart. Copying was chosen over prefilling again: it is exact in every dtype and for every family,
whatever its inputs follow from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from serving.engine.job import Job
from serving.engine.memory.pages import Pages
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.numbers import ADMIT_S, RESUME_AT_RISK_S, RESUME_MARGIN_S


class Paging:
    """Over all models. max_saved: pages whose contents may be kept on the host; 0: a request gets all that it
    can ever need, and no stream is paused."""

    def __init__(self, models: Callable[[], Collection[ModelWorker]], pages: Pages, max_saved: int):
        self.models = models
        self.pages = pages
        self.max_saved = max_saved
        self.paused: list[Job] = []
        self.num_pauses = 0

    @property
    def uncommitted(self) -> int:
        """Pages that a newcomer may come to need."""
        running = (job for model in self.models() for job in model.running.values())
        return self.pages.num_pages + self.max_saved - sum(job.pages.committed for job in running)

    @property
    def may_admit(self) -> bool:
        return all(job.model.buffered_s(job) >= ADMIT_S for job in self._paused())

    def deal(self) -> None:
        """Before steps are launched, give a page to each slot that takes one and lacks it, and resume what
        can be resumed."""
        if not self.max_saved:
            return
        short = [job for model in self.models() for job in model.short_jobs()]
        for job in sorted(short, key=buffer):
            self._grow(job)
        for job in sorted(self._paused(), key=buffer):
            if not self._resume(job):
                return

    def _paused(self) -> list[Job]:
        """Return the paused jobs that are to speak on."""
        self.paused = [job for job in self.paused if job.pages.saved is not None]
        return [job for job in self.paused if not job.model.is_done(job.slot)]

    def _grow(self, job: Job) -> None:
        while job.pages.saved is None and not job.model.pages.grow(job):
            self._pause(max(self._decoding(), key=buffer))

    def _resume(self, job: Job) -> bool:
        if job.model.resume(job):
            return True
        buffered_s = job.model.buffered_s(job)
        if buffered_s >= RESUME_AT_RISK_S:
            return False
        enough_s = buffered_s + RESUME_MARGIN_S
        others = [other for other in self._decoding() if other.model.buffered_s(other) > enough_s]
        others.sort(key=buffer, reverse=True)
        theirs = sum(len(pages) for other in others for pages in other.pages.lanes)
        if self.pages.free + theirs < job.model.pages.num_to_resume(job):
            return False
        for other in others:
            self._pause(other)
            if job.model.resume(job):
                return True
        return False

    def _decoding(self) -> list[Job]:
        return [job for model in self.models() for job in model.decoding_jobs()]

    def _pause(self, job: Job) -> None:
        job.model.pause(job)
        self.paused.append(job)
        self.num_pauses += 1


def buffer(job: Job) -> tuple[float, int]:
    """Return how far a job is ahead of its listener; of equals, the one that came last is."""
    return job.model.buffered_s(job), job.arrival
