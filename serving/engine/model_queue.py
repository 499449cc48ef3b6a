"""The requests of one model that have no slot yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from serving.engine.job import Job, QueuedRequest
from serving.engine.schedule.admission import Forecaster
from serving.engine.schedule.numbers import FLEXIBLE_SLOTS_KEPT, TRIAL_BUFFER_S
from serving.engine.schedule.scheduler import Scheduler
from serving.protocol import Listener


class ModelQueue:
    """requests: all of them by id, wherever they are; the engine's lock guards it. jobs: those whose prompts
    are made."""

    def __init__(
        self, forecaster: Forecaster, scheduler: Scheduler, num_slots: int, clock: Callable[[], float]
    ):
        self.forecaster = forecaster
        self.scheduler = scheduler
        self.num_slots = num_slots
        self.clock = clock
        self.requests: dict[str, QueuedRequest] = {}
        self.jobs: deque[Job] = deque()

    def candidates(self, count: int, running: Collection[Job]) -> list[Job]:
        """Return the first jobs that may have a free slot now; flexible ones come last."""
        jobs = sorted(self.jobs, key=lambda job: job.rank)
        if not jobs:
            return []
        # A fast listener at the head leaves room for fewer, and is not passed for it.
        head = Listener(speed=jobs[0].listener.speed)
        is_able = {
            False: self.has_room(head, running),
            True: self.has_room(Listener(is_flexible=True), running),
        }
        return [job for job in jobs if is_able[job.listener.is_flexible]][:count]

    def has_room(self, listener: Listener, running: Collection[Job]) -> bool:
        """Return whether one more may speak now. Some slots are kept from flexible requests."""
        num_flexible = sum(job.listener.is_flexible for job in running)
        if listener.is_flexible:
            return num_flexible < self.num_slots - self.num_slots // FLEXIBLE_SLOTS_KEPT
        speeds = [job.listener.speed for job in running if not job.listener.is_flexible]
        frame_s = self.scheduler.timing.frame_s / max([listener.speed, *speeds])
        max_streams = min(self.forecaster.outlook.max_concurrency, self.forecaster.max_concurrency(frame_s))
        num = len(running) - num_flexible
        return num < max_streams or (num == max_streams and self._may_try(num + 1))

    def _may_try(self, num: int) -> bool:
        """Return whether so many may speak, one more than estimates allow: the estimates are old and may
        be wrong, and
        all listeners have some audio."""
        is_stale = self.forecaster.costs.is_stale(num)
        return is_stale and self.scheduler.runs_dry_in_s(self.clock()) >= TRIAL_BUFFER_S

    def predicted_first_audio_s(self, text_bytes: int, has_recordings: bool) -> float | None:
        """Return the seconds until a request that comes now is heard, unless it is flexible; None before
        anything is known."""
        requests = [each for each in self.requests.values() if not each.listener.is_flexible]
        ahead = [self.forecaster.expected(each.text_bytes) for each in requests]
        num_recordings = sum(each.must_encode and not each.is_made for each in requests)
        return self.forecaster.first_audio_s(
            text_bytes, ahead, has_recordings, num_recordings if has_recordings else 0
        )
