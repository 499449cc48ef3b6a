"""The loop: turn after turn, every model with work has one round.

    accept() ─> prepare() ─> inbox ─> the model's queue ─> admit, launch, collect late, render, deliver (model_worker.py)
           any thread                 engine's thread, one turn after another

A request is counted from `accept` on, before its prompt is made: one bound holds for all who have no slot yet, and who
leaves is gone at once, wherever it was. Requests come and go through an inbox, so the loop owns everything else and
needs no locks. A launch's report
is read after the next launch is under way (`report_lag`), so the device never waits for the host, and
samples when they are there. On a CPU, where a launch returns when it is done, both are read at once.

All models live on one arena of pages. Who gets in, in what order:
- Slots are each model's own: a model whose slots are all taken holds up nobody but those who wait for it.
- Pages are everyone's: of the requests whose model has a free slot the one that came first goes first. If it lacks pages, smaller ones of
  whatever model pass it, a bounded number of times. Those who hold pages end, so it gets them: nobody is overtaken for ever.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
import torch
from torch import Tensor

from compile_cache import threads
from compile_cache.artifacts import Entry
from compile_cache.counts import counts
from serving.engine import warmup
from serving.engine.job import Audio, Event, Failed, Finished, Job, Place, Spoken, Text
from serving.engine.memory_plan import resident_bytes, usual_kv_bytes, usual_saved_bytes
from serving.engine.model_worker import ModelWorker
from serving.engine.pages import Pages
from serving.engine.paging import Paging
from serving.engine.policy import Policy
from serving.engine.rounds import Rounds
from serving.engine.runner import Arena, Runner
from serving.histogram import Histogram
from zoo.contract import Family, Prompt, Request, RequestError, following

__all__ = ["Audio", "Engine", "Event", "Failed", "Finished", "Full", "Place", "Spoken", "Text"]


STOPPED = "the engine stopped while it worked on this request"
CODECS = ("float32", "tf32")
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
MAX_PASSED = 8  # smaller requests, by one that lacks pages
STALLED = "the client has not taken what was spoken for {:g} s"
INTERNAL = "an error in the engine; its log says more"

log = structlog.get_logger()


class Full(Exception):
    """No room to wait: try again in `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float):
        super().__init__(f"{why}; try again in {math.ceil(retry_after_s)} s")
        self.retry_after_s = retry_after_s


class Engine:
    """Families by name, or just one, each with `max_slots` slots and `max_waiting` places for those who have
    none yet, and one arena for them all.

    max_ttfa_s: who would hear nothing for longer is refused at once, and, unless the policy is throughput, only so many
    speak as are made faster than they are heard; None: all are taken.
    saved_bytes: of the host, for what paused streams' pages held; None: three times kv_bytes, or a quarter of the host's
    memory; 0: a request gets all pages that it can ever need, and nobody is paused.
    max_unread_s: audio that a listener who says what it takes may leave; then it is held back, and after max_stall_s its
    request fails.
    max_reference_bytes: of the recordings of all requests whose prompts are not made yet; one request may have more.
    kv_bytes None: for each room for 1,024 positions a slot, and for one request of the model's longest. codec: in
    which precision a GPU renders, "tf32" or "float32".
    Raises ValueError for settings that leave no room.
    after_turn: called on the engine's thread when all of a turn was delivered, or some of it while more is made.
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
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r} is no precision; possible: {', '.join(CODECS)}")
        device = next(iter(named.values())).device
        if device.type == "meta":
            raise ValueError("a model on device meta has shapes and no values: it cannot speak")
        if codec == "tf32" and device.type != "cuda":
            raise ValueError(
                f"codec tf32 is arithmetic of a GPU, and the model is on {device.type}: use float32"
            )
        if max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; at least 1 is needed")
        if kv_bytes is None:
            kv_bytes = sum(usual_kv_bytes(family, max_slots) for family in named.values())
        self.arena = Arena(list(named.values()), kv_bytes)
        self.pages = Pages(self.arena.num_pages, self.arena.num_scratch)
        saved_bytes = usual_saved_bytes(kv_bytes) if saved_bytes is None else saved_bytes
        self.paging = Paging(lambda: self.models.values(), self.pages, saved_bytes // self.arena.page_bytes)
        grows = self.paging.max_saved > 0
        report_lag = report_lag if report_lag is not None else int(self.arena.device.type == "cuda")
        self.models = {
            name: ModelWorker(
                family,
                self.arena,
                self.pages,
                num_slots=max_slots,
                policy=policy,
                compile=compile,
                report_lag=report_lag,
                clock=clock,
                make_runner=make_runner,
                is_timed=max_ttfa_s is not None and Policy.named(policy).at_risk_s is not None,
                grows=grows,
                max_unread_s=max_unread_s,
                is_deterministic=is_deterministic,
                codec=codec,
                after_delivery=lambda: self.after_turn(),
                between=lambda: self.rounds.between(),
            )
            for name, family in named.items()
        }
        is_synchronous = (
            self.arena.device.type == "cpu" and not report_lag
        )  # a launch returns when it is done
        self.rounds = Rounds(self.models.values(), clock, is_synchronous, self._take_in)
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(
                self.arena.device
            )  # weights and states were made on a stream of none of ours
        self.max_waiting, self.max_reference_bytes, self.clock = max_waiting, max_reference_bytes, clock
        self.max_ttfa_s, self.max_stall_s = max_ttfa_s, max_stall_s

        self._wake = threading.Condition()
        self._reference_bytes = 0  # of recordings that are being encoded, or wait for it
        self._left: list[Place] = []  # of those who left before their prompt was made
        self._inbox: deque[Job] = deque()
        self._cancelled: set[str] = set()
        self._heard: deque[tuple[str, int]] = deque()
        self._fed: deque[tuple[str, list[int], bool]] = deque()
        self._composed: deque[tuple[Job, Future[Prompt | None]]] = deque()  # next passes
        self._composer = ThreadPoolExecutor(1, "compose", threads.use_one_thread)
        self._is_stopping = False
        self.num_turns, self.turn_s = 0, 0.0
        self.turn_times = Histogram()
        self._is_over = False
        self._arrivals = itertools.count()
        self._known: dict[str, Job] = {}  # everything taken and not yet ended
        self._warm_graphs: int | None = None  # what the process had compiled by then

    # any thread

    def warm(
        self,
        progress: Callable[[float, str], None],
        cached: Callable[[Family[Any]], AbstractContextManager[Entry | None]] = lambda family: nullcontext(),
    ) -> None:
        """Compile and record everything, one model after the other; call before `run`. cached: where a model's compiled
        code is kept, and found."""
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
        is_pinned: bool = False,
    ) -> None:
        """`accept` and `prepare` in one. Raises RequestError, Full."""
        place = self.accept(request_id, deliver, model, is_pinned, len(request.text.encode()))
        self.prepare(place, lambda: request)

    def accept(
        self,
        request_id: str,
        deliver: Callable[[Event], None],
        model: str | None = None,
        is_pinned: bool = False,
        text_bytes: int = 0,
        reference_bytes: int = 0,
        is_metered: bool = False,
        is_flex: bool = False,
        speed: float = 1.0,
        is_timed: bool = False,
    ) -> Place:
        """A place in the line of a model, which need not be named where there is but one; `prepare` is to follow, or
        `cancel`. `deliver` is called on the engine's thread.
        is_pinned: its windows follow from frame numbers alone, so equal requests give equal bytes. text_bytes: of the
        text, in UTF-8; reference_bytes: of its recordings. is_metered: its listener says what it takes (`heard`).
        is_flex: it is served while nobody else waits for first audio or is at risk, whenever that is. speed: at which its
        listener plays; deadlines are nearer where that is fast. is_timed: it is told which samples each piece of the text took.
        Raises RequestError, Full."""
        worker = self._worker(model)
        with self._wake:
            try:
                predicted_s = self._refuse_if_full(request_id, worker, text_bytes, reference_bytes, is_flex)
            except Full:
                worker.num_refused += 1
                raise
            place = Place(
                request_id,
                worker,
                deliver,
                is_pinned,
                text_bytes,
                reference_bytes,
                self.clock(),
                predicted_s,
                is_metered,
                is_flex,
                speed,
                is_timed,
            )
            worker.line[request_id] = place
            self._reference_bytes += reference_bytes
        return place

    def prepare(self, place: Place, request: Callable[[], Request]) -> None:
        """Make the prompt of an accepted request, which then waits for a slot; nothing is made for one that has
        left. Raises RequestError, and then its place is given back."""
        with self._wake:
            if place.has_left:
                return
            place.is_preparing = True
        job, began_s = None, self.clock()
        try:
            passes = place.model.family.passes(request())
            with self.arena.streams.prompts.here():
                prompt = next(passes)
            self._check_room(place.model, prompt)
            job = Job.of(place, prompt, passes, self.arena.streams.prompts.mark())
        finally:
            with self._wake:
                self._reference_bytes -= place.reference_bytes
                if job is None and not place.has_left:
                    del place.model.line[place.id]
                elif job is not None and not place.has_left:
                    place.is_made = True
                    tokens = sum(len(lane.inputs) for lane in job.prompt.lanes)
                    took_s = self.clock() - began_s
                    place.model.forecaster.record_prompt(tokens, took_s, place.reference_bytes > 0)
                    self._inbox.append(job)
                    self._wake.notify()

    def family(self, model: str | None) -> Family[Any]:
        """Raises RequestError."""
        return self._worker(model).family

    def feed(self, request_id: str, tokens: Sequence[int], is_last: bool = False) -> None:
        """More text, as the model's tokens, for a request that is open. Unknown and ended requests are no
        error."""
        with self._wake:
            self._fed.append((request_id, list(tokens), is_last))
            self._wake.notify()

    def heard(self, request_id: str, frames: int) -> None:
        """A listener took so many frames of what was delivered. Unknown and ended requests are no error."""
        with self._wake:
            self._heard.append((request_id, frames))
            self._wake.notify()

    def _check_room(self, worker: ModelWorker, prompt: Prompt) -> None:
        """Raises RequestError for a pass that can never have its positions or its pages."""
        prompt.check_room(worker.family.spec)
        needed, there = worker.num_pages(prompt), self.pages.num_pages
        if needed > there:
            positions = sum(len(lane.inputs) for lane in prompt.lanes)
            takes = f"{positions} prompt positions and {prompt.max_frames} frames need {needed} pages of KV memory"
            instead = "ask for fewer frames, or serve with more KV memory"
            raise RequestError("max_frames", f"{takes}; this server has {there}: {instead}")

    def cancel(self, request_id: str) -> None:
        """Let go of a request at the next turn, wherever it is. Unknown and ended ones are no error."""
        with self._wake:
            places = [model.line.get(request_id) for model in self.models.values()]
            for place in places:
                if place is not None:
                    self._leave(place)
            self._cancelled.add(request_id)
            self._wake.notify()

    def _leave(self, place: Place) -> None:
        """Its place is free at once. A prompt is not begun for it any more, and if one is being made, it is not
        wanted."""
        del place.model.line[place.id]
        place.has_left = True
        if not place.is_made:
            self._left.append(place)
        if not place.is_preparing:
            self._reference_bytes -= place.reference_bytes

    def stop(self) -> None:
        """End `run`; requests under way fail: nobody asked for their end."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def stats(self) -> dict[str, Any]:
        """Of the arena, and of each model by name."""
        with self._wake:
            models = {name: model.stats() for name, model in self.models.items()}
            reference_bytes = self._reference_bytes
        return {
            "pages": self.pages.num_pages,
            "pages_free": self.pages.free,
            "pages_shared": self.pages.shared,
            "pages_evicted": self.pages.evicted,
            "compiles_after_warmup": 0 if self._warm_graphs is None else counts().graphs - self._warm_graphs,
            "pauses": self.paging.num_pauses,
            "turns": self.num_turns,
            "turn_s": self.turn_s,
            "turn_times": self.turn_times,
            "resident_bytes": resident_bytes(),
            "reference_bytes": reference_bytes,
            "models": models,
        }

    # the engine's thread

    def run(self) -> None:
        """Turn after turn until `stop`. If a turn raises, every request fails, and the error goes on to the
        caller."""
        try:
            while not self._is_stopping:
                is_busy = self.turn()
                self.after_turn()
                if not is_busy:
                    with self._wake:
                        self._wake.wait_for(lambda: self._has_news or self._is_stopping, self._stalls_in_s())
            self._end_all(Failed(STOPPED, code="engine_stopped"))
        except BaseException as error:
            self._end_all(Failed(f"the engine stopped: {error}"))
            raise
        finally:
            self.after_turn()
            self._composer.shutdown(wait=False, cancel_futures=True)

    def turn(self) -> bool:
        """One round of every model that has work. -> whether there is more to do before any news."""
        began_s = self.clock()
        self._take_news()
        self._drop_stalled()
        self._admit()
        self.paging.turn()
        models = self.rounds.run()
        finished = [job for model in models for job in model.finished() if not job.is_composing]
        for job in finished:
            self._finish_pass(job)
        if models:
            self.num_turns += 1
            took_s = self.clock() - began_s
            self.turn_s += took_s
            self.turn_times.add(took_s)
        for model in self.models.values():
            model.record_speakers()
        return bool(finished) or any(not model.is_idle for model in self.models.values())

    @property
    def num_requests(self) -> int:
        """Taken and not yet ended."""
        with self._wake:
            unmade = sum(not place.is_made for model in self.models.values() for place in model.line.values())
            return unmade + len(self._left) + len(self._inbox) + len(self._known)

    @property
    def _has_news(self) -> bool:
        return bool(
            self._left or self._inbox or self._cancelled or self._fed or self._heard or self._composed
        )

    def _finish_pass(self, job: Job) -> None:
        """The listener has all of it: the answer ends, or its next pass is made ready beside the loop, and
        until then its slot is kept."""
        job.model.record_pass(job)
        job.tell_spoken()
        if job.model.family.spec.shares_turns:
            job.model.publish_turn(job)
        if job.prompt.is_final:
            return self._end(job)
        frames = job.model.tape(job)
        job.is_composing = True
        future = self._composer.submit(self._next_prompt, job, frames)
        future.add_done_callback(lambda future: self._compose_done(job, future))

    def _end(self, job: Job) -> None:
        """All of it was spoken."""
        if job.num_frames:
            job.model.forecaster.lengths.record(job.text_bytes, job.num_frames)
        self._release(job, job.spoken())

    def _next_prompt(self, job: Job, frames: Tensor) -> Prompt | None:
        """Beside the loop. Raises RequestError."""
        with self.arena.streams.prompts.here():
            prompt = following(job.passes, frames)
        if prompt is None:
            return None
        self._check_room(job.model, prompt)
        job.is_made = self.arena.streams.prompts.mark()
        return prompt

    def _compose_done(self, job: Job, future: Future[Prompt | None]) -> None:
        with self._wake:
            self._composed.append((job, future))
            self._wake.notify()

    def _worker(self, name: str | None) -> ModelWorker:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise RequestError(
                "model", f"model {name!r} is not served here; there is: {', '.join(self.models)}"
            )
        return self.models[name]

    def _refuse_if_full(
        self, request_id: str, model: ModelWorker, text_bytes: int, reference_bytes: int, is_flex: bool
    ) -> float | None:
        """-> when its first audio is to be expected, as far as that is known; of a flexible request it never is. Raises
        Full, ValueError."""
        if self._is_over:
            raise Full("the engine has stopped", retry_after_s=5.0)
        if request_id in self._known or any(request_id in each.line for each in self.models.values()):
            raise ValueError(
                f"request {request_id!r} is under way already; every request needs an id of its own"
            )
        predicted_s = model.predicted_first_audio_s(text_bytes, reference_bytes > 0)
        retry_after_s = min(max(predicted_s or 0.0, MIN_RETRY_S), MAX_RETRY_S)
        waiting = sum(place.is_flex == is_flex for place in model.line.values())
        if waiting >= self.max_waiting:
            raise Full(f"{waiting} requests are waiting already", retry_after_s)
        is_first = not reference_bytes or not self._reference_bytes
        if not is_first and self._reference_bytes + reference_bytes > self.max_reference_bytes:
            held = f"recordings of {self._reference_bytes >> 20} MiB wait to be encoded already"
            raise Full(f"{held}, and {self.max_reference_bytes >> 20} MiB are the most", retry_after_s)
        if is_flex:
            return None
        if predicted_s is not None and self.max_ttfa_s is not None and predicted_s > self.max_ttfa_s:
            wait_s = math.ceil(predicted_s)
            late = f"first audio is expected in {wait_s} s, later than the limit of {self.max_ttfa_s:g} s"
            raise Full(late, retry_after_s)
        return predicted_s

    def _take_news(self) -> None:
        with self._wake:
            arrived, cancelled, left = list(self._inbox), set(self._cancelled), list(self._left)
            fed, heard, composed = list(self._fed), list(self._heard), list(self._composed)
            for news in (self._inbox, self._cancelled, self._left, self._fed, self._heard, self._composed):
                news.clear()
        for place in left:
            place.model.num_left_early += 1
            place.deliver(Finished("cancelled", 0, {}))
        for job in arrived:
            job.arrival = next(self._arrivals)
            self._known[job.id] = job
            job.queued_s = self.clock()
            job.model.waiting.append(job)
        for job, future in composed:
            self._queue_pass(job, future)
        for id, tokens, is_last in fed:
            self._feed(id, tokens, is_last)
        for id, frames in heard:
            if (listener := self._known.get(id)) is not None:
                listener.model.read(listener, frames)
        for id in cancelled & self._known.keys():
            job = self._known[id]
            self._release(job, job.cancelled())

    def _take_in(self) -> bool:
        """Between the launches of a turn -> whether there was any news."""
        if not self._has_news:
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
        """Until the first of those who are held back is dropped; None: nobody is."""
        since_s = min(float(model.scheduler.held_s.min()) for model in self.models.values())
        drop_s = since_s + self.max_stall_s - self.clock()
        return max(drop_s, 0.0) + 0.001 if math.isfinite(drop_s) else None

    def _queue_pass(self, job: Job, future: Future[Prompt | None]) -> None:
        """A next pass is ready: its request came before those that wait. Or none follows."""
        if self._known.get(job.id) is not job or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            if not isinstance(error, RequestError):
                log.error("unexpected", id=job.id, exc_info=error)
            return self._release(job, Failed(str(error) if isinstance(error, RequestError) else INTERNAL))
        prompt = future.result()
        if prompt is None:
            return self._end(job)
        job.model.release(job)
        job.next_pass(prompt)
        job.queued_s = self.clock()
        job.model.waiting.appendleft(job)

    def _feed(self, id: str, tokens: list[int], is_last: bool) -> None:
        job = self._known.get(id)
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
        """First come, first served, of those whose model has a place for them, flexible ones last; smaller ones pass who lacks pages, a
        bounded number of times."""
        while self.paging.may_admit and self._admit_one():
            pass

    def _admit_one(self) -> bool:
        able = [job for model in self.models.values() for job in model.candidates(MAX_PASSED + 1)]
        candidates = sorted(able, key=lambda job: job.rank)
        for job in candidates:
            is_passing = job is not candidates[0]
            if is_passing and candidates[0].num_passed >= MAX_PASSED:
                break
            if job.model.admit(job, self.paging.uncommitted):
                candidates[0].num_passed += is_passing
                self._is_in(job)
                return True
        return False

    def _is_in(self, job: Job) -> None:
        """It has a slot."""
        with self._wake:
            job.model.line.pop(job.id, None)  # None: of a later pass
        unfed, job.unfed = job.unfed, []
        for tokens, is_last in unfed:
            self._feed(job.id, tokens, is_last)

    def _release(self, job: Job, last: Event) -> None:
        del self._known[job.id]
        with self._wake:
            job.model.line.pop(job.id, None)
        job.model.release(job)
        job.deliver(last)

    def _end_all(self, last: Failed) -> None:
        with self._wake:
            self._is_over = True
            for model in self.models.values():
                for place in tuple(model.line.values()):
                    self._leave(place)
            late: list[Job | Place] = [*self._inbox, *self._left]
            for news in (self._inbox, self._left):
                news.clear()
        for job in tuple(self._known.values()):
            self._release(job, last)
        for one in late:
            one.deliver(last)
