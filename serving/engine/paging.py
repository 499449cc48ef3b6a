"""Who holds pages where there are too few for all who speak.

A request gets the pages that speech of its text usually takes, and grows page by page. When none is left, the stream that
is furthest ahead of its listener is paused: what it wrote is copied to the host, and its pages are others'. It comes back,
bit for bit, before its listener has played what there is; so nobody hears it, as long as the streams together are made
faster than they are heard.

    speaking ──no page is left, and none is further ahead──> paused (keeps its slot; what is on its tape is rendered)
       ^                                                      │
       └── there are pages again, or its lead is gone and ────┘
           another one's is greater, which is paused in its place

Pages are never promised twice: all that may come to be needed fits into the arena and the host's memory that is set apart.
Copying was chosen over prefilling again: it is exact in every dtype and for every family, whatever its inputs follow from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from serving.engine.job import Job
from serving.engine.model_worker import ModelWorker
from serving.engine.pages import Pages

AT_RISK_S = 1.0  # a paused stream with less than this left takes the place of another one
AHEAD_S = 1.0  # which has so much more
ADMIT_S = 3.0  # nobody is let in while a paused stream has less left


class Paging:
    """Over all models. max_saved: pages whose contents may be kept on the host; 0: a request gets all that it can ever
    need, and nobody is paused."""

    def __init__(self, models: Callable[[], Collection[ModelWorker]], pages: Pages, max_saved: int):
        self.models, self.pages, self.max_saved = models, pages, max_saved
        self.paused: list[Job] = []
        self.num_pauses = 0

    @property
    def uncommitted(self) -> int:
        """Pages that a newcomer may come to need."""
        running = (job for model in self.models() for job in model.running.values())
        return self.pages.num_pages + self.max_saved - sum(job.committed for job in running)

    @property
    def may_admit(self) -> bool:
        return all(job.model.ahead_s(job) >= ADMIT_S for job in self._paused())

    def turn(self) -> None:
        """Before steps are launched: afterwards all who take one have the pages for it."""
        if not self.max_saved:
            return
        short = [job for model in self.models() for job in model.short_jobs()]
        for job in sorted(short, key=lead):
            self._grow(job)
        for job in sorted(self._paused(), key=lead):
            if not self._resume(job):
                return

    def _paused(self) -> list[Job]:
        """Those who are to speak on."""
        self.paused = [job for job in self.paused if job.saved is not None]
        return [job for job in self.paused if not job.model.scheduler.is_done[job.slot]]

    def _grow(self, job: Job) -> None:
        while job.saved is None and not job.model.grow(job):
            self._pause(max(self._speaking(), key=lead))

    def _resume(self, job: Job) -> bool:
        if job.model.resume(job):
            return True
        ahead_s = job.model.ahead_s(job)
        if ahead_s >= AT_RISK_S:
            return False
        others = [other for other in self._speaking() if other.model.ahead_s(other) > ahead_s + AHEAD_S]
        others.sort(key=lead, reverse=True)
        theirs = sum(len(pages) for other in others for pages in other.pages)
        if self.pages.free + theirs < job.model.pages_to_resume(job):
            return False
        for other in others:
            self._pause(other)
            if job.model.resume(job):
                return True
        return False

    def _speaking(self) -> list[Job]:
        return [job for model in self.models() for job in model.speaking_jobs()]

    def _pause(self, job: Job) -> None:
        job.model.pause(job)
        self.paused.append(job)
        self.num_pauses += 1


def lead(job: Job) -> tuple[float, int]:
    """How far it is ahead of its listener; of equals, who came last is."""
    return job.model.ahead_s(job), job.arrival
