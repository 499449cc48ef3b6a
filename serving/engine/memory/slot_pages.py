"""The pages of one model's slots: a request gets more as it grows, and gives them away while it is paused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from serving.engine.device.arena import paged_past
from serving.engine.job import Job
from serving.engine.memory.pages import Pages
from serving.engine.memory.past_pages import PastPages
from zoo.contract import NEVER, Prompt

_salts = itertools.count(1, 2)  # one per loaded model: equal keys under other weights are other pages


class SlotPages:
    """runner: whose page tables are kept. chunk_pages: prefixes are shared in multiples of it.

    Counts of needed pages are those of each lane, and with a renderer's past in pages one more.
    """

    def __init__(self, runner: Any, pages: Pages, chunk_pages: int):
        self.runner = runner
        self.pages = pages
        self.chunk_pages = chunk_pages
        self.salt = next(_salts)
        # Positions that the pages of each sequence hold.
        self.room = np.zeros(len(runner.kv_lens), np.int64)
        # Positions of each slot's first lane that a report has shown to be finite.
        self.num_finite = np.zeros(runner.num_slots, np.int64)
        past = paged_past(runner.family)
        self.past = None if past is None else PastPages(runner, pages, past)

    def num_needed(self, prompt: Prompt, frames: int | None = None) -> list[int]:
        """Return the number of pages of each lane for `frames` frames, or for the longest speech (None)."""
        tokens, num_lanes = self.runner.page_tokens, self.runner.family.spec.lanes
        most = [-(-positions // tokens) for positions in prompt.max_positions]
        closed = [0] * (num_lanes - len(most))
        past = self._past_needed(prompt, prompt.max_frames if frames is None else frames)
        if frames is None:
            return most + closed + past
        per_frame = self.runner.family.spec.steps_per_frame
        lead = prompt.lead_steps or max(prompt.max_steps - prompt.max_frames * per_frame, 0)
        steps = frames * per_frame + lead
        lanes = zip(prompt.lanes, most, strict=False)  # a lane that is not open needs none yet
        needed = [min(-(-(len(lane.inputs) + steps) // tokens), limit) for lane, limit in lanes]
        return needed + [0] * (num_lanes - len(needed)) + past

    def _past_needed(self, prompt: Prompt, frames: int) -> list[int]:
        return [] if self.past is None else [self.past.num_needed(prompt, frames)]

    def take(self, job: Job, needed: Sequence[int]) -> list[int] | None:
        """Give a job its pages. Return how many positions of each lane shared pages already hold, or None if
        there are too few pages."""
        shared = [
            self.pages.match(self.salt, lane.prefix_keys, self.runner.page_tokens, self.chunk_pages)
            for lane in job.prompt.lanes
        ]
        num_lanes = self.runner.family.spec.lanes
        shared += [[] for _ in range(num_lanes - len(shared))]
        if self.past is not None:
            shared.append(self.past.match(job.prompt))
        num_shared = sum(map(len, shared))
        fresh = self.pages.take(sum(needed) - num_shared)
        if fresh is None:
            for pages in shared:
                self.pages.undo_match(pages)
            return None
        dealt = iter(fresh)
        held = [
            pages + list(itertools.islice(dealt, count - len(pages)))
            for pages, count in zip(shared, needed, strict=True)
        ]
        job.pages.lanes = held[:num_lanes]
        job.pages.past = list(itertools.chain(*held[num_lanes:]))
        job.pages.num_past = sum(map(len, shared[num_lanes:]))
        return [len(pages) * self.runner.page_tokens for pages in shared[: len(job.prompt.lanes)]]

    def open_lane(self, job: Job, length: int) -> int | None:
        """Give a job the pages of its second lane, behind `length` inputs that all requests share. Return how
        many positions shared pages already hold, or None if there are too few pages."""
        tokens = self.runner.page_tokens
        with self.runner.streams.lm.here():  # where a prefill reads the inputs
            lane = self.runner.family.second_lane(length)
        shared = self.pages.match(self.salt, lane.prefix_keys, tokens, self.chunk_pages)
        own = job.pages.lanes[1]
        kept = own[len(shared) :]
        lacking = max(-(-(length + 1) // tokens) - len(shared) - len(kept), 0)
        fresh = self.pages.take(lacking)
        if fresh is None:
            self.pages.undo_match(shared)
            return None
        self.pages.give_back(own[: len(shared)])
        job.prompt.null = lane
        job.pages.lanes[1] = shared + kept + fresh
        self.runner.open_lane(job.slot, lane, job.pages.lanes[1], len(shared) * tokens)
        self.count(job)
        return len(shared) * tokens

    def open(self, job: Job) -> None:
        """Begin a pass on a job's pages, if it has any. Write its past to those that do not hold it."""
        self.num_finite[job.slot] = 0
        if self.past is not None and job.pages.past:
            self.past.open(job)
        self.count(job)

    def count(self, job: Job) -> None:
        """Record how many positions a job's pages hold."""
        self.room[self._sequences(job)] = [len(pages) * self.runner.page_tokens for pages in job.pages.lanes]
        if self.past is not None:
            self.past.count(job)

    def short_slots(self, slots: np.ndarray, frames: np.ndarray) -> list[int]:
        """Return which of the slots that take a step have no page for it. frames: that they then have at
        most. All [B]."""
        if not slots.size:
            return []
        sequences = self.runner.sequences(slots)
        is_full = (self.runner.kv_lens >= self.room)[sequences] & self._is_live(slots)  # [L * B]
        is_short = is_full.reshape(-1, len(slots)).any(0)  # [B]
        if self.past is not None:
            is_short |= frames > self.past.room[slots]
        return slots[is_short].tolist()

    def grow(self, job: Job, frames: int) -> bool:
        """Give each lane its next page if it needs one, and the past its pages for `frames` frames. Return
        whether there were enough pages."""
        [sequences] = self._sequences(job).reshape(-1, len(job.pages.lanes))
        is_full = (self.runner.kv_lens >= self.room)[sequences] & self._is_live(np.array([job.slot]))
        lanes = np.flatnonzero(is_full).tolist()
        num_past = max(sum(self._past_needed(job.prompt, frames)) - len(job.pages.past), 0)
        fresh = self.pages.take(len(lanes) + num_past)
        if fresh is None:
            return False
        for lane, page in zip(lanes, fresh, strict=False):
            job.pages.lanes[lane].append(page)
            self.runner.set_pages(job.slot, lane, job.pages.lanes[lane])
        job.pages.past += fresh[len(lanes) :]
        if num_past:
            self.runner.set_past(job.slot, job.pages.past)
        self.count(job)
        return True

    def num_written(self, job: Job) -> list[int]:
        """Return how many pages each lane has written to."""
        written = self.runner.kv_lens[self._sequences(job)]
        return (-(-written // self.runner.page_tokens)).tolist()

    def needed_to_resume(self, job: Job, frames: int) -> list[int]:
        """Return the number of pages of each lane that a paused job needs for its prompt, its positions and
        its next step. It has at most `frames` frames after that step."""
        prompt = [len(lane.inputs) for lane in job.prompt.lanes]
        if job.opens_lane_at is not None:
            prompt.append(job.opens_lane_at + 1)
        positions = np.zeros(len(job.pages.lanes), np.int64)
        positions[: len(prompt)] = prompt
        live = self._is_live(np.array([job.slot]))
        positions = np.maximum(positions, (self.runner.kv_lens[self._sequences(job)] + 1) * live)
        past = self._past_needed(job.prompt, frames)
        pages = (-(-positions // self.runner.page_tokens)).tolist()
        needed = pages + [max(n, job.pages.num_past) for n in past]
        # a step that was launched behind the last one has no next step
        return list(map(min, needed, self.num_needed(job.prompt)))

    def save(self, job: Job) -> None:
        """Copy what a job's pages hold to the host, and give them back."""
        lanes = zip(job.pages.lanes, self.num_written(job), strict=True)
        written = [page for pages, count in lanes for page in pages[:count]]
        job.pages.saved = self.runner.save(written)
        if self.past is not None:
            self.past.save(job)
        self.give_back(job)
        job.pages.lanes = [[] for _ in job.pages.lanes]
        job.pages.past = []
        self.count(job)

    def restore(self, job: Job, needed: Sequence[int]) -> bool:
        """Give a paused job the pages that it needs. Return whether there were enough."""
        saved = job.pages.saved
        assert saved is not None, f"{job.id} is resumed, but it is not paused"
        fresh = self.pages.take(sum(needed))
        if fresh is None:
            return False
        dealt = iter(fresh)  # the job's before a launch, which may run out of memory
        job.pages.lanes = [list(itertools.islice(dealt, count)) for count in needed[: len(job.pages.lanes)]]
        job.pages.past = list(dealt)
        for lane, pages in enumerate(job.pages.lanes):
            self.runner.set_pages(job.slot, lane, pages)
        counts = zip(job.pages.lanes, self.num_written(job), strict=True)
        self.runner.restore([page for pages, count in counts for page in pages[:count]], saved)
        job.pages.saved = None
        if self.past is not None:
            self.past.restore(job)
        self.count(job)
        return True

    def record_finite(self, slots: np.ndarray, kv_lens: np.ndarray) -> list[tuple[int, int]]:
        """Record that steps of slots with kv_lens positions in their first lanes gave finite values, all [B].
        Return the slots and lanes whose prompts are thereby known to be finite: a step reads all of them."""
        known = self.num_finite[slots]
        self.num_finite[slots] = kv_lens
        spec = self.runner.family.spec
        lanes = range(1 if spec.opens_late else spec.lanes)
        found = [(slot, lane) for slot in slots[known == 0].tolist() for lane in lanes]
        if spec.opens_late:
            opens_at = self.runner.table.opens_at[slots]
            has_joined = (known <= opens_at) & (opens_at < kv_lens)
            found += [(slot, 1) for slot in slots[has_joined].tolist()]
        return found

    def publish(self, lane: int, keys: Sequence[int], job: Job) -> None:
        """Let later prompts find the pages that hold these keys, unless the job is paused: then they are
        others'."""
        if job.pages.saved is None:
            self.pages.publish(self.salt, keys, self.runner.page_tokens, job.pages.lanes[lane])

    def forget(self, job: Job) -> None:
        """Let no later prompt find the pages of a job's prompt: they may hold NaN. A paused job has given
        them back."""
        for lane in job.prompt.lanes:
            self.pages.forget(self.salt, lane.prefix_keys, self.runner.page_tokens)
        if self.past is not None:
            self.past.forget(job.prompt)

    def give_back(self, job: Job) -> None:
        for pages in (*job.pages.lanes, job.pages.past):
            self.pages.give_back(pages)

    def give_back_lanes(self, job: Job) -> Callable[[], None]:
        """Give back the pages of the lanes. Return what gives back those of the past, which renders in flight
        still use."""
        for pages in job.pages.lanes:
            self.pages.give_back(pages)
        return partial(self.pages.give_back, job.pages.past)

    def _is_live(self, slots: np.ndarray) -> np.ndarray:
        """Return which lanes of the slots hold positions, [L * B] in blocks of B. Only one that opens late
        may not."""
        if not self.runner.family.spec.opens_late:
            return np.ones(len(slots) * self.runner.family.spec.lanes, bool)
        return np.concatenate((np.ones(len(slots), bool), self.runner.table.opens_at[slots] < NEVER))

    def _sequences(self, job: Job) -> np.ndarray:
        return self.runner.sequences(np.array([job.slot]))
