"""The pages of one model's slots: a request gets more as it grows, and gives them away while it is paused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.engine.job import Job
from serving.engine.memory.pages import Pages
from zoo.contract import Prompt

_salts = itertools.count(1)  # one per loaded model: equal keys under other weights are other pages


class SlotPages:
    """runner: whose page tables are kept. chunk_pages: prefixes are shared in multiples of it."""

    def __init__(self, runner: Any, pages: Pages, chunk_pages: int):
        self.runner = runner
        self.pages = pages
        self.chunk_pages = chunk_pages
        self.salt = next(_salts)
        # Positions that the pages of each sequence hold.
        self.room = np.zeros(len(runner.kv_lens), np.int64)

    def num_needed(self, prompt: Prompt, frames: int | None = None) -> list[int]:
        """Return the pages of each lane for so many frames; None: the most that a request can ever need."""
        tokens = self.runner.page_tokens
        most = [-(-positions // tokens) for positions in prompt.max_positions]
        if frames is None:
            return most
        per_frame = self.runner.family.spec.steps_per_frame
        steps = frames * per_frame + max(prompt.max_steps - prompt.max_frames * per_frame, 0)
        lanes = zip(prompt.lanes, most, strict=True)
        return [min(-(-(len(lane.inputs) + steps) // tokens), limit) for lane, limit in lanes]

    def take(self, job: Job, needed: Sequence[int]) -> list[int] | None:
        """Give a job its pages. Return how many positions of each lane shared pages already hold, or None if
        there are too few pages."""
        shared = [
            self.pages.match(self.salt, lane.prefix_keys, self.runner.page_tokens, self.chunk_pages)
            for lane in job.prompt.lanes
        ]
        num_shared = sum(map(len, shared))
        fresh = self.pages.take(sum(needed) - num_shared)
        if fresh is None:
            for pages in shared:
                self.pages.give_back(pages)
            self.pages.shared -= num_shared
            return None
        dealt = iter(fresh)
        job.pages.lanes = [
            pages + list(itertools.islice(dealt, count - len(pages)))
            for pages, count in zip(shared, needed, strict=True)
        ]
        return [len(pages) * self.runner.page_tokens for pages in shared]

    def count(self, job: Job) -> None:
        """Record how many positions a job's pages hold."""
        self.room[self._sequences(job)] = [len(pages) * self.runner.page_tokens for pages in job.pages.lanes]

    def short_slots(self, slots: np.ndarray) -> list[int]:
        """Return which of the slots that take a step have no page for it."""
        sequences = self.runner.sequences(slots)
        is_short = self.runner.kv_lens[sequences] >= self.room[sequences]  # [L * B]
        if not is_short.any():
            return []
        return np.unique(slots[np.flatnonzero(is_short) % len(slots)]).tolist()

    def grow(self, job: Job) -> bool:
        """Give each lane that needs one a page more. Return whether there were enough."""
        [sequences] = self._sequences(job).reshape(-1, len(job.pages.lanes))
        lanes = np.flatnonzero(self.runner.kv_lens[sequences] >= self.room[sequences]).tolist()
        fresh = self.pages.take(len(lanes))
        if fresh is None:
            return False
        for lane, page in zip(lanes, fresh, strict=True):
            job.pages.lanes[lane].append(page)
            self.runner.set_pages(job.slot, lane, job.pages.lanes[lane])
        self.count(job)
        return True

    def num_written(self, job: Job) -> list[int]:
        """Return how many pages each lane has written to."""
        return (-(-self.runner.kv_lens[self._sequences(job)] // self.runner.page_tokens)).tolist()

    def needed_to_resume(self, job: Job) -> list[int]:
        """Return the pages of each lane of a paused job, for its prompt, its positions and its next step."""
        prompt = [len(lane.inputs) for lane in job.prompt.lanes]
        positions = np.maximum(self.runner.kv_lens[self._sequences(job)] + 1, prompt)
        return (-(-positions // self.runner.page_tokens)).tolist()

    def save(self, job: Job) -> None:
        """Copy what a job's pages hold to the host, and give them back."""
        lanes = zip(job.pages.lanes, self.num_written(job), strict=True)
        written = [page for pages, count in lanes for page in pages[:count]]
        job.pages.saved = self.runner.save(written)
        self.give_back(job)
        job.pages.lanes = [[] for _ in job.pages.lanes]
        self.count(job)

    def restore(self, job: Job, needed: Sequence[int]) -> bool:
        """Give a paused job so many pages for each lane. Return whether there were enough."""
        saved = job.pages.saved
        assert saved is not None, f"{job.id} is resumed, but it is not paused"
        fresh = self.pages.take(sum(needed))
        if fresh is None:
            return False
        dealt = iter(fresh)
        lanes = [list(itertools.islice(dealt, count)) for count in needed]
        for lane, pages in enumerate(lanes):
            self.runner.set_pages(job.slot, lane, pages)
        job.pages.lanes = lanes
        counts = zip(lanes, self.num_written(job), strict=True)
        self.runner.restore([page for pages, count in counts for page in pages[:count]], saved)
        job.pages.saved = None
        self.count(job)
        return True

    def publish(self, lane: int, keys: Sequence[int], job: Job) -> None:
        """Let later prompts find the pages that hold these keys."""
        self.pages.publish(self.salt, keys, self.runner.page_tokens, job.pages.lanes[lane])

    def forget(self, job: Job) -> None:
        """Let no later prompt find a job's pages: they may hold NaN."""
        for pages in job.pages.lanes:
            self.pages.forget(pages)

    def give_back(self, job: Job) -> None:
        for pages in job.pages.lanes:
            self.pages.give_back(pages)

    def _sequences(self, job: Job) -> np.ndarray:
        return self.runner.sequences(np.array([job.slot]))
