"""Schedulers for tests, past their prompts, and what a runner would tell them."""

from __future__ import annotations

import numpy as np
import pytest

from serving.engine.device.launches import Chunk
from serving.engine.schedule.policy import Streaming
from serving.engine.schedule.scheduler import Scheduler
from zoo.contract import Window

FRAME_S = 0.08


SIZES = (1, 4, 25)


WINDOW = Window(SIZES)


class Timed(Scheduler):
    """Remembers when each slot's last window was handed out."""

    def __init__(self, num_slots, *args, **settings):
        super().__init__(num_slots, *args, **settings)
        self.handed_s = np.zeros(num_slots)

    def take_due_windows(self, now):
        renders = super().take_due_windows(now)
        for render in renders:
            self.handed_s[render.slots] = render.handed_s
        return renders


STREAMING = Streaming()


def speaking(num_slots=1, policy=STREAMING, sizes=SIZES, slots=None, context=0, **more) -> Timed:
    """A scheduler whose slots (all of them, unless said otherwise) are past their prompts. context: frames
    read on both sides of a window; more: of the Window."""
    scheduler = Timed(num_slots, policy, Window(sizes, lookahead=context, left=context, **more), FRAME_S)
    for slot in range(num_slots) if slots is None else slots:
        scheduler.open(slot, prompt_tokens=1)
        scheduler.record_prefill(Chunk(slot, 0, 1, is_last=True))
    return scheduler


def report(scheduler, ready: dict[int, int], done=()):
    slots = np.array(sorted(ready))
    scheduler.report(slots, np.array([ready[slot] for slot in slots]), np.isin(slots, list(done)))


def due(scheduler, now) -> list[tuple[dict[int, tuple[int, int]], int]]:
    """Launches as ({slot: (start, count)}, frames)."""
    renders = scheduler.take_due_windows(now)
    return [
        ({int(s): (int(a), int(n)) for s, a, n in zip(r.slots, r.start, r.count, strict=True)}, r.frames)
        for r in renders
    ]


def deliver(scheduler, counts: dict[int, int], now):
    slots, frames = np.array(list(counts)), np.array(list(counts.values()))
    handed_s = scheduler.handed_s[slots].min()
    scheduler.record_delivery(slots, frames, frames * FRAME_S, np.zeros(len(frames), bool), handed_s, now)


def playing(ahead_frames: int, sizes=SIZES) -> Scheduler:
    """One slot that at time 0 has delivered `ahead_frames` frames: the listener runs dry at ahead_frames *
    FRAME_S."""
    scheduler = speaking(sizes=sizes)
    report(scheduler, {0: ahead_frames})
    for n in iter(lambda: due(scheduler, 0.0), []):
        deliver(scheduler, {0: n[0][0][0][1]}, 0.0)
    assert scheduler.slots.listener.plays_until_s[0] == pytest.approx(ahead_frames * FRAME_S)
    return scheduler


def heard(ahead: list[int], turn_s: float) -> Timed:
    """Slots that were given so many frames at time 0."""
    scheduler = speaking(len(ahead))
    report(scheduler, dict(enumerate(ahead)))
    while windows := due(scheduler, 0.0):
        for frames, _ in windows:
            deliver(scheduler, {slot: count for slot, (_, count) in frames.items()}, 0.0)
    scheduler.timing.iteration_s = turn_s
    return scheduler
