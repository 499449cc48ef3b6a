"""The loop: in each iteration every model with work has one round.

    accept() ─> prepare() ─> inbox ─> the model's queue ─> admit, launch, collect late, render, deliver
    (model_worker.py)
       any thread (intake.py)         the engine's thread, one iteration after another

Requests come and go through an inbox, so the loop owns everything else and needs no locks. A launch's report
is read after the next launch is in flight (`report_lag`), so the device never waits for the host, and samples
when they are there. On a CPU, where a launch returns when it is done, both are read at once.

All models live on one arena of pages. Admission, in order:
- Slots are each model's own: a model whose slots are all taken holds up only its own requests.
- Pages are shared: of the requests whose model has a free slot the one that came first goes first. If it
lacks pages, smaller ones of any model may skip it, a bounded number of times. Requests that hold pages end,
so every request is admitted at some time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
import torch

from compile_cache.artifacts import Entry
from compile_cache.counts import counts
from serving.engine.composer import Composer
from serving.engine.counters import IterationCounters
from serving.engine.device import warmup
from serving.engine.device.arena import Arena
from serving.engine.device.runner import Runner
from serving.engine.events import Audio, Event, Failed, Finished, Spoken, Text
from serving.engine.inbox import Inbox
from serving.engine.intake import Full, Intake, Limits
from serving.engine.job import Job, QueuedRequest
from serving.engine.memory.memory_plan import resident_bytes, usual_kv_bytes, usual_saved_bytes
from serving.engine.memory.pages import Pages
from serving.engine.memory.paging import Paging
from serving.engine.model_worker import ModelWorker, WorkerSettings
from serving.engine.schedule.numbers import MAX_SKIPS
from serving.engine.schedule.policy import Policy
from serving.engine.schedule.rounds import Rounds
from serving.engine.stats import model_stats
from serving.protocol import Listener
from zoo.contract import Family, Prompt
from zoo.request import Request, RequestError

__all__ = ["Audio", "Engine", "Event", "Failed", "Finished", "Full", "QueuedRequest", "Spoken", "Text"]

STOPPED = "the engine stopped while it worked on this request"
STALLED = "the client has not taken what was spoken for {:g} s"
INTERNAL = "an error in the engine; its log says more"
CODECS = ("float32", "tf32")

log = structlog.get_logger()


class Engine:
    """Families by name, or just one, each with `max_slots` slots and `max_waiting` requests without one, and
    one arena for them all.

    max_ttfa_s: a request that would be heard later is refused at once, and, unless the policy is throughput,
    only as many streams speak as can be made in real time; None: all are accepted. saved_bytes: of the host,
    for paused streams' pages; None: three times kv_bytes, or a quarter of the host's memory; 0: a request
    gets all pages that it can ever need, and no stream is paused. max_unread_s: audio that a metered listener
    may leave; then it is paused by backpressure, and after max_stall_s its request fails.
    max_reference_bytes: of the recordings of all requests whose prompts are not made yet; one request may
    have more. kv_bytes None: for each model room for 1,024 positions a slot, and for one request of the
    model's longest. codec: in which precision a GPU renders, "tf32" or "float32". after_turn: called on the
    engine's thread when all audio of an iteration was delivered, or some of it while more is made. Raises
    ValueError for settings that leave no room.
    """

    after_turn: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        families: Family[Any] | Mapping[str, Family[Any]],
        *,
        max_slots: int = 8,
        kv_bytes: int | None = None,
        policy: str = "streaming",
        max_waiting: int = 256,
        max_reference_bytes: int = 256 << 20,
        max_ttfa_s: float | None = None,
        saved_bytes: int | None = None,
        max_unread_s: float = math.inf,
        max_stall_s: float = math.inf,
        compile: bool = True,
        report_lag: int | None = None,
        is_deterministic: bool = False,
        codec: str = "float32",
        clock: Callable[[], float] = time.monotonic,
        make_runner: Callable[..., Any] = Runner,
    ):
        named = {families.spec.family: families} if isinstance(families, Family) else dict(families)
        check_settings(named, codec, max_slots)
        if kv_bytes is None:
            kv_bytes = sum(usual_kv_bytes(family, max_slots) for family in named.values())
        self.clock = clock
        self.max_stall_s = max_stall_s
        self.arena = Arena(list(named.values()), kv_bytes)
        self.pages = Pages(self.arena.num_pages, self.arena.num_scratch)
        saved_bytes = usual_saved_bytes(kv_bytes) if saved_bytes is None else saved_bytes
        self.paging = Paging(lambda: self.models.values(), self.pages, saved_bytes // self.arena.page_bytes)
        is_gpu = self.arena.device.type == "cuda"
        settings = WorkerSettings(
            num_slots=max_slots,
            policy=Policy.named(policy),
            compile=compile,
            report_lag=int(is_gpu) if report_lag is None else report_lag,
            is_timed=max_ttfa_s is not None and Policy.named(policy).serves_listeners,
            grows=self.paging.max_saved > 0,
            max_unread_s=max_unread_s,
            is_reproducible=is_deterministic,
            codec=codec,
            make_runner=make_runner,
        )
        self.models = {
            name: ModelWorker(
                family,
                self.arena,
                self.pages,
                settings,
                clock,
                after_delivery=lambda: self.after_turn(),
                between=lambda: self.rounds.between(),
            )
            for name, family in named.items()
        }
        # A launch returns when it is done.
        is_synchronous = self.arena.device.type == "cpu" and not settings.report_lag
        self.rounds = Rounds(self.models.values(), clock, is_synchronous, self._take_in)
        if is_gpu:
            # Weights and states were made on another stream than the engine's.
            torch.cuda.synchronize(self.arena.device)
        self.inbox = Inbox()
        self.limits = Limits(max_waiting, max_reference_bytes, max_ttfa_s)
        self.intake = Intake(self.models, self.arena, self.pages, self.inbox, self.limits, clock)
        self.composer = Composer(self.inbox, self.arena.streams.prompts, self.intake.check_room)
        self.iterations = IterationCounters()
        self._arrivals = itertools.count()
        self._warm_graphs: int | None = None  # that the process had compiled by then

    # any thread

    def warm(
        self,
        progress: Callable[[float, str], None],
        cached: Callable[[Family[Any]], AbstractContextManager[Entry | None]] = lambda family: nullcontext(),
    ) -> None:
        """Compile and record everything, one model after the other; call before `run`. cached: opens the
        place where a model's compiled code is kept."""
        for i, (name, model) in enumerate(self.models.items()):
            whose = f"{name}: " if len(self.models) > 1 else ""

            def tell(fraction: float, stage: str, i: int = i, whose: str = whose) -> None:
                progress((i + fraction) / len(self.models), whose + stage)

            with cached(model.family) if model.runner.is_compiled else nullcontext() as entry:
                warmup.warm(model.runner, tell, entry)
        self._warm_graphs = counts().graphs

    def speak(
        self,
        request_id: str,
        request: Request,
        deliver: Callable[[Event], None],
        model: str | None = None,
        listener: Listener = Listener(),  # noqa: B008, it is frozen
    ) -> None:
        """`accept` and `prepare` in one. Raises RequestError, Full."""
        text_bytes = len(request.text.encode())
        queued = self.accept(request_id, deliver, model, listener, text_bytes=text_bytes)
        self.prepare(queued, lambda: request)

    def accept(
        self,
        request_id: str,
        deliver: Callable[[Event], None],
        model: str | None = None,
        listener: Listener = Listener(),  # noqa: B008, it is frozen
        text_bytes: int = 0,
        reference_bytes: int = 0,
    ) -> QueuedRequest:
        """Queue a request for a model, which need not be named if there is but one; `prepare` is to follow,
        or `cancel`.

        `deliver` is called on the engine's thread. text_bytes: of the text, in UTF-8; reference_bytes: of its
        recordings. Raises RequestError, Full.
        """
        return self.intake.accept(request_id, deliver, model, listener, text_bytes, reference_bytes)

    def prepare(self, queued: QueuedRequest, request: Callable[[], Request]) -> None:
        """Build the prompt of an accepted request, unless its client has left. Raises RequestError."""
        self.intake.prepare(queued, request)

    def family(self, model: str | None) -> Family[Any]:
        """Raises RequestError."""
        return self.intake.worker(model).family

    def feed(self, request_id: str, tokens: Sequence[int], is_last: bool = False) -> None:
        """Give an open request more text, as the model's tokens. Unknown and ended requests are no error."""
        self.inbox.feed(request_id, tokens, is_last)

    def consume(self, request_id: str, frames: int) -> None:
        """Record that a client consumed so many of the delivered frames. Unknown and ended requests are no
        error."""
        self.inbox.consume(request_id, frames)

    def cancel(self, request_id: str) -> None:
        """Let go of a request at the next iteration, wherever it is. Unknown and ended ones are no error."""
        self.intake.cancel(request_id)

    def stop(self) -> None:
        """End `run`. Requests under way fail, since their clients did not end them."""
        self.inbox.stop()

    @property
    def num_requests(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.intake.num_requests

    def stats(self) -> dict[str, Any]:
        """Return the figures of `protocol.Stats`: of the arena, and of each model by name."""
        with self.inbox.lock:
            models = {name: model_stats(model) for name, model in self.models.items()}
            reference_bytes = self.intake.reference_bytes
        return {
            "pages": self.pages.num_pages,
            "pages_free": self.pages.free,
            "pages_shared": self.pages.shared,
            "pages_evicted": self.pages.evicted,
            "compiles_after_warmup": 0 if self._warm_graphs is None else counts().graphs - self._warm_graphs,
            "pauses": self.paging.num_pauses,
            "turns": self.iterations.num,
            "turn_s": self.iterations.took_s,
            "turn_times": self.iterations.times,
            "resident_bytes": resident_bytes(),
            "reference_bytes": reference_bytes,
            "models": models,
        }

    # the engine's thread

    def run(self) -> None:
        """Iterate until `stop`. If an iteration raises, every request fails, and the error goes to the
        caller."""
        try:
            while not self.inbox.is_stopping:
                is_busy = self.turn()
                self.after_turn()
                if not is_busy:
                    self.inbox.sleep(self._stalls_in_s())
            self._end_all(Failed(STOPPED, code="engine_stopped"))
        except BaseException as error:
            self._end_all(Failed(f"the engine stopped: {error}"))
            raise
        finally:
            self.after_turn()
            self.composer.close()

    def turn(self) -> bool:
        """Give every model that has work one round. Return whether there is more to do before any news."""
        began_s = self.clock()
        self._take_news()
        self._drop_stalled()
        self._admit()
        self.paging.deal()
        models = self.rounds.run()
        finished = [job for model in models for job in model.finished() if not job.is_composing]
        for job in finished:
            self._finish_pass(job)
        if models:
            self.iterations.add(self.clock() - began_s)
        for model in self.models.values():
            model.record_speakers()
        return bool(finished) or any(not model.is_idle for model in self.models.values())

    def _finish_pass(self, job: Job) -> None:
        """End the answer, or have its next pass made ready; until then its slot is kept. The listener has all
        of this pass."""
        job.model.record_pass(job)
        job.report_pass()
        if job.model.family.spec.shares_turns:
            job.model.publish_turn(job)
        if job.prompt.is_final:
            self._end(job)
        else:
            self.composer.compose(job, job.model.tape(job))

    def _end(self, job: Job) -> None:
        """All of it was spoken."""
        if job.num_frames:
            job.model.forecaster.lengths.record(job.request.text_bytes, job.num_frames)
        self._release(job, job.ending())

    def _take_news(self) -> None:
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
            self._queue_pass(job, prompt)
        for id, tokens, is_last in news.fed:
            self._feed(id, tokens, is_last)
        for id, frames in news.consumed:
            if (consumer := self.intake.known.get(id)) is not None:
                consumer.model.consume(consumer, frames)
        for id in news.cancelled:
            if (cancelled := self.intake.known.get(id)) is not None:
                self._release(cancelled, cancelled.cancelled())

    def _take_in(self) -> bool:
        """Take news between the launches of an iteration. Return whether there was any."""
        if not self.inbox.news:
            return False
        self._take_news()
        self._admit()
        return True

    def _drop_stalled(self) -> None:
        since_s = self.clock() - self.max_stall_s
        for model in self.models.values():
            for job in model.stalled_jobs(since_s):
                self._release(job, Failed(STALLED.format(self.max_stall_s), code="stalled"))

    def _stalls_in_s(self) -> float | None:
        """Return the seconds until the first stalled client is dropped; None if all clients read."""
        rows = [model.scheduler.slots.listener for model in self.models.values()]
        since_s = min(float(row.backpressure_since_s.min()) for row in rows)
        drop_s = since_s + self.max_stall_s - self.clock()
        return max(drop_s, 0.0) + 0.001 if math.isfinite(drop_s) else None

    def _queue_pass(self, job: Job, composed: Future[Prompt | None]) -> None:
        """Queue a next pass before all requests that wait, since its own came before them; or end the answer
        if none follows."""
        if self.intake.known.get(job.id) is not job or composed.cancelled():
            return
        error = composed.exception()
        if error is not None:
            if not isinstance(error, RequestError):
                log.error("unexpected", id=job.id, exc_info=error)
            return self._release(job, Failed(str(error) if isinstance(error, RequestError) else INTERNAL))
        prompt = composed.result()
        if prompt is None:
            return self._end(job)
        job.model.release(job)
        job.next_pass(prompt)
        job.queued_s = self.clock()
        job.model.queue.jobs.appendleft(job)

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
            self._release(job, Failed(str(error)))

    def _admit(self) -> None:
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
            if job.model.admit(job, self.paging.uncommitted):
                head.pages.num_skips += job is not head
                self._is_in(job)
                return True
        return False

    def _is_in(self, job: Job) -> None:
        """The job has a slot."""
        with self.inbox.lock:
            job.model.queue.requests.pop(job.id, None)  # None: of a later pass
        unfed = job.unfed
        job.unfed = []
        for tokens, is_last in unfed:
            self._feed(job.id, tokens, is_last)

    def _release(self, job: Job, last: Event) -> None:
        del self.intake.known[job.id]
        with self.inbox.lock:
            job.model.queue.requests.pop(job.id, None)
        job.model.release(job)
        job.deliver(last)

    def _end_all(self, last: Failed) -> None:
        with self.inbox.lock:
            self.intake.is_over = True
            for model in self.models.values():
                for queued in tuple(model.queue.requests.values()):
                    self.intake.leave(queued)
            news = self.inbox.news
            late: list[Job | QueuedRequest] = [*news.jobs, *news.left]
            news.jobs.clear()
            news.left.clear()
        for job in tuple(self.intake.known.values()):
            self._release(job, last)
        for one in late:
            one.deliver(last)


def check_settings(families: Mapping[str, Family[Any]], codec: str, max_slots: int) -> None:
    """Raises ValueError."""
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r} is no precision; possible: {', '.join(CODECS)}")
    device = next(iter(families.values())).device
    if device.type == "meta":
        raise ValueError("a model on device meta has shapes and no values: it cannot speak")
    if codec == "tf32" and device.type != "cuda":
        raise ValueError(f"codec tf32 is arithmetic of a GPU, and the model is on {device.type}: use float32")
    if max_slots < 1:
        raise ValueError(f"max_slots is {max_slots}; at least 1 is needed")
