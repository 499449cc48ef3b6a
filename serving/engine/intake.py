"""How a request gets in, on any thread: accepted or refused, then its prompt is built.

A request is counted from `accept` on, before its prompt is made. One bound holds for all requests without a
slot, and a request whose client leaves is gone at once, wherever it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serving.engine.device.arena import Arena
from serving.engine.events import Event
from serving.engine.inbox import Inbox
from serving.engine.job import Job, QueuedRequest, Worker
from serving.engine.memory.pages import Pages
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.numbers import LATE_FACTOR, MAX_RETRY_S, MIN_RETRY_S
from serving.engine.wire import NotEncoded
from serving.protocol import Listener
from zoo.contract import Prompt
from zoo.request import Request, RequestError
from zoo.text.stops import Writing


class Full(Exception):
    """The queue is full: try again in `retry_after_s`."""

    def __init__(self, why: str, retry_after_s: float):
        super().__init__(f"{why}; try again in {math.ceil(retry_after_s)} s")
        self.retry_after_s = retry_after_s


def too_late(wait_s: float, max_ttfa_s: float) -> Full:
    why = f"first audio is expected in {math.ceil(wait_s)} s, later than the limit of {max_ttfa_s:g} s"
    return Full(why, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))


@dataclass
class Limits:
    """max_waiting: requests of a model without a slot. reference_memory_bytes: of the recordings of all
    requests whose prompts are not made yet; one request may have more. max_ttfa_s: a request that would be
    heard later is refused."""

    max_waiting: int
    reference_memory_bytes: int
    max_ttfa_s: float | None


class Intake:
    def __init__(
        self,
        models: Mapping[str, ModelWorker],
        arena: Arena,
        pages: Pages,
        inbox: Inbox,
        limits: Limits,
        clock: Callable[[], float],
    ):
        self.models = models
        self.arena = arena
        self.pages = pages
        self.inbox = inbox
        self.limits = limits
        self.clock = clock
        self.reference_bytes = 0  # of recordings that are being encoded, or wait for it
        self.known: dict[str, Job] = {}  # all jobs that were taken in and have not ended
        self.is_over = False

    def worker(self, name: str | None) -> ModelWorker:
        """Return a model, which need not be named if there is but one. Raises RequestError."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None or name not in self.models:
            raise RequestError(
                "model", f"model {name!r} is not served here; there is: {', '.join(self.models)}"
            )
        return self.models[name]

    def accept(
        self,
        id: str,
        deliver: Callable[[Event], None],
        model: str | None,
        listener: Listener,
        text_bytes: int,
        reference_bytes: int,
    ) -> QueuedRequest:
        """Queue a request, or refuse it. Raises RequestError, Full, ValueError."""
        worker = self.worker(model)
        with self.inbox.lock:
            self._check_id(id)
            request = QueuedRequest(id, worker, deliver, listener, text_bytes, reference_bytes, self.clock())
            request.must_encode = reference_bytes > 0
            try:
                request.predicted_s = self._refuse_if_full(request, worker)
            except Full:
                worker.counters.num_refused += 1
                raise
            worker.queue.add(request)
            self.reference_bytes += reference_bytes
        return request

    def _check_id(self, id: str) -> None:
        if self.is_over:
            return
        if id in self.known or any(id in each.queue.requests for each in self.models.values()):
            raise ValueError(f"request {id!r} is under way already; every request needs an id of its own")

    def _refuse_if_full(self, request: QueuedRequest, worker: ModelWorker) -> float | None:
        """Return when its first audio is to be expected, as far as that is known; None for a flexible
        request. Raises Full."""
        if self.is_over:
            raise Full("the engine has stopped", retry_after_s=5.0)
        limits = self.limits
        predicted_s = worker.queue.predicted_first_audio_s(request.text_bytes, request.reference_bytes > 0)
        retry_after_s = min(max(predicted_s or 0.0, MIN_RETRY_S), MAX_RETRY_S)
        is_flexible = request.listener.is_flexible
        waiting = sum(each.listener.is_flexible == is_flexible for each in worker.queue.requests.values())
        if waiting >= limits.max_waiting:
            are = "request is" if waiting == 1 else "requests are"
            raise Full(f"{waiting} {are} waiting already", retry_after_s)
        is_first = not request.reference_bytes or not self.reference_bytes
        if not is_first and self.reference_bytes + request.reference_bytes > limits.reference_memory_bytes:
            held = f"recordings of {self.reference_bytes >> 20} MiB are waiting to be encoded"
            raise Full(f"{held}; the limit is {limits.reference_memory_bytes >> 20} MiB", retry_after_s)
        if is_flexible:
            return None
        is_alone = not worker.queue.requests and not worker.running
        if is_alone:  # a refusal would help no other request, and no request would ever correct the estimate
            return predicted_s
        if predicted_s is not None and limits.max_ttfa_s is not None and predicted_s > limits.max_ttfa_s:
            raise too_late(predicted_s, limits.max_ttfa_s)
        return predicted_s

    def prepare(self, queued: QueuedRequest, request: Callable[[], Request]) -> None:
        """Build the prompt of an accepted request, which then waits for a slot. If its client has left, the
        prompt is never built. Raises RequestError, and then the request leaves the queue, or
        NotEncoded, and then it stays there for another call."""
        with self.inbox.lock:
            if queued.has_left:
                return
            queued.is_preparing = True
        job, comes_again = None, False
        began_s = self.clock()
        try:
            given = request()
            passes = queued.model.family.passes(given)
            with self.arena.streams.prompts.here():
                prompt = next(passes)
            if prompt.is_final:
                passes.close()  # it holds the request, with all its recordings
            self.check_room(queued.model, prompt)
            # Steps behind an encoder that is not done would keep all listeners waiting.
            self.arena.streams.prompts.finish()
            job = Job(queued, prompt, passes, writing=Writing(given.stop))
        except NotEncoded:
            comes_again = True
            raise
        finally:
            with self.inbox.lock:
                if comes_again:
                    queued.must_encode, queued.is_preparing = True, False
                else:
                    self._prepared(queued, job, self.clock() - began_s)

    def _prepared(self, queued: QueuedRequest, job: Job | None, took_s: float) -> None:
        self.reference_bytes -= queued.reference_bytes
        if queued.has_left:
            return
        if job is None:
            queued.model.queue.remove(queued.id)
            return
        queued.is_made = True
        num_tokens = sum(len(lane.inputs) for lane in job.prompt.lanes)
        queued.model.forecaster.record_prompt(num_tokens, took_s, queued.must_encode)
        self.inbox.news.jobs.append(job)
        self.inbox.lock.notify()

    def late(self) -> list[tuple[QueuedRequest, Full]]:
        """Return the requests in line that are now expected to be heard much later than the limit, and their
        refusals. For the engine's thread."""
        if self.limits.max_ttfa_s is None:
            return []
        max_ttfa_s = LATE_FACTOR * self.limits.max_ttfa_s
        now_s = self.clock()
        with self.inbox.lock:
            late = [pair for each in self.models.values() for pair in each.queue.late(now_s, max_ttfa_s)]
        return [(queued, too_late(wait_s, self.limits.max_ttfa_s)) for queued, wait_s in late]

    def check_room(self, worker: Worker, prompt: Prompt) -> None:
        """Raises RequestError for a pass that can never have its positions or its pages."""
        prompt.check_room(worker.family.spec)
        needed = worker.num_pages(prompt)
        there = self.pages.num_pages
        if needed > there:
            positions = sum(len(lane.inputs) for lane in prompt.lanes)
            takes = f"{positions} prompt positions and {prompt.max_frames} frames"
            takes += f" need {needed} pages of KV memory"
            instead = "ask for fewer frames, or serve with more KV memory"
            raise RequestError("max_frames", f"{takes}; this server has {there}: {instead}")

    def cancel(self, id: str) -> None:
        """Let go of a request at the next iteration, wherever it is. Unknown and ended ones are no error."""
        with self.inbox.lock:
            for model in self.models.values():
                if (queued := model.queue.requests.get(id)) is not None:
                    self.leave(queued)
                    if not queued.is_made:
                        self.inbox.news.left.append(queued)
            self.inbox.news.cancelled[id] = None
            self.inbox.lock.notify()

    def leave(self, queued: QueuedRequest) -> None:
        """Take a request out of the queue at once. Its prompt is not begun any more; one that is being built
        is dropped."""
        queued.model.queue.remove(queued.id)
        queued.has_left = True
        if not queued.is_preparing:
            self.reference_bytes -= queued.reference_bytes

    @property
    def num_requests(self) -> int:
        """Requests that were accepted and have not ended."""
        with self.inbox.lock:
            queued = (each for model in self.models.values() for each in model.queue.requests.values())
            unmade = sum(not each.is_made for each in queued)
            return unmade + len(self.inbox.news.left) + len(self.inbox.news.jobs) + len(self.known)
