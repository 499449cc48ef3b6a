"""Admission by time: estimate how long iterations and speeches take, and when a new request would be heard.

    Costs     what an iteration takes, by what is launched in it
    Lengths   how many frames a text becomes
    Outlook   who speaks now
    Line      who waits behind them; `first_audio_s` of a newcomer follows from both

Pure arithmetic: estimates follow from what was recorded, and nothing here looks at a clock. VoxServe (arXiv
2602.00269) has the two measures, time to first audio and streaming viability.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from serving.engine.schedule.numbers import (
    CAPACITY_PART,
    CORRECTION_STEP,
    COST_DECAY,
    COST_INERTIA,
    COST_OUTLIER,
    MAX_CORRECTION,
    MIN_ITERATIONS,
    RECENT_WEIGHT,
    SEED_TOKENS,
    STALE_ITERATIONS,
    TEXT_BYTES_HZ,
)

SCALE = np.array((1.0, 8.0, 256.0, 32.0))  # of an iteration: itself, slots, prompt positions, frames rendered
INERTIA = COST_INERTIA * np.eye(len(SCALE))


@dataclass
class IterationLoad:
    """The load of an iteration: slots that took a step, prompt positions, and frames of the renders'
    shapes."""

    slots: int = 0
    tokens: int = 0
    frames: int = 0


class LaunchTimes(Protocol):
    """Seconds of single launches, as the warm-up times them (device/warmup.py)."""

    def step_s(self, slots: int, /) -> float: ...
    def prefill_s(self, tokens: int, /) -> float: ...
    def render_s(self, rows: int, frames: int, /) -> float: ...


class Costs:
    """Seconds of an iteration, as a sum over what is launched in it, none of which takes less than no time:
    least squares over recent iterations. Parts that always come together share their time somehow, and the
    sum is right."""

    def __init__(self) -> None:
        self.num_iterations = 0
        self._last_iterations: dict[int, int] = {}  # by how many slots took a step
        self._each = np.zeros(len(SCALE))  # seconds per SCALE
        self._products = np.zeros((len(SCALE), len(SCALE)))
        self._seconds = np.zeros(len(SCALE))

    @property
    def is_known(self) -> bool:
        return self.num_iterations >= MIN_ITERATIONS

    def record(self, load: IterationLoad, took_s: float) -> None:
        row = np.array((1, load.slots, load.tokens, load.frames)) / SCALE
        expected_s = float(self._each @ row)
        if self.is_known and expected_s > 0:
            took_s = min(took_s, COST_OUTLIER * expected_s)
        self._products = COST_DECAY * self._products + np.outer(row, row)
        self._seconds = COST_DECAY * self._seconds + took_s * row
        self._each = solved(self._products + INERTIA, self._seconds + COST_INERTIA * self._each)
        self.num_iterations += 1
        self._last_iterations[load.slots] = self.num_iterations

    def seed(self, times: LaunchTimes, num_slots: int, window_sizes: Sequence[int]) -> None:
        """Begin with launches that were timed before the first request. They count as iterations of one and
        of all slots: alone, with a prompt, and with a frame of each slot in windows of each size."""
        for slots in sorted({1, num_slots}):
            step_s = times.step_s(slots)
            self.record(IterationLoad(slots), step_s)
            self.record(IterationLoad(slots, SEED_TOKENS), step_s + times.prefill_s(SEED_TOKENS))
            for frames in window_sizes:
                rows = math.ceil(slots / frames)
                self.record(IterationLoad(slots, 0, rows * frames), step_s + times.render_s(rows, frames))
        self.num_iterations = max(self.num_iterations, MIN_ITERATIONS)

    def is_stale(self, slots: int) -> bool:
        """Return whether no recent iteration had that many slots. Then no iteration corrects its
        estimate: if always as many speak, their share of an iteration and its own cannot be told apart."""
        last = max((when for num, when in self._last_iterations.items() if num >= slots), default=0)
        return self.num_iterations - last >= STALE_ITERATIONS

    def iteration_s(self, slots: float = 0, tokens: float = 0, frames: float = 0) -> float:
        return float(self._each @ (np.array((1, slots, tokens, frames)) / SCALE))

    def steady_s(self, slots: np.ndarray | float) -> np.ndarray:
        """Return the seconds of an iteration with `slots` streams: each takes a step, and a frame of each
        is rendered. [...]
        """
        own, slot, _, frame = self._each / SCALE
        return own + (slot + frame) * np.asarray(slots)

    def prefill_s(self, tokens: float) -> float:
        return float(self._each[2] * tokens / SCALE[2])


def solved(products: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Solve products @ x = sums for x [N], products [N, N] positive definite. Parts that would be negative
    are left out, and are 0."""
    found = np.linalg.solve(products, sums)
    kept = np.ones(len(sums), bool)
    while found.min() < 0:
        kept &= found > 0
        found = np.zeros_like(sums)
        found[kept] = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
    return found


class Lengths:
    """How many frames speech of a text takes: a running mean, and how far single speeches stray. Texts are
    measured in UTF-8 bytes, which say as much of the duration in one script as in another. prior: frames of a
    byte, before anything was spoken."""

    def __init__(self, prior: float):
        self.mean = prior
        self.deviation = prior / 2
        self.num = 0

    def record(self, text_bytes: int, frames: int) -> None:
        each = frames / max(text_bytes, 1)
        self.num += 1
        weight = max(1 / self.num, RECENT_WEIGHT)
        strays = abs(each - self.mean) if self.num > 1 else each / 2
        self.deviation += weight * (strays - self.deviation)
        self.mean += weight * (each - self.mean)

    def expected(self, text_bytes: int) -> float:
        return self.mean * max(text_bytes, 1)

    def usual(self, text_bytes: int) -> int:
        """Return an upper estimate of a speech's frames (mean plus two deviations)."""
        return int(np.ceil((self.mean + 2 * self.deviation) * max(text_bytes, 1)))


@dataclass(frozen=True)
class Expected:
    """The prompt positions and the iterations of a request without a slot."""

    tokens: float
    iterations: float


@dataclass(frozen=True, eq=False)
class Outlook:
    """The state of a model at one iteration.

    max_concurrency: how many requests may speak at once. left: the remaining iterations of each stream.
    tokens: the positions of each stream's prompts that are not filled. first_iterations: the iterations of a
    stream before its first window is due. other_models_s: seconds of other models in an iteration."""

    max_concurrency: int
    first_iterations: int
    left: tuple[float, ...] = ()
    tokens: int = 0
    other_models_s: float = 0.0


class Line:
    """The requests without a slot, in order. As long as any of them waits, as many speak as may, and the next
    one follows a stream that ends. A request costs the same however many are in line."""

    def __init__(self, outlook: Outlook):
        self.outlook = outlook
        self.num = 0
        self.num_recordings = 0  # requests whose recordings are to be encoded
        self.tokens: float = outlook.tokens
        self._begins = 0.0
        self._ends = list(outlook.left)
        heapq.heapify(self._ends)

    @property
    def begins(self) -> float:
        """Iterations until the next one in line has a slot."""
        while len(self._ends) >= self.outlook.max_concurrency:
            self._begins = heapq.heappop(self._ends)
        return self._begins

    def join(self, one: Expected, has_recordings: bool = False) -> None:
        """Let a request join behind all others. has_recordings: that are not encoded yet."""
        heapq.heappush(self._ends, self.begins + one.iterations)
        self.num += 1
        self.num_recordings += has_recordings
        self.tokens += one.tokens


def capacity(costs: Costs, step_s: float, num_slots: int, other_models_s: float = 0.0) -> int:
    """Return how many streams can be made at once in real time; all slots, where not even one can.
    step_s: audio that a step makes of each."""
    if not costs.is_known:
        return num_slots
    iterations_s = costs.steady_s(np.arange(1, num_slots + 1)) + other_models_s  # [S], with so many
    if iterations_s[0] > step_s:
        return num_slots
    return max(1, int((iterations_s <= CAPACITY_PART * step_s).sum()))


def first_audio_s(costs: Costs, line: Line, newcomer: Expected, ready_s: float = 0.0) -> float:
    """Return the seconds from now to a newcomer's first audio, behind all in line. ready_s: until its prompt
    is made. Each stream takes a step an iteration."""
    outlook = line.outlook
    num = len(outlook.left)
    speaking = min(num + line.num + 1, max(outlook.max_concurrency, num))
    iteration_s = float(costs.steady_s(speaking)) + outlook.other_models_s
    tokens = line.tokens + newcomer.tokens
    waits_s = line.begins * iteration_s
    return max(waits_s, ready_s) + costs.prefill_s(tokens) + outlook.first_iterations * iteration_s


class Correction:
    """The factor on predictions that makes recent ones right on the average."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def record(self, predicted_s: float, took_s: float) -> None:
        """predicted_s: as it was corrected then."""
        if predicted_s > 0 and took_s > 0:
            self._log += CORRECTION_STEP * math.log(took_s / predicted_s)
            self._log = min(max(self._log, -math.log(MAX_CORRECTION)), math.log(MAX_CORRECTION))


class Forecaster:
    """Estimates of one model from its iterations, prompts and speeches, and predictions for a new request.

    first_iterations: of a stream, before its first window is due. steps: of a frame. is_timed: whether only
    as many streams may speak as can be made in real time. One thread records; `first_audio_s` may be asked
    from any."""

    def __init__(self, num_slots: int, frame_s: float, first_iterations: int, is_timed: bool, steps: int = 1):
        self.num_slots = num_slots
        self.frame_s = frame_s
        self.steps = steps
        self.is_timed = is_timed
        self.costs = Costs()
        self.correction = Correction()
        self.lengths = Lengths(1 / frame_s / TEXT_BYTES_HZ)
        self.prompt_tokens = 0.0  # of recent prompts
        # Of recent prompts, without and with recordings; none before the first.
        self.prepare_s: dict[bool, float] = {}
        self.num_prompts = {False: 0, True: 0}
        self.outlook = Outlook(num_slots, first_iterations)

    def seed(self, times: LaunchTimes, window_sizes: Sequence[int]) -> None:
        """Begin with launches that were timed before the first request."""
        self.costs.seed(times, self.num_slots, window_sizes)
        self.record_speakers(np.zeros(0), 0)

    def record_iteration(self, load: IterationLoad, took_s: float, all_s: float) -> None:
        """load, took_s: of this model's part; all_s: the iteration's time, with other models'."""
        self.costs.record(load, took_s)
        other_s = self.outlook.other_models_s
        other_s += RECENT_WEIGHT * (all_s - took_s - other_s)
        self.outlook = replace(self.outlook, other_models_s=other_s)

    def record_speakers(self, left: np.ndarray, tokens: int, speeds: Sequence[float] = ()) -> None:
        """left: frames that each stream is still to make. tokens: as in Outlook. speeds: at which listeners
        play."""
        self.outlook = replace(
            self.outlook,
            max_concurrency=self.max_concurrency(speeds),
            left=tuple((left * self.steps).tolist()),
            tokens=tokens,
        )

    def max_concurrency(self, speeds: Sequence[float]) -> int:
        """Return how many may speak at once, next to listeners who play at these speeds. A fast listener
        counts as often as its speed, unless the model alone cannot speak so fast."""
        if not self.is_timed or not self.costs.is_known:
            return self.num_slots
        step_s = self.frame_s / self.steps
        other_models_s = self.outlook.other_models_s
        num = capacity(self.costs, step_s, self.num_slots, other_models_s)
        max_speed = step_s / (float(self.costs.steady_s(1)) + other_models_s)
        extra = sum(speed - 1 for speed in speeds if 1 < speed <= max_speed)
        return max(1, num - math.floor(extra))

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration of those who speak; 0 before anything is known."""
        if not self.costs.is_known:
            return 0.0
        return float(self.costs.steady_s(len(self.outlook.left))) + self.outlook.other_models_s

    def record_prompt(self, tokens: int, took_s: float, has_recordings: bool) -> None:
        self.prompt_tokens += RECENT_WEIGHT * (tokens - self.prompt_tokens) if self.prompt_tokens else tokens
        self.num_prompts[has_recordings] += 1
        weight = max(1 / self.num_prompts[has_recordings], RECENT_WEIGHT)
        usual_s = self.prepare_s.get(has_recordings, took_s)
        self.prepare_s[has_recordings] = usual_s + weight * (took_s - usual_s)

    def expected(self, text_bytes: int) -> Expected:
        return Expected(self.prompt_tokens, self.steps * self.lengths.expected(text_bytes))

    def first_audio_s(self, line: Line, newcomer: Expected, has_recordings: bool) -> float | None:
        """Return the seconds from now to the first audio of a request at the end of the line; None before
        anything is known. Recordings are encoded one after the other."""
        if not self.costs.is_known:
            return None
        num_prepared = 1 + (line.num_recordings if has_recordings else 0)
        ready_s = num_prepared * self.prepare_s.get(has_recordings, 0.0)
        return first_audio_s(self.costs, line, newcomer, ready_s)
