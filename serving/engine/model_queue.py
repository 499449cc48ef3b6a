"""The requests of one model that have no slot yet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection

from serving.engine.job import Job, QueuedRequest
from serving.engine.schedule.admission import Forecaster, Line
from serving.engine.schedule.numbers import FLEXIBLE_SLOTS_KEPT, TRIAL_BUFFER_S
from serving.engine.schedule.scheduler import Scheduler


class ModelQueue:
    """requests: all of them by id, wherever they are; the engine's lock guards it. jobs: those whose prompts
    are made."""

    def __init__(self, forecaster: Forecaster, scheduler: Scheduler, clock: Callable[[], float]):
        self.forecaster = forecaster
        self.scheduler = scheduler
        self.clock = clock
        self.requests: dict[str, QueuedRequest] = {}
        self.jobs: deque[Job] = deque()
        self._line: Line | None = None

    def candidates(self, count: int, running: Collection[Job]) -> list[Job]:
        """Return the first jobs that may have a free slot now; flexible ones come last."""
        if not self.jobs:
            return []
        jobs = sorted(self.jobs, key=lambda job: job.rank)
        is_able = {is_flexible: self.has_room(is_flexible, running) for is_flexible in (False, True)}
        return [job for job in jobs if is_able[job.listener.is_flexible]][:count]

    def has_room(self, is_flexible: bool, running: Collection[Job]) -> bool:
        """Return whether one more may speak now. Flexible requests leave some slots free.
        A session that waits for text does not count."""
        listeners = [job for job in running if not job.listener.is_flexible]
        if is_flexible:
            num_slots = self.scheduler.slots.num_slots
            return len(running) - len(listeners) < num_slots - slots_kept(num_slots)
        is_quiet = self.scheduler.is_quiet(self.clock())
        speeds = [job.listener.speed for job in listeners if not is_quiet[job.slot]]
        num = len(speeds)
        max_streams = min(self.forecaster.outlook.max_concurrency, self.forecaster.max_concurrency(speeds))
        return num < max_streams or (num == max_streams and self._may_try(num + 1))

    def _may_try(self, num: int) -> bool:
        """Return whether `num` requests may speak, one more than the estimates allow. That is safe while all
        listeners have some audio, and needed because old estimates may be wrong."""
        is_stale = self.forecaster.costs.is_stale(num)
        return is_stale and self.scheduler.runs_dry_in_s(self.clock()) >= TRIAL_BUFFER_S

    # the line, under the engine's lock

    def add(self, request: QueuedRequest) -> None:
        """Let a request join the line."""
        self.requests[request.id] = request
        if not request.listener.is_flexible:
            self._join(self.line, request)

    def remove(self, id: str) -> None:
        """Take a request out of the line, if it stands there."""
        if self.requests.pop(id, None) is not None:
            self._line = None

    @property
    def line(self) -> Line:
        """The requests that are ahead of a newcomer: made once an iteration, and then kept."""
        if self._line is None or self._line.outlook is not self.forecaster.outlook:
            self._line = Line(self.forecaster.outlook)
            for request in self._listeners:
                self._join(self._line, request)
        return self._line

    @property
    def _listeners(self) -> list[QueuedRequest]:
        return [each for each in self.requests.values() if not each.listener.is_flexible]

    def _join(self, line: Line, request: QueuedRequest) -> None:
        has_recordings = request.must_encode and not request.is_made
        line.join(self.forecaster.expected(request.text_bytes), has_recordings)

    def predicted_first_audio_s(self, text_bytes: int, has_recordings: bool) -> float | None:
        """Return the seconds until a request that comes now is heard, unless it is flexible; None before
        anything is known."""
        newcomer = self.forecaster.expected(text_bytes)
        wait_s = self.forecaster.first_audio_s(self.line, newcomer, has_recordings)
        return None if wait_s is None else self.forecaster.correction.factor * wait_s

    def late(self, now_s: float, max_ttfa_s: float) -> list[tuple[QueuedRequest, float]]:
        """Return the waiting requests that would be heard more than max_ttfa_s after they were accepted, each
        with its predicted wait in seconds. Each prediction assumes that the requests returned before it have
        left. A request is never late if no other one is ahead of it, in line or in a slot. The prediction
        leaves out the correction: short waits change that too, and it would double a long wait within a few
        requests."""
        late = []
        line = Line(self.forecaster.outlook)
        for request in self._listeners:
            has_recordings = request.must_encode and not request.is_made
            newcomer = self.forecaster.expected(request.text_bytes)
            wait_s = self.forecaster.first_audio_s(line, newcomer, has_recordings)
            is_first = not line.num and not line.outlook.left
            if not is_first and wait_s is not None and now_s - request.accepted_s + wait_s > max_ttfa_s:
                late.append((request, wait_s))
            else:
                line.join(newcomer, has_recordings)
        return late


def slots_kept(num_slots: int) -> int:
    """Return how many slots flexible requests leave free: 1 of FLEXIBLE_SLOTS_KEPT, and at least 1 of 2."""
    return min(math.ceil(num_slots / FLEXIBLE_SLOTS_KEPT), num_slots - 1)
