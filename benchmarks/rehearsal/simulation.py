"""Run the project's scheduler on a virtual clock: a server's steps, with costs in place of launches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heapify, heappop, heappush

import numpy as np

from benchmarks.rehearsal.cards import Card
from benchmarks.rehearsal.costs import Cost, Counts
from serving.engine.device.launches import Render
from serving.engine.schedule.numbers import GPU_PREFILL_INTERVAL, GPU_RENDERS_IN_FLIGHT
from serving.engine.schedule.policy import Policy
from serving.engine.schedule.scheduler import Scheduler

# The host's own ms a step, by the number of active streams: Qwen3-TTS on an H200's host, the slowest that was
# measured there (benchmarks/results/2026-11-22-h200-qwen3_tts.json: host, step and render). Higgs took half.
TURN_STREAMS, TURN_MS = (1, 16, 64), (2.0, 3.5, 5.0)
PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Load:
    """Requests: arrivals [R] in seconds, and the frames [R] of each.

    num_streams: in a closed loop, the number of requests that run at once. num_conversations: requests are the turns of
    so many conversations, one of each after the other; request r + num_conversations arrives when a listener has heard
    request r and has spoken for pause_s [R]. Then arrivals_s are those of the first turns."""

    arrivals_s: np.ndarray
    frames: np.ndarray
    num_streams: int | None = None
    num_conversations: int | None = None
    pause_s: np.ndarray | None = None

    @classmethod
    def poisson(cls, rate: float, duration_s: float, frames: float, seed: int = 0) -> Load:
        random = np.random.default_rng(seed)
        arrivals_s = np.cumsum(random.exponential(1 / rate, round(1.5 * rate * duration_s)))
        arrivals_s = arrivals_s[arrivals_s < duration_s]
        return cls(arrivals_s, np.maximum(random.poisson(frames, len(arrivals_s)), 4))

    @classmethod
    def closed(cls, requests: int, frames: float, num_streams: int, seed: int = 0) -> Load:
        random = np.random.default_rng(seed)
        return cls(np.zeros(requests), np.maximum(random.poisson(frames, requests), 4), num_streams)

    @classmethod
    def conversations(cls, num: int, turns: int, frames: float, pause_s: float, seed: int = 0) -> Load:
        """Return conversations that begin at random, with turns whose lengths vary by half."""
        random = np.random.default_rng(seed)
        length = np.maximum(random.poisson(frames, num * turns), 4)
        pauses_s = pause_s * random.uniform(0.5, 1.5, num * turns)
        return cls(random.uniform(0, pause_s, num), length, num_conversations=num, pause_s=pauses_s)


@dataclass
class Heard:
    """The experience of a load's listeners. arrived_s, begun_s, first_s [R]: the end of what the user says, admission
    and first audio. given_s [R]: audio that a listener has; gap_s [R]: the longest wait for more, if it plays from the first sample on."""

    load: Load
    arrived_s: np.ndarray = field(init=False)
    begun_s: np.ndarray = field(init=False)
    first_s: np.ndarray = field(init=False)
    given_s: np.ndarray = field(init=False)
    gap_s: np.ndarray = field(init=False)
    underruns: int = 0
    audio_s: float = 0.0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.arrived_s = np.full(len(self.load.frames), np.nan)
        self.arrived_s[: len(self.load.arrivals_s)] = self.load.arrivals_s
        self.begun_s = np.full(len(self.load.frames), np.nan)
        self.first_s = np.full(len(self.load.frames), np.nan)
        self.given_s = np.zeros(len(self.load.frames))
        self.gap_s = np.zeros(len(self.load.frames))

    def give(self, requests: np.ndarray, given_s: np.ndarray, now_s: float) -> None:
        """Give listeners more audio. A gap moves the end of what they have."""
        is_first = np.isnan(self.first_s[requests])
        self.first_s[requests] = np.fmin(self.first_s[requests], now_s)
        end_s = self.first_s[requests] + self.given_s[requests]
        late_s = np.where(is_first, 0.0, np.maximum(now_s - end_s, 0))
        self.gap_s[requests] = np.maximum(self.gap_s[requests], late_s)
        self.given_s[requests] += given_s + late_s

    @property
    def num_viable(self) -> int:
        """The number of speeches without a gap."""
        return int((self.gap_s == 0).sum())

    def ttfa_ms(self, percent: float) -> float:
        since_s = self.begun_s if self.load.num_streams else self.arrived_s
        return float(np.nanpercentile(self.first_s - since_s, percent)) * 1e3

    @property
    def audio_s_per_s(self) -> float:
        return self.audio_s / self.busy_s


@dataclass(eq=False)
class Work:
    """A launch on a stream.

    left_s: its remaining time if alone; load: the part of that time that is bytes and arithmetic; asked_s:
    when Python has launched all of it, before which it cannot end."""

    left_s: float
    load: float
    began_s: float
    asked_s: float
    done_s: float = np.nan

    @property
    def is_done(self) -> bool:
        return not np.isnan(self.done_s)


class Device:
    """Parallel streams, and the host that fills them.

    Work on one stream runs in order. Work on two streams shares what is busy and hides each other's starts.
    Each runs at its own speed while their loads add up to 1 at most; otherwise both are slower by that sum.
    So bytes and arithmetic of two kernels never overlap, not even the bytes of one with the arithmetic of the
    other, although a device can do that."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.queues: dict[str, deque[Work]] = {"lm": deque(), "renders": deque()}

    def launch(self, stream: str, cost: Cost) -> Work:
        """Queue a launch and advance the host's clock until Python has launched it."""
        assert cost.device_s > 0, (
            f"a launch must take time on the device, but this one takes {cost.device_s} s"
        )
        began_s = self.host_s
        self.host_s += cost.host_s
        work = Work(cost.device_s, cost.busy_s / cost.device_s, began_s, self.host_s)
        self.queues[stream].append(work)
        return work

    def wait(self, until_s: float) -> None:
        self.host_s = max(self.host_s, until_s)
        self._advance(self.host_s)

    def wait_for(self, work: Work) -> None:
        while not work.is_done:
            self._advance(self._next_s())
        self.wait(work.done_s)

    def _running(self) -> list[Work]:
        heads = [queue[0] for queue in self.queues.values() if queue]
        return [work for work in heads if work.began_s <= self.device_s]

    def _slowness(self, running: list[Work]) -> float:
        return max(1.0, sum(work.load for work in running if work.left_s > 0))

    def _next_s(self) -> float:
        """Return when the next event happens if nothing is launched before."""
        running = self._running()
        slow = self._slowness(running)
        ends = [max(self.device_s + work.left_s * slow, work.asked_s) for work in running]
        begins = [queue[0].began_s for queue in self.queues.values() if queue and queue[0] not in running]
        return min(ends + begins, default=np.inf)

    def _advance(self, until_s: float) -> None:
        while self.device_s < until_s:
            running, at_s = self._running(), min(self._next_s(), until_s)
            done_s = (at_s - self.device_s) / self._slowness(running)
            self.device_s = at_s
            for work in running:
                work.left_s -= done_s
                if work.left_s < 1e-12:
                    work.left_s = 0.0
            for queue in self.queues.values():
                while queue and queue[0] in running and queue[0].left_s == 0 and queue[0].asked_s <= at_s:
                    queue.popleft().done_s = at_s


class Server:
    """One model's steps, in the order of `model_worker`.

    Reports are read one launch later, samples when they are there. Slots have all the pages that they
    need."""

    def __init__(self, counts: Counts, card: Card, num_slots: int, policy: str = "streaming"):
        self.counts, self.card, self.cost = counts, card, cache(partial(counts.cost, card))
        self.scheduler = Scheduler(
            num_slots,
            Policy.named(policy),
            counts.window,
            counts.frame_s,
            prefill_interval=GPU_PREFILL_INTERVAL,
        )
        self.device = Device()
        self.request = np.full(num_slots, -1)
        self.steps = np.zeros(num_slots, np.int64)  # launched
        self.wanted = np.zeros(num_slots, np.int64)  # frames
        self.reports: deque[tuple[Work, np.ndarray, np.ndarray]] = deque()
        self.renders: deque[tuple[Work, Render]] = deque()

    def serve(self, load: Load) -> Heard:
        heard, listen_s = Heard(load), self.counts.listen_s(self.card) if load.num_conversations else 0.0
        waiting = [(float(at_s) + listen_s, i) for i, at_s in enumerate(load.arrivals_s)]
        heapify(waiting)
        while waiting or self.num_open:
            if not self.num_open:
                self.device.wait(waiting[0][0])
            self._admit(heard, waiting)
            launched = self._launch()
            self._collect(lag=int(launched))
            self._render()
            self._deliver(heard, is_waiting=not launched)
            for request in self._finish(heard):
                following = request + (load.num_conversations or 0)
                if load.pause_s is not None and following < len(load.frames):
                    heard_s = heard.first_s[request] + heard.given_s[request]
                    heard.arrived_s[following] = heard_s + load.pause_s[following]
                    heappush(waiting, (heard.arrived_s[following] + listen_s, following))
        heard.busy_s = self.device.host_s
        heard.underruns = self.scheduler.num_underruns
        return heard

    @property
    def num_open(self) -> int:
        return int((self.request >= 0).sum())

    def _admit(self, heard: Heard, waiting: list[tuple[float, int]]) -> None:
        free = np.flatnonzero(self.request < 0).tolist()[
            : (heard.load.num_streams or len(self.request)) - self.num_open
        ]
        while waiting and free and waiting[0][0] <= self.device.host_s:
            (_, request), slot = heappop(waiting), free.pop()
            self.request[slot], self.steps[slot], self.wanted[slot] = request, 0, heard.load.frames[request]
            heard.begun_s[request] = self.device.host_s
            self.scheduler.open(slot, PROMPT_TOKENS)

    def _launch(self) -> bool:
        turn_ms = float(np.interp(self.num_open, TURN_STREAMS, TURN_MS))
        self.device.wait(self.device.host_s + turn_ms / 1e3)
        chunks = self.scheduler.next_chunks()
        if chunks:
            self.device.launch("lm", self.cost("prefill", len(chunks)))
        for chunk in chunks:
            self.scheduler.record_prefill(chunk)
        slots = self.scheduler.decoding_slots()
        if slots.size:
            work = self.device.launch("lm", self.cost("step", len(slots)))
            self.steps[slots] += 1
            made = np.minimum(self.counts.frames(self.steps[slots]), self.wanted[slots])
            self.reports.append((work, slots, made))
            self.scheduler.record_step(slots)
        return bool(chunks) or bool(slots.size)

    def _collect(self, lag: int) -> None:
        while len(self.reports) > lag:
            work, slots, ready = self.reports.popleft()
            self.device.wait_for(work)
            self.scheduler.report(slots, ready, ready == self.wanted[slots])

    def _render(self) -> None:
        if len(self.renders) >= GPU_RENDERS_IN_FLIGHT:
            return
        for render in self.scheduler.take_due_windows(self.device.host_s):
            cost = self.cost("render", len(render.slots), render.frames, render.length)
            self.renders.append((self.device.launch("renders", cost), render))

    def _deliver(self, heard: Heard, is_waiting: bool) -> None:
        while self.renders and (is_waiting or self.renders[0][0].is_done):
            is_waiting = False
            work, render = self.renders.popleft()
            self.device.wait_for(work)
            now_s, requests = self.device.host_s, self.request[render.slots]
            given_s = render.count * self.counts.frame_s
            heard.give(requests, given_s, now_s)
            self.scheduler.record_delivery(
                render.slots, render.count, given_s, render.is_last, render.handed_s, now_s
            )

    def _finish(self, heard: Heard) -> list[int]:
        """Close finished slots, and return their requests. A step in flight for one is wasted, but ends before the next
        tenant's."""
        finished = []
        for slot in self.scheduler.finished_slots().tolist():
            heard.audio_s += float(self.wanted[slot]) * self.counts.frame_s
            self.scheduler.close(slot)
            finished.append(int(self.request[slot]))
            self.request[slot] = -1
            self.reports = deque(
                (work, slots[slots != slot], ready[slots != slot]) for work, slots, ready in self.reports
            )
        return finished
