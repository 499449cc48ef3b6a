"""Admission by time: what turns take, how long speech gets, and from both when a request that comes now would be heard.

    Costs     what a turn takes, by what is launched in it
    Lengths   how many frames a text becomes
    Outlook   who speaks now: with who waits, what `first_audio_s` of a newcomer follows from

Pure arithmetic: estimates follow from what was recorded, and nothing here looks at a clock. VoxServe (arXiv 2602.00269)
has the two measures, time to first audio and streaming viability.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MEMORY = 0.99  # of an estimate, from one turn to the next: a hundred turns
PULL = 0.01  # of a turn: how much an estimate stays where it is, of whose part of the load nothing is known any more
STALE_TURNS = 100  # after which it may be tried again whether so many can speak
MIN_TURNS = 8  # before which nothing is predicted
SCALE = np.array((1.0, 8.0, 256.0, 32.0))  # of a turn: itself, slots, prompt positions, frames rendered
OUTLIER = 4.0  # times what was expected: a turn that took longer counts as one that took so long
MARGIN = 0.9  # of a frame's length: what turns may take, so that speakers stay in time
WEIGHT = 0.05  # of one value among those of late
BYTES_HZ = 15.0  # of text, in a second of speech
CORRECTION, MAX_CORRECTION = 0.1, math.log(3)  # of a prediction, by one that turned out


class Costs:
    """Seconds of a turn, as a sum over what is launched in it, none of which takes less than no time: least squares
    over the turns of late. What always comes together (of late there were eight slots in every turn) shares its
    time, somehow, and the sum is right."""

    def __init__(self) -> None:
        self.num_turns = 0
        self._last_turns: dict[int, int] = {}  # by how many slots took a step
        self._each = np.zeros(len(SCALE))  # seconds per SCALE
        self._products = np.zeros((len(SCALE), len(SCALE)))
        self._seconds = np.zeros(len(SCALE))

    @property
    def is_known(self) -> bool:
        return self.num_turns >= MIN_TURNS

    def record(self, slots: int, tokens: int, frames: int, took_s: float) -> None:
        """A turn: slots that took a step, prompt positions filled, frames rendered (the launches' shapes)."""
        load = np.array((1, slots, tokens, frames)) / SCALE
        expected_s = float(self._each @ load)
        if self.is_known and expected_s > 0:
            took_s = min(took_s, OUTLIER * expected_s)
        self._products = MEMORY * self._products + np.outer(load, load)
        self._seconds = MEMORY * self._seconds + took_s * load
        pull = PULL * np.eye(len(SCALE))
        self._each = solved(self._products + pull, self._seconds + PULL * self._each)
        self.num_turns += 1
        self._last_turns[slots] = self.num_turns

    def is_stale(self, slots: int) -> bool:
        """Whether a turn of so many slots, or more, was long ago. What is estimated of it then, no turn corrects: where always as
        many speak, their share of a turn and the turn's own cannot be told apart."""
        last = max((turn for num, turn in self._last_turns.items() if num >= slots), default=0)
        return self.num_turns - last >= STALE_TURNS

    def turn_s(self, slots: float = 0, tokens: float = 0, frames: float = 0) -> float:
        return float(self._each @ (np.array((1, slots, tokens, frames)) / SCALE))

    def steady_s(self, slots: np.ndarray | float) -> np.ndarray:
        """Of a turn in which so many speak: each takes a step, and a frame of each is rendered. [...]"""
        own, slot, _, frame = self._each / SCALE
        return own + (slot + frame) * np.asarray(slots)

    def prefill_s(self, tokens: float) -> float:
        return float(self._each[2] * tokens / SCALE[2])


def solved(products: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """products @ x = sums, products [N, N] positive definite -> x [N]; what would be negative is left out, and counts
    as nothing."""
    found, kept = np.zeros_like(sums), np.ones(len(sums), bool)
    while kept.any():
        found[:] = 0
        found[kept] = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
        if found.min() >= 0:
            break
        kept &= found > 0
    return found


class Lengths:
    """How many frames speech of a text takes, by the text's UTF-8 bytes, which say as much of its duration in one script
    as in another: a running mean, and how far single ones stray. prior: frames of a byte, before anything was
    spoken."""

    def __init__(self, prior: float):
        self.mean, self.deviation = prior, prior / 2
        self.num = 0

    def record(self, text_bytes: int, frames: int) -> None:
        each = frames / max(text_bytes, 1)
        self.num += 1
        weight = max(1 / self.num, WEIGHT)
        strays = abs(each - self.mean) if self.num > 1 else each / 2
        self.deviation += weight * (strays - self.deviation)
        self.mean += weight * (each - self.mean)

    def expected(self, text_bytes: int) -> float:
        return self.mean * max(text_bytes, 1)

    def usual(self, text_bytes: int) -> int:
        """As many as few exceed."""
        return int(np.ceil((self.mean + 2 * self.deviation) * max(text_bytes, 1)))


@dataclass(frozen=True)
class Expected:
    """Of a request without a slot: its prompt's positions, and its frames."""

    tokens: float
    frames: float


@dataclass(frozen=True, eq=False)
class Outlook:
    """Of a model, as of one turn. places: how many may speak at once. left: frames that each speaker is still to make;
    tokens: positions of their prompts that are not filled. first_frames: of a tape, before its first window is due.
    other_s: what other models take of a turn."""

    places: int
    first_frames: int
    left: tuple[float, ...] = ()
    tokens: int = 0
    other_s: float = 0.0


def capacity(costs: Costs, frame_s: float, num_slots: int, other_s: float = 0.0) -> int:
    """How many may speak at once so that each is made faster than it is heard; all, where even one is not."""
    if not costs.is_known:
        return num_slots
    turns_s = costs.steady_s(np.arange(1, num_slots + 1)) + other_s  # [S], with so many
    if turns_s[0] > frame_s:
        return num_slots
    return max(1, int((turns_s <= MARGIN * frame_s).sum()))


def first_audio_s(
    costs: Costs, outlook: Outlook, line: Sequence[Expected], newcomer: Expected, ready_s: float = 0.0
) -> float:
    """From now to a newcomer's first audio. line: who has no slot yet and goes before it. ready_s: until its prompt is
    made.

    Each speaker makes a frame a turn. As long as anybody waits, every place is taken, and who ends is followed by the
    next in the line."""
    speaking = min(len(outlook.left) + len(line) + 1, max(outlook.places, len(outlook.left)))
    turn_s = float(costs.steady_s(speaking)) + outlook.other_s
    tokens = outlook.tokens + sum(one.tokens for one in line) + newcomer.tokens
    waits_s = _begins(outlook, line) * turn_s
    return max(waits_s, ready_s) + costs.prefill_s(tokens) + outlook.first_frames * turn_s


def _begins(outlook: Outlook, line: Sequence[Expected]) -> float:
    """-> turns until a newcomer has a slot."""
    begins, ends = 0.0, list(outlook.left)
    heapq.heapify(ends)
    for frames in (*(one.frames for one in line), 0.0):
        while len(ends) >= outlook.places:
            begins = heapq.heappop(ends)
        heapq.heappush(ends, begins + frames)
    return begins


class Correction:
    """What predictions are multiplied with, so that they are right on the average of late."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def record(self, predicted_s: float, took_s: float) -> None:
        """predicted_s: as it was corrected then."""
        if predicted_s > 0 and took_s > 0:
            self._log += CORRECTION * math.log(took_s / predicted_s)
            self._log = min(max(self._log, -MAX_CORRECTION), MAX_CORRECTION)


class Forecaster:
    """Of one model: what is recorded of its turns, prompts and speeches, and what follows for who comes now.

    num_slots: that there are. first_frames: of a tape, before its first window is due. is_timed: whether only so many may
    speak as are made faster than they are heard. One thread records; `first_audio_s` may be asked from any."""

    def __init__(self, num_slots: int, frame_s: float, first_frames: int, is_timed: bool):
        self.num_slots, self.frame_s, self.is_timed = num_slots, frame_s, is_timed
        self.costs, self.correction = Costs(), Correction()
        self.lengths = Lengths(1 / frame_s / BYTES_HZ)
        self.prompt_tokens = 0.0  # of late
        self.prepare_s = {False: 0.0, True: 0.0}  # of late, without and with recordings
        self.outlook = Outlook(num_slots, first_frames)

    def record_turn(self, load: tuple[int, int, int], took_s: float, all_s: float) -> None:
        """load: slots, prompt positions and frames of this model's turn; all_s: the turn's time, with other models'."""
        self.costs.record(*load, took_s)
        other_s = self.outlook.other_s
        self.outlook = replace(self.outlook, other_s=other_s + WEIGHT * (all_s - took_s - other_s))

    def record_speakers(self, left: np.ndarray, tokens: int, heard_frame_s: float | None = None) -> None:
        """left, tokens: as in Outlook. heard_frame_s: a frame's length as the fastest listener plays it."""
        places = self.places(self.frame_s if heard_frame_s is None else heard_frame_s)
        self.outlook = replace(self.outlook, places=places, left=tuple(left.tolist()), tokens=tokens)

    def places(self, heard_frame_s: float) -> int:
        """How many may speak at once where the fastest of them is heard so."""
        if not self.is_timed:
            return self.num_slots
        return capacity(self.costs, heard_frame_s, self.num_slots, self.outlook.other_s)

    @property
    def turn_s(self) -> float:
        """Of those who speak; 0 before anything is known."""
        if not self.costs.is_known:
            return 0.0
        return float(self.costs.steady_s(len(self.outlook.left))) + self.outlook.other_s

    def record_prompt(self, tokens: int, took_s: float, has_recordings: bool) -> None:
        self.prompt_tokens += WEIGHT * (tokens - self.prompt_tokens) if self.prompt_tokens else tokens
        self.prepare_s[has_recordings] += WEIGHT * (took_s - self.prepare_s[has_recordings])

    def expected(self, text_bytes: int) -> Expected:
        return Expected(self.prompt_tokens, self.lengths.expected(text_bytes))

    def first_audio_s(
        self, text_bytes: int, line: Sequence[Expected], has_recordings: bool, recordings_ahead: int
    ) -> float | None:
        """From now to the first audio of a request that is accepted now; None before anything is known. line: who has no
        slot yet; recordings_ahead: those whose recordings are encoded before its own."""
        if not self.costs.is_known:
            return None
        ready_s = self.prepare_s[has_recordings] * (1 + recordings_ahead)
        newcomer = self.expected(text_bytes)
        return self.correction.factor * first_audio_s(self.costs, self.outlook, line, newcomer, ready_s)
