"""Which streams get pages and which give theirs up: each rule alone, over streams that only say what the rules ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from serving.engine.job import Job, QueuedRequest
from serving.engine.memory.pages import Pages
from serving.engine.memory.paging import Paging
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.numbers import ADMIT_S, RESUME_AT_RISK_S, RESUME_MARGIN_S
from serving.protocol import Listener

NUM_PAGES = 20


@dataclass
class Facts:
    """Of one stream. lacks: pages that it needs for its next step, or to be resumed."""

    buffered_s: float = 10.0
    may_step: bool = True
    is_done: bool = False
    needs_pages: bool = True
    lacks: int = 0


@dataclass
class Streams:
    """A model whose streams are `facts`, with Pages that are real."""

    pages: Pages = field(default_factory=lambda: Pages(NUM_PAGES + 1))
    running: dict[int, Job] = field(default_factory=dict)
    facts: dict[int, Facts] = field(default_factory=dict)
    max_saved: int = 1000

    def __post_init__(self) -> None:
        models = cast(Sequence[ModelWorker], [self])
        self.paging = Paging(lambda: models, self.pages, self.max_saved, fail=lambda job: None)

    def add(self, num_pages: int, is_flexible: bool = False, **facts: Any) -> Job:
        """Return a stream that holds `num_pages` pages; one without pages is paused."""
        job = self._job(is_flexible, Facts(**facts))
        if num_pages:
            job.pages.lanes = [self.pages.take(num_pages)]
        else:
            self.pause(job)
            self.paging.paused[job] = None
        return job

    def newcomer(self, lacks: int, is_flexible: bool = False) -> Job:
        """Return a request without a slot."""
        job = self._job(is_flexible, Facts(lacks=lacks))
        del self.running[job.slot]
        return job

    def _job(self, is_flexible: bool, facts: Facts) -> Job:
        slot = len(self.facts)
        request = QueuedRequest(f"{slot}", self, lambda event: None, Listener(is_flexible=is_flexible))
        job = Job(request, cast(Any, None), cast(Any, None), arrival=slot, slot=slot)
        self.running[slot] = job
        self.facts[slot] = facts
        return job

    @property
    def paused(self) -> list[Job]:
        return [job for job in self.running.values() if job.pages.saved is not None]

    # as of ModelWorker

    def short_jobs(self) -> list[Job]:
        return [job for job in self.running.values() if job.pages.num_held and self.facts[job.slot].lacks]

    def buffered_s(self, job: Job) -> float:
        return self.facts[job.slot].buffered_s

    def may_step(self, job: Job) -> bool:
        return self.facts[job.slot].may_step

    def is_done(self, slot: int) -> bool:
        return self.facts[slot].is_done

    def needs_pages(self, job: Job, is_flexible_time: bool = False) -> bool:
        return self.facts[job.slot].needs_pages and (is_flexible_time or not job.listener.is_flexible)

    def has_use_for_pages(self, job: Job) -> bool:
        return not self.facts[job.slot].is_done

    def needed_to_resume(self, job: Job) -> list[int]:
        return [self.facts[job.slot].lacks]

    needed_to_admit = needed_to_resume

    def grow(self, job: Job) -> bool:
        fresh = self.pages.take(self.facts[job.slot].lacks)
        job.pages.lanes += [] if fresh is None else [fresh]
        return fresh is not None

    def pause(self, job: Job) -> None:
        for pages in job.pages.lanes:
            self.pages.give_back(pages)
        job.pages.lanes = []
        job.pages.saved = cast(Any, "on the host")

    def resume(self, job: Job) -> bool:
        if not self.grow(job):
            return False
        job.pages.saved = None
        return True


def test_nobody_is_admitted_while_a_paused_stream_has_little_audio():
    streams = Streams()
    streams.add(1, buffered_s=0.0)
    paused = streams.add(0, lacks=30, buffered_s=ADMIT_S)
    assert streams.paging.may_admit
    streams.facts[paused.slot].buffered_s = ADMIT_S - 0.1
    assert not streams.paging.may_admit
    streams.facts[paused.slot].needs_pages = False
    assert streams.paging.may_admit


def test_the_paused_stream_with_the_least_audio_is_resumed_first():
    """Others wait, so that pages collect for it."""
    streams = Streams()
    streams.add(NUM_PAGES - 2)
    later = streams.add(0, lacks=2, buffered_s=4.0)
    first = streams.add(0, lacks=3, buffered_s=2.0)
    streams.paging.deal()
    assert streams.paused == [later, first]
    streams.facts[first.slot].lacks = 2
    streams.paging.deal()
    assert streams.paused == [later]


@pytest.mark.parametrize(
    ("buffered_s", "others_s", "is_resumed"),
    [
        (RESUME_AT_RISK_S, 10.0, False),
        (RESUME_AT_RISK_S - 0.1, RESUME_AT_RISK_S - 0.1 + RESUME_MARGIN_S, False),
        (RESUME_AT_RISK_S - 0.1, RESUME_AT_RISK_S + RESUME_MARGIN_S, True),
    ],
)
def test_a_stream_at_risk_takes_the_pages_of_one_that_is_far_ahead(buffered_s, others_s, is_resumed):
    streams = Streams()
    other = streams.add(NUM_PAGES, buffered_s=others_s)
    paused = streams.add(0, lacks=2, buffered_s=buffered_s)
    streams.paging.deal()
    assert streams.paused == [other if is_resumed else paused]


@pytest.mark.parametrize(
    ("other", "is_resumed"),
    [
        ({"may_step": False}, True),
        ({"is_flexible": True}, True),
        ({"is_done": True, "may_step": False}, False),  # it is about to give its pages back
        ({}, False),
    ],
)
def test_a_paused_stream_takes_the_pages_of_those_that_need_none_now(other, is_resumed):
    streams = Streams()
    streams.add(NUM_PAGES, **other)
    paused = streams.add(0, lacks=2)
    streams.paging.deal()
    assert (paused not in streams.paused) == is_resumed


def test_flexible_streams_give_way_first_then_those_without_a_step_then_the_one_furthest_ahead():
    streams = Streams()
    jobs = [
        streams.add(5, buffered_s=1.0),
        streams.add(5, buffered_s=9.0),
        streams.add(4, buffered_s=0.0, may_step=False),
        streams.add(4, buffered_s=0.0, is_flexible=True),
    ]
    streams.add(1, is_done=True)
    assert streams.paging._holders() == [jobs[3], jobs[2], jobs[1], jobs[0]]


def test_the_stream_that_grows_may_be_the_one_that_gives_way():
    streams = Streams()
    streams.add(10, buffered_s=1.0)
    ahead = streams.add(10, buffered_s=2.0, lacks=1, needs_pages=False)
    streams.paging.deal()
    assert streams.paused == [ahead] and streams.paging.num_pauses == 1


def test_as_few_streams_as_possible_give_way_to_a_newcomer():
    streams = Streams()
    for _ in range(4):
        streams.add(5, may_step=False, needs_pages=False)
    assert streams.paging.make_room(streams.newcomer(lacks=6))
    assert len(streams.paused) == 2 and streams.pages.free == 10


def test_no_stream_gives_way_if_the_pages_of_all_are_too_few():
    streams = Streams()
    streams.add(16)
    streams.add(3, may_step=False)
    newcomer = streams.newcomer(lacks=5)
    assert not streams.paging.make_room(newcomer) and not streams.paused
    streams.facts[newcomer.slot].lacks = 4
    assert streams.paging.make_room(newcomer) and len(streams.paused) == 1


def test_no_stream_gives_way_to_a_flexible_newcomer():
    streams = Streams()
    streams.add(18, may_step=False)
    assert not streams.paging.make_room(streams.newcomer(lacks=5, is_flexible=True)) and not streams.paused


def test_no_stream_gives_way_if_all_pages_are_reserved():
    """A next pass waits for pages that others give back."""
    streams = Streams(max_saved=0)
    other = streams.add(18, may_step=False)
    paused = streams.add(0, lacks=3, buffered_s=0.0)
    streams.paging.deal()
    assert streams.paused == [paused] and not streams.paging.make_room(streams.newcomer(lacks=3))
    streams.facts[paused.slot].lacks = 2
    streams.paging.deal()
    assert not streams.paused and other.pages.num_held == 18


def test_an_engine_rests_only_if_no_paused_stream_could_use_pages():
    streams = Streams()
    flexible = streams.add(0, is_flexible=True)
    assert not streams.paging.is_idle
    streams.facts[flexible.slot] = replace(streams.facts[flexible.slot], needs_pages=False)
    assert streams.paging.is_idle
    streams.facts[flexible.slot] = Facts(is_done=True)
    assert streams.paging.is_idle
