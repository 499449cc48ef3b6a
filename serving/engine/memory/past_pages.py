"""The pages of a renderer's past: a stream takes those of a chunk as its frames reach it, and shares the
chunks of its prompt with streams of the same voice.

    room in frames     |-- chunk --|-- chunk --|-- chunk --|
    stream             | prompt's frames    | frames on the tape ...
                       | shared    | own
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.engine.job import Job
from serving.engine.memory.pages import Pages
from zoo.contract import Past, Prompt

_salts = itertools.count(2, 2)  # one per loaded model, and none of the lanes'
UNBOUNDED = np.iinfo(np.int64).max  # frames that a past of all its chunks has room for


class PastPages:
    """runner: who reads and writes the pages."""

    def __init__(self, runner: Any, pages: Pages, past: Past):
        self.runner = runner
        self.pages = pages
        self.past = past
        self.chunk_pages = runner.arena.chunk_pages(runner.family)
        self.salt = next(_salts)
        self.room = np.zeros(runner.num_slots, np.int64)  # frames of each slot's tape

    def num_needed(self, prompt: Prompt, frames: int) -> int:
        """Return the number of pages for `frames` frames on the tape, or for all that the pass can have."""
        return self.chunk_pages * self.past.chunks(prompt.past_frames + min(frames, prompt.max_frames))

    def match(self, prompt: Prompt) -> list[int]:
        """Return indexed pages of the prompt's chunks, with one reference on each."""
        keys = self._keys(prompt)
        return self.pages.match(self.salt, [*keys, 0], 1, self.chunk_pages) if keys else []

    def open(self, job: Job) -> None:
        """Write the prompt's chunks to a job's pages, but for the first `num_past`, and let others find
        them."""
        self.runner.set_past(job.slot, job.pages.past)
        keys, num_shared = self._keys(job.prompt), job.pages.num_past
        if len(keys) > num_shared:
            self.runner.fill_past(
                job.prompt, num_shared // self.chunk_pages, job.pages.past[num_shared : len(keys)]
            )
            self.pages.publish(self.salt, keys, 1, job.pages.past[: len(keys)])
        job.pages.num_past = 0

    def forget(self, prompt: Prompt) -> None:
        """Let no later prompt find the prompt's chunks."""
        self.pages.forget(self.salt, self._keys(prompt), 1)

    def count(self, job: Job) -> None:
        """Record how many frames a job's pages have room for."""
        num_chunks = len(job.pages.past) // self.chunk_pages
        is_whole = num_chunks >= self.past.max_chunks
        room = UNBOUNDED if is_whole else num_chunks * self.past.frames - job.prompt.past_frames
        self.room[job.slot] = room

    def save(self, job: Job) -> None:
        job.pages.saved_past = self.runner.save_past(job.pages.past)
        job.pages.num_past = len(job.pages.past)

    def restore(self, job: Job) -> None:
        """Write a paused job's past to its new pages."""
        if not job.pages.num_past:  # it was paused before it began
            return self.open(job)
        self.runner.set_past(job.slot, job.pages.past)
        assert job.pages.saved_past is not None, f"{job.id} is resumed without its past"
        self.runner.restore_past(job.pages.past[: job.pages.num_past], job.pages.saved_past)
        job.pages.saved_past = None
        job.pages.num_past = 0

    def _keys(self, prompt: Prompt) -> Sequence[int]:
        """Return one key for each page of the prompt's chunks."""
        return [key for key in prompt.past_keys for _ in range(self.chunk_pages)]
