"""The real engine on a virtual clock: its queue, admission, pages, scheduler and turns, with what launches
cost in the place of launches.

A day of load takes minutes, the same load gives the same answer, and GPUs that are not there can be asked
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compile_cache.strategy import Strategy
from serving.engine.device.arena import Arena
from serving.engine.device.launches import Chunk, Render, num_tokens
from serving.engine.device.streams import AsyncCopy, Streams
from serving.engine.engine import Audio, Engine, Event, Failed, Finished, Full
from serving.engine.model_worker import ModelWorker
from serving.engine.schedule.render_times import RenderTimes
from serving.tools.simulated_device import SimulatedDevice, Work
from zoo.contract import KV, Batch, Family, Lane, Prompt, Spec, State, View, Window
from zoo.request import Request, RequestError

RATE_HZ = 1000  # of simulated samples: a frame of any length has whole ones


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Cost:
    """Seconds of launches that have the device to themselves, and of the host's own turn. step_s: by the
    number of slots. prefill_s: what so many positions of prompts add to a step. prefill_alone_s: of a launch of
    such positions alone; None: the same. render_s: by the rows and frames of a window.
    """

    step_s: Callable[[int], float] = lambda slots: 0.01 + 0.001 * slots
    prefill_s: Callable[[int], float] = lambda tokens: 0.002 + 0.00005 * tokens
    render_s: Callable[[int, int], float] = lambda rows, frames: 0.001 + 0.0002 * rows * frames
    turn_s: float = 0.0005
    turn_slot_s: float = 0.0  # of the host's turn, for each that speaks
    save_s: float = 0.0001  # of a page, to the host or back
    prefill_alone_s: Callable[[int], float] | None = None


class Voice(Family[Any]):
    """A family that is only a spec. A request takes a prompt position for each byte of its `text`, and its
    speech has `max_frames` frames, or `frames_per_byte` for each byte."""

    def __init__(
        self,
        window: Window | None = None,
        frame_s: float = 0.08,
        frames_per_byte: float = 0.8,
        max_frames: int = 4096,
        guard: float = 4.0,
        lanes: int = 1,
        steps_per_frame: int = 1,
        has_offsets: bool = True,
    ):
        """window: its hold_samples are of RATE_HZ. guard: times a speech's frames that a prompt allows, as a
        family that does not know must. lanes: a second one has a prompt of half as many positions.
        has_offsets: where windows lie on a grid, it begins at another frame for each size of prompt."""
        super().__init__()
        self.device, self.dtype, self.strategy = torch.device("cpu"), torch.float32, Strategy()
        self.frames_per_byte, self.guard, self.has_offsets = frames_per_byte, guard, has_offsets
        self.spec = Spec(
            family="simulated",
            variant="voice",
            frame_shape=(1,),
            frame_dtype=torch.int64,
            frame_samples=round(frame_s * RATE_HZ),
            sample_rate_hz=RATE_HZ,
            kv=KV(1, 1, 2),
            width=1,
            max_frames=max_frames,
            max_positions=(2 + steps_per_frame) * max_frames,
            steps_per_frame=steps_per_frame,
            window=window or Window((1, 4, 25)),
            lanes=lanes,
        )
        self.lengths: dict[int, int] = {}  # frames of each prompt's speech, by its seed

    @classmethod
    def like(cls, family: Family[Any], guard: float = 1.0) -> Voice:
        """With the windows of a real one, and its way of rendering them."""
        spec = family.spec
        hold_samples = round(spec.window.hold_samples * RATE_HZ / spec.sample_rate_hz)
        voice = cls(replace(spec.window, hold_samples=hold_samples), 1 / spec.frame_rate_hz, guard=guard)
        voice.strategy = Strategy(cuts_renders=family.strategy.cuts_renders)
        return voice

    def prompt(self, request: Request) -> Prompt:
        size = len(request.text.encode())
        frames = request.max_frames or max(1, round(size * self.frames_per_byte))
        cap = min(self.spec.max_frames, max(frames, round(self.guard * frames)))
        keys = tuple(request.seed % 2**32 * 100_003 + i for i in range(size))
        slot = {"frames": frames}
        offset = size % self.spec.window.grid if self.has_offsets else self.spec.window.grid_offset
        null = Lane(torch.zeros(-(-size // 2), 1), keys[: -(-size // 2)]) if self.spec.lanes == 2 else None
        return Prompt(
            torch.zeros(size, 1),
            keys,
            cap,
            slot,
            usage={"input_tokens": size},
            null=null,
            grid_offset=offset,
            num_fed_steps=size if request.is_open else None,
        )

    def state(self, slots: int, max_frames: int | None = None) -> Any:
        raise NotImplementedError("a simulated voice has no tensors")

    def embed(self, state: State, slots: Tensor) -> Tensor:
        raise NotImplementedError("a simulated voice computes nothing")

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError("a simulated voice computes nothing")

    def emit(self, state: State, slots: Tensor, h: Tensor) -> None:
        raise NotImplementedError("a simulated voice computes nothing")

    def render(self, state: State, view: View) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a simulated voice computes nothing")


class Copy:
    """As AsyncCopy, of values that are there when the device is done."""

    def __init__(self, clock: Clock, device: SimulatedDevice, work: Work, *values: np.ndarray):
        self.clock, self.device, self.work, self.values = clock, device, work, values

    @property
    def is_there(self) -> bool:
        self.device.advance(self.clock.now_s)
        return self.work.done_s is not None

    def wait(self, max_s: float) -> None:
        if not self.is_there:
            self.clock.now_s = self.device.finish(self.work, self.clock.now_s + max_s)

    def read(self) -> tuple[np.ndarray, ...]:
        if not self.is_there:
            self.clock.now_s = self.device.finish(self.work)
        return self.values


class SimulatedRunner:
    """As Runner. is_async: launches return at once, as on a GPU, and the device works on; else they return
    when it is done, as on a CPU."""

    graph_misses = 0

    @property
    def is_synchronous(self) -> bool:
        return not self.is_async

    def __init__(self, clock: Clock, cost: Cost, is_async: bool, family: Voice, num_slots: int, arena: Arena):
        self.clock, self.cost, self.is_async = clock, cost, is_async
        self.has_mixed = is_async
        self.family, self.num_slots, self.arena = family, num_slots, arena
        self.streams: Streams = arena.streams
        self.page_tokens = arena.page_tokens(family)
        self.lanes = np.arange(family.spec.lanes)[:, None]
        self.kv_lens = np.zeros(len(self.lanes) * (num_slots + 1), np.int64)
        self.capacity = np.zeros_like(self.kv_lens)  # positions that a sequence's pages hold
        self.num_steps = np.zeros(num_slots, np.int64)
        self.wanted = np.zeros(num_slots, np.int64)
        self.given = np.zeros(num_slots, np.int64)  # samples
        self.device = SimulatedDevice()

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        return (slots + self.lanes * (self.num_slots + 1)).ravel()

    def open(self, slot: int, prompt: Prompt, pages: Sequence[Sequence[int]], skips: Sequence[int]) -> None:
        self.num_steps[slot], self.wanted[slot] = 0, min(prompt.slot["frames"], prompt.max_frames)
        self.given[slot] = 0
        sequences = self.sequences(np.array([slot]))
        self.kv_lens[sequences] = skips
        self.capacity[sequences] = [len(own) * self.page_tokens for own in pages]

    def close(self, slot: int) -> None:
        self.wanted[slot] = 0

    def set_pages(self, slot: int, lane: int, pages: Sequence[int]) -> None:
        self.capacity[slot + lane * (self.num_slots + 1)] = len(pages) * self.page_tokens

    def feed(self, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        return len(tokens)

    def save(self, pages: Sequence[int]) -> list[Copy]:
        return [self._launch("lm", self.cost.save_s * len(pages))]

    def restore(self, pages: Sequence[int], saved: Sequence[Copy]) -> None:
        self._launch("lm", self.cost.save_s * len(pages))

    def frames(self, slot: int, count: int) -> AsyncCopy:
        return AsyncCopy((torch.zeros(count, 1, dtype=torch.int64),))

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self._fill(chunks)
        self._launch("lm", self.prefill_alone_s(chunks))

    def _fill(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.kv_lens[chunk.slot + chunk.lane * (self.num_slots + 1)] += chunk.stop - chunk.start
        self._check_pages()

    def step(self, slots: np.ndarray) -> Copy:
        return self.mixed(slots, ())

    def mixed(self, slots: np.ndarray, chunks: Sequence[Chunk]) -> Copy:
        self._fill(chunks)
        self.kv_lens[self.sequences(slots)] += 1
        self._check_pages()
        self.num_steps[slots] += 1
        made = np.minimum(self.frames_of(self.num_steps[slots]), self.wanted[slots])
        no_text, finite = np.full(len(slots), -1), np.ones(len(slots), bool)
        report = np.stack((made, made == self.wanted[slots], no_text, finite), 1)
        prompts_s = self.prefill_s(chunks) if chunks else 0.0
        return self._launch("lm", self.cost.step_s(len(slots)) + prompts_s, report)

    def render(self, due: Render) -> Copy:
        each = self.family.spec.frame_samples
        held = np.where(due.is_last, 0, self.family.spec.window.hold_samples)
        given = np.maximum((due.start + due.count) * each - held, 0)
        valid, self.given[due.slots] = given - self.given[due.slots], given
        samples = np.zeros((len(due.slots), max(valid)), np.float32)
        return self._launch("renders", self.render_s(due), samples, valid)

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        return self.cost.prefill_s(num_tokens(chunks))

    def prefill_alone_s(self, chunks: Sequence[Chunk]) -> float:
        return (self.cost.prefill_alone_s or self.cost.prefill_s)(num_tokens(chunks))

    def frames_of(self, num_steps: np.ndarray) -> np.ndarray:
        return num_steps

    def render_s(self, due: Render) -> float:
        return self.cost.render_s(len(due.slots), due.frames)

    def _launch(self, stream: str, cost_s: float, *values: np.ndarray) -> Copy:
        copy = Copy(self.clock, self.device, self.device.launch(stream, cost_s, self.clock.now_s), *values)
        if not self.is_async:
            copy.read()
        return copy

    def _check_pages(self) -> None:
        used = self.sequences(np.arange(self.num_slots))
        over = used[self.kv_lens[used] > self.capacity[used]]
        assert not over.size, (
            f"sequences {over} write to positions {self.kv_lens[over]} of {self.capacity[over]}"
        )


@dataclass
class Heard:
    """The times of a listener, in the clock's seconds. late_s: without audio, after the first."""

    submitted_s: float
    first_s: float | None = None
    plays_until_s: float = 0.0
    late_s: float = 0.0
    audio_s: float = 0.0
    end: Finished | Failed | Full | None = None
    ended_s: float | None = None

    def take(self, event: Event, now_s: float, rate_hz: int) -> None:
        if isinstance(event, Audio) and len(event.samples):  # a window may hold back all of its samples
            given_s = len(event.samples) / rate_hz
            if self.first_s is None:
                self.first_s = self.plays_until_s = now_s
            self.late_s += max(now_s - self.plays_until_s, 0.0)
            self.plays_until_s = max(self.plays_until_s, now_s) + given_s
            self.audio_s += given_s
        elif isinstance(event, Finished | Failed):
            self.end, self.ended_s = event, now_s

    @property
    def ttfa_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.submitted_s


class AtOnce(Executor):
    """An executor without a thread, so that next passes come at the same simulated time in each run."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **fields: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **fields))
        except RequestError as error:
            future.set_exception(error)
        return future


def use_gpu_rules(model: ModelWorker, cost: Cost, rows_of: Callable[[int], Iterable[int]]) -> None:
    """Let a model choose its launches as on a GPU, by what a warm-up would measure. rows_of: the rows of recorded
    renders, by the frames of a window."""
    sizes, step_s = model.family.spec.window.sizes, cost.step_s(model.settings.num_slots)
    model.use_render_times(RenderTimes.measured(cost.render_s, sizes, rows_of, step_s))


@dataclass
class Simulation:
    """An engine of one voice, and its listeners. report_lag: launches that are under way when a step's report
    is read; None: one where launches return at once, else none. make_runner: as SimulatedRunner. `settings` are
    the engine's."""

    voice: Voice
    cost: Cost
    is_async: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    report_lag: int | None = None
    make_runner: Callable[..., SimulatedRunner] = SimulatedRunner

    def __post_init__(self) -> None:
        self.clock = Clock()

        def make(family: Voice, num_slots: int, arena: Arena, *_: object) -> SimulatedRunner:
            return self.make_runner(self.clock, self.cost, self.is_async, family, num_slots, arena)

        self.engine = Engine(
            self.voice,
            clock=self.clock,
            make_runner=make,
            compile=False,
            report_lag=int(self.is_async) if self.report_lag is None else self.report_lag,
            **self.settings,
        )
        self.engine.composer.executor = AtOnce()
        [self.model] = self.engine.models.values()
        self.model.forecaster.seed(self.cost, self.voice.spec.window.sizes)  # as a warm-up does
        self.heard: list[Heard] = []

    def submit(self, request: Request, **how: Any) -> Heard:
        """As of now; refused at once, or heard as `run` goes on."""
        heard = Heard(self.clock.now_s)
        self.heard.append(heard)
        try:
            self.engine.speak(f"request-{len(self.heard)}", request, partial(self.hear, heard), **how)
        except Full as full:
            heard.end, heard.ended_s = full, self.clock.now_s
        return heard

    def hear(self, heard: Heard, event: Event) -> None:
        heard.take(event, self.clock.now_s, RATE_HZ)

    def turn(self) -> bool:
        self.clock.now_s += self.cost.turn_s + self.cost.turn_slot_s * len(self.model.running)
        return self.engine.turn()

    def run(
        self, arrivals: Sequence[tuple[float, Request]], until_s: float = np.inf, **how: Any
    ) -> list[Heard]:
        """arrivals: by time. Until all have ended, or it is late. -> the arrivals' listeners."""
        waiting, listeners = list(reversed(arrivals)), []
        while self.clock.now_s < until_s:
            while waiting and waiting[-1][0] <= self.clock.now_s:
                listeners.append(self.submit(waiting.pop()[1], **how))
            is_busy = self.turn()
            if not is_busy and not self.engine.num_requests:
                if not waiting:
                    break
                self.clock.now_s = max(self.clock.now_s, waiting[-1][0])
        return listeners


def poisson(
    rate: float, duration_s: float, seed: int = 0, text_bytes: float = 60
) -> list[tuple[float, Request]]:
    """Arrivals with texts of random lengths."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1 / rate, round(2 * rate * duration_s) + 10))
    sizes = np.maximum(random.poisson(text_bytes, len(at_s)), 4)
    return [
        (float(at), Request(text="x" * int(size), seed=i))
        for i, (at, size) in enumerate(zip(at_s[at_s < duration_s], sizes, strict=False))
    ]


def goodput(heard: Sequence[Heard], max_ttfa_s: float, duration_s: float, gap_s: float = 0.05) -> float:
    """Requests a second that were heard in time and without a gap."""
    good = [
        one
        for one in heard
        if isinstance(one.end, Finished) and (one.ttfa_s or np.inf) <= max_ttfa_s and one.late_s <= gap_s
    ]
    return len(good) / duration_s
