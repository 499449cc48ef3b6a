"""The life of a request that has a prompt, on the engine's thread. It gets a slot, speaks its passes, and
ends, is cancelled or fails.

Admission has two rules:
- Each model has its own slots. A model without a free slot holds up only its own requests.
- All models share the pages. Among requests whose model has a free slot, the oldest goes first. If it lacks
pages, smaller requests of any model may skip it, a bounded number of times. Requests that hold pages end, so
every request is admitted at last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import structlog
import torch

from serving.engine.composer import Composer
from serving.engine.events import CANNOT_CONTINUE, NOT_FINITE, OUT_OF_MEMORY, Event, Failed, Finished
from serving.engine.intake import Intake
from serving.engine.job import Job, QueuedRequest
from serving.engine.memory.paging import Paging
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.numbers import LOOK_S, MAX_SKIPS
from zoo.contract import Prompt
from zoo.request import RequestError

STALLED = "the client has not taken what was spoken for {:g} s"
FAILURES = {
    NOT_FINITE: "the model computed NaN or infinity, so this answer cannot be completed",
    OUT_OF_MEMORY: "the device has too little memory left for this request; try again later",
}
INTERNAL = "an error in the engine; its log says more"

log = structlog.get_logger()


class Lifecycle:
    """max_stall_s: a request whose client has been paused by backpressure for so long fails."""

    def __init__(
        self,
        models: Mapping[str, ModelWorker],
        paging: Paging,
        intake: Intake,
        composer: Composer,
        max_stall_s: float,
        clock: Callable[[], float],
    ):
        self.models = models
        self.paging = paging
        self.intake = intake
        self.inbox = intake.inbox
        self.composer = composer
        self.max_stall_s = max_stall_s
        self.clock = clock
        self._arrivals = itertools.count()
        self._looked_s = -math.inf  # at requests that may be late

    # news

    def take_news(self) -> None:
        news = self.inbox.take()
        for queued in news.left:
            queued.model.counters.num_left_early += 1
            queued.deliver(Finished("cancelled", 0, {}))
        for job in news.jobs:
            job.arrival = next(self._arrivals)
            self.intake.known[job.id] = job
            job.queued_s = self.clock()
            job.model.queue.jobs.append(job)
        for job, prompt in news.composed:
            self._begin_pass(job, prompt)
        for id, tokens, is_last in news.fed:
            self._feed(id, tokens, is_last)
        for id, frames in news.consumed:
            if (consumer := self.intake.known.get(id)) is not None:
                consumer.model.consume(consumer, frames)
        for id in news.cancelled:
            if (cancelled := self.intake.known.get(id)) is not None:
                if cancelled.slot >= 0 and cancelled.model.family.spec.keeps_answers:
                    cancelled.model.keep_answer(cancelled)
                self._release(cancelled, cancelled.cancelled())

    def take_in(self) -> bool:
        """Take news between the launches of an iteration. Return whether there was any."""
        if not self.inbox.news:
            return False
        self.take_news()
        self.admit()
        return True

    def _feed(self, id: str, tokens: list[int], is_last: bool) -> None:
        job = self.intake.known.get(id)
        if job is None:
            return
        if job.slot < 0:
            job.unfed.append((tokens, is_last))
            return
        try:
            job.model.feed(job, tokens, is_last)
        except RequestError as error:
            self._release(job, Failed(str(error), code=CANNOT_CONTINUE))

    # slots

    def admit(self) -> None:
        """First come, first served, of the requests whose model has room for them, flexible ones last."""
        while self.paging.may_admit and self._admit_one():
            pass

    def _admit_one(self) -> bool:
        able = [job for model in self.models.values() for job in model.candidates(MAX_SKIPS + 1)]
        candidates = sorted(able, key=lambda job: job.rank)
        for job in candidates:
            head = candidates[0]
            if job is not head and head.pages.num_skips >= MAX_SKIPS:
                break
            try:
                is_admitted = self._admit_job(job, may_pause=job is head)
            except torch.OutOfMemoryError:  # nothing of it was launched
                self.fail(job, OUT_OF_MEMORY)
                return True
            if is_admitted:
                head.pages.num_skips += job is not head
                self._is_in(job)
                return True
        return False

    def _admit_job(self, job: Job, may_pause: bool) -> bool:
        """Return whether a job got its slot and its pages, which others may be paused for."""
        if not self.paging.may_commit(job.model.num_pages(job.prompt)):
            return False
        if job.model.admit(job):
            return True
        return may_pause and self.paging.make_room(job) and job.model.admit(job)

    def _is_in(self, job: Job) -> None:
        """The job has a slot."""
        with self.inbox.lock:
            job.model.queue.remove(job.id)
        unfed = job.unfed
        job.unfed = []
        for tokens, is_last in unfed:
            self._feed(job.id, tokens, is_last)

    # passes

    def finish_pass(self, job: Job) -> None:
        """End the answer, or have its next pass made ready; until then its slot is kept. The listener has all
        of this pass."""
        job.model.record_pass(job)
        job.report_pass()
        job.model.round.give_silence(job, job.prompt.silence_after)
        if job.model.family.spec.shares_turns:
            job.model.publish_turn(job)
        if job.model.family.spec.keeps_answers:
            job.model.keep_answer(job)
        if job.prompt.is_final:
            self._end(job)
        else:
            self.composer.compose(job, job.model.copy_tape(job))

    def _begin_pass(self, job: Job, composed: Future[Prompt | None]) -> None:
        """Begin a next pass in its slot, or end the answer if none follows."""
        if self.intake.known.get(job.id) is not job or composed.cancelled():
            return
        error = composed.exception()
        if isinstance(error, torch.OutOfMemoryError):
            return self.fail(job, OUT_OF_MEMORY)
        if isinstance(error, RequestError):
            return self._release(job, Failed(str(error), code=CANNOT_CONTINUE))
        if error is not None:
            log.error("unexpected", id=job.id, exc_info=error)
            return self._release(job, Failed(INTERNAL))
        prompt = composed.result()
        if prompt is None:
            return self._end(job)
        job.next_pass(prompt)
        try:
            self.paging.begin_pass(job)
        except torch.OutOfMemoryError:
            self.fail(job, OUT_OF_MEMORY)

    # ends

    def _end(self, job: Job) -> None:
        """All of it was spoken."""
        if job.num_frames and job.prompt.num_fed_steps is None:  # else only the first of its text is known
            job.model.forecaster.lengths.record(job.request.text_bytes, job.num_frames)
        self._release(job, job.ending())

    def drop_stalled(self) -> None:
        since_s = self.clock() - self.max_stall_s
        for model in self.models.values():
            for job in model.stalled_jobs(since_s):
                self._release(job, Failed(STALLED.format(self.max_stall_s), code="stalled"))

    def refuse_late(self) -> None:
        """End the requests in line that would now be heard much later than the limit. Looks at them every
        LOOK_S."""
        now_s = self.clock()
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        for queued, full in self.intake.late():
            job = self.intake.known.get(queued.id)
            with self.inbox.lock:
                # Its client may have left meanwhile. If its prompt is built, its job comes with the news.
                is_in_line = queued.model.queue.requests.get(queued.id) is queued
                if not is_in_line or (job is None and queued.is_made):
                    continue
                self.intake.leave(queued)
            queued.model.counters.num_refused += 1
            last = Failed(str(full), code="engine_full", retry_after_s=full.retry_after_s)
            if job is None:
                queued.deliver(last)
            else:
                self._release(job, last)

    def end_failing(self) -> None:
        """End the requests whose launches have failed."""
        for model in self.models.values():
            for job, code in tuple(model.failing.items()):
                model.counters.num_not_finite += code == NOT_FINITE
                self.fail(job, code)

    def fail(self, job: Job, code: str) -> None:
        """End a request with one of FAILURES."""
        log.error(code, id=job.id, frames=job.num_frames)
        self._release(job, Failed(FAILURES[code], code=code))

    def looks_in_s(self) -> float | None:
        """Return the seconds after which an engine without work has an iteration even without news; None if
        only news can change anything."""
        stalls_in_s = self.stalls_in_s()
        if not any(model.queue.requests for model in self.models.values()):
            return stalls_in_s
        return LOOK_S if stalls_in_s is None else min(stalls_in_s, LOOK_S)

    def stalls_in_s(self) -> float | None:
        """Return the seconds until the first stalled client is dropped; None if all clients read."""
        rows = [model.scheduler.slots.listener for model in self.models.values()]
        since_s = min(float(row.backpressure_since_s.min()) for row in rows)
        drop_s = since_s + self.max_stall_s - self.clock()
        return max(drop_s, 0.0) + 0.001 if math.isfinite(drop_s) else None

    def _release(self, job: Job, last: Event) -> None:
        del self.intake.known[job.id]
        with self.inbox.lock:
            job.model.queue.remove(job.id)
        job.model.release(job)
        job.deliver(last)

    def end_all(self, last: Failed) -> None:
        with self.inbox.lock:
            self.intake.is_over = True
            queued = [each for model in self.models.values() for each in model.queue.requests.values()]
            for each in queued:
                self.intake.leave(each)
            news = self.inbox.news
            unmade = [each for each in queued if not each.is_made]
            late: list[Job | QueuedRequest] = [*news.jobs, *news.left, *unmade]
            news.jobs.clear()
            news.left.clear()
        for job in tuple(self.intake.known.values()):
            self._release(job, last)
        for one in late:
            one.deliver(last)
