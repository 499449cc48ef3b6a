"""The loop: in each iteration every model with work has one round.

    accept() ─> prepare() ─> inbox ─> the model's queue ─> admit, launch, collect late, render, deliver
    (model_worker.py)
       any thread (intake.py)         the engine's thread, one iteration after another (lifecycle.py)

Requests come and go through an inbox, so the loop owns everything else and needs no locks. A launch's report
is read after the next launch is in flight (`report_lag`), so the device never waits for the host, and samples
when they are there. On a CPU, where a launch returns when it is done, both are read at once.

All models live on one arena of pages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from compile_cache.artifacts import Entry
from compile_cache.counts import counts
from serving.engine.composer import Composer
from serving.engine.device import warmup
from serving.engine.device.arena import Arena, check_there_is
from serving.engine.device.runner import CODECS, Runner
from serving.engine.events import OUT_OF_MEMORY, Audio, Event, Failed, Finished, Spoken, Text
from serving.engine.inbox import Inbox
from serving.engine.intake import Full, Intake, Limits
from serving.engine.job import QueuedRequest
from serving.engine.lifecycle import Lifecycle
from serving.engine.memory.memory_plan import resident_bytes, usual_kv_bytes, usual_swap_bytes
from serving.engine.memory.pages import Pages
from serving.engine.memory.paging import Paging
from serving.engine.model_worker import ModelWorker, WorkerSettings
from serving.engine.schedule.policy import Policy
from serving.engine.schedule.rounds import Rounds
from serving.engine.stats import model_stats
from serving.histogram import Histogram
from serving.protocol import Listener
from zoo.contract import Family
from zoo.request import Request

__all__ = ["Audio", "Engine", "Event", "Failed", "Finished", "Full", "QueuedRequest", "Spoken", "Text"]

STOPPED = "the engine stopped while it worked on this request"


class Engine:
    """Families by name, or just one, each with `max_slots` slots and `max_waiting` requests without one, and
    one arena for them all.

    max_ttfa_s: requests that would be heard later are refused at once. Unless the policy is throughput, only
    as many streams run as can be generated in real time. None turns both off. swap_memory_bytes: of the
    host, for paused streams' pages; None: five times kv_memory_bytes, or a quarter of the host's memory; 0:
    a request gets all pages that it can ever need, and no stream is paused. max_unread_s: audio that a
    metered listener may leave; then it is paused by backpressure, and after max_stall_s its request fails.
    reference_memory_bytes: of the recordings of all requests whose prompts are not made yet; one request may
    have more. kv_memory_bytes None: for each model room for 1,024 positions a slot, and for one request of
    the model's longest. codec: in which precision a GPU renders, one of `CODECS`. attention: of a GPU's
    steps, "auto", "triton" or "flashinfer". after_turn: called on the engine's thread when all audio of an
    iteration was delivered, or some of it while more is made.
    Raises ValueError for settings that leave no room.
    """

    after_turn: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        families: Family[Any] | Mapping[str, Family[Any]],
        *,
        max_slots: int = 8,
        kv_memory_bytes: int | None = None,
        policy: str = "streaming",
        max_waiting: int = 256,
        reference_memory_bytes: int = 256 << 20,
        max_ttfa_s: float | None = None,
        swap_memory_bytes: int | None = None,
        max_unread_s: float = math.inf,
        max_stall_s: float = math.inf,
        compile: bool = True,
        report_lag: int | None = None,
        is_deterministic: bool = False,
        codec: str = "float32",
        attention: str = "auto",
        clock: Callable[[], float] = time.monotonic,
        make_runner: Callable[..., Any] = Runner,
    ):
        named = {families.spec.family: families} if isinstance(families, Family) else dict(families)
        check_settings(named, codec, max_slots)
        if kv_memory_bytes is None:
            kv_memory_bytes = sum(usual_kv_bytes(family, max_slots) for family in named.values())
        self.clock = clock
        self.arena = Arena(list(named.values()), kv_memory_bytes)
        self.pages = Pages(self.arena.num_pages, self.arena.num_scratch)
        if swap_memory_bytes is None:
            swap_memory_bytes = usual_swap_bytes(kv_memory_bytes)
        check_there_is(swap_memory_bytes, torch.device("cpu"), "swap memory")
        self.paging = Paging(
            lambda: self.models.values(),
            self.pages,
            swap_memory_bytes // self.arena.page_bytes,
            fail=lambda job: self.lifecycle.fail(job, OUT_OF_MEMORY),
        )
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
            attention=attention,
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
        if is_gpu:
            # Weights and states were made on another stream than the engine's.
            torch.cuda.synchronize(self.arena.device)
        self.inbox = Inbox()
        self.limits = Limits(max_waiting, reference_memory_bytes, max_ttfa_s)
        self.intake = Intake(self.models, self.arena, self.pages, self.inbox, self.limits, clock)
        self.composer = Composer(self.inbox, self.arena.streams.prompts, self.intake.check_room)
        self.lifecycle = Lifecycle(self.models, self.paging, self.intake, self.composer, max_stall_s, clock)
        # A launch returns when it is done.
        is_synchronous = self.arena.device.type == "cpu" and not settings.report_lag
        self.rounds = Rounds(self.models.values(), clock, is_synchronous, self.lifecycle.take_in)
        self.iteration_times = Histogram()
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
            model.seed(warmup.LaunchTimes(model.runner))
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
            "turn_times": self.iteration_times,
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
                    self.inbox.sleep(self.lifecycle.looks_in_s())
            self.lifecycle.end_all(Failed(STOPPED, code="engine_stopped"))
        except BaseException as error:
            self.lifecycle.end_all(Failed(f"the engine stopped: {error}"))
            raise
        finally:
            self.after_turn()
            self.composer.close()

    def turn(self) -> bool:
        """Give every model that has work one round. Return whether there is more to do before any news."""
        began_s = self.clock()
        self.lifecycle.take_news()
        self.lifecycle.drop_stalled()
        self.lifecycle.admit()
        self.paging.deal()
        models = self.rounds.run()
        self.lifecycle.end_failing()
        finished = [job for model in models for job in model.finished() if not job.is_composing]
        for job in finished:
            self.lifecycle.finish_pass(job)
        if models:
            self.iteration_times.add(self.clock() - began_s)
        for model in self.models.values():
            model.expectations.refresh()
        self.lifecycle.refuse_late()
        are_idle = self.paging.is_idle and all(model.is_idle for model in self.models.values())
        return bool(finished) or not are_idle


def check_settings(families: Mapping[str, Family[Any]], codec: str, max_slots: int) -> None:
    """Raises ValueError."""
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r} is no precision; possible: {', '.join(CODECS)}")
    device = next(iter(families.values())).device
    if device.type == "meta":
        raise ValueError("a model on device meta has shapes and no values: it cannot speak")
    if codec != "float32" and device.type != "cuda":
        raise ValueError(f"codec {codec} is for GPUs, and the model is on {device.type}: use float32")
    if max_slots < 1:
        raise ValueError(f"max_slots is {max_slots}; at least 1 is needed")
