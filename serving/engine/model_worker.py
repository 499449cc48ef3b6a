"""One model in the engine: its queue, its slots, its launches, and what is known of every request in them.

    arrive ─> waiting ─admit─> slot ─launch─> prefill, step, step, ... ─collect─> frames ready ─render─> samples ─deliver─> client

The engine drives it, one round a turn. With the other models it shares the pages, which it takes and gives
back, and nothing else.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from serving.engine.job import Audio, Job
from serving.engine.pages import Pages
from serving.engine.runner import Arena, AsyncCopy, Runner
from serving.engine.scheduler import Policy, Render, Scheduler
from zoo.contract import Family, Prompt, RequestError

CHUNK_PAGES = 4
_salts = itertools.count(1)  # one per loaded model: equal keys under other weights are other pages


class ModelWorker:
    """A family with `num_slots` slots of its own, on pages that it may have to share. Raises ValueError for a
    policy that is none."""

    def __init__(
        self,
        family: Family[Any],
        arena: Arena,
        pages: Pages,
        *,
        num_slots: int,
        policy: str,
        compile: bool,
        report_lag: int,
        clock: Callable[[], float],
        is_deterministic: bool = False,
        codec: str = "float32",
    ):
        spec = family.spec
        self.family, self.pages, self.report_lag, self.clock = family, pages, report_lag, clock
        frame_s = 1 / spec.frame_rate_hz
        # Where equal requests are to give equal bits, a prompt is always cut alike, and shared in such
        # pieces.
        self.chunk_pages = CHUNK_PAGES if is_deterministic else 1
        chunk_tokens = CHUNK_PAGES * arena.page_tokens(family) if is_deterministic else None
        self.scheduler = Scheduler(
            num_slots, Policy.named(policy), spec.window, frame_s, spec.lanes, chunk_tokens
        )
        self.runner = Runner(
            family, num_slots, arena, compile, is_deterministic, self.scheduler.max_prefill_tokens, codec
        )
        self.salt = next(_salts)
        self.is_deterministic = is_deterministic

        self.waiting: deque[Job] = deque()
        self.num_admitted, self.queue_s = 0, 0.0  # what those waited who got in
        self.running: dict[int, Job] = {}  # by slot
        self.free_slots = list(range(num_slots - 1, -1, -1))
        # grows when a slot changes hands, so that late reports find their own request
        self._tenancy = np.zeros(num_slots, np.int64)
        # A window that is under way reads its slot, beside the stream on which the next tenant would move in.
        self.num_rendering = np.zeros(num_slots, np.int64)  # windows under way
        self.leaving: set[int] = set()  # slots without a tenant that are free when these are done
        self.launches: deque[tuple[np.ndarray, np.ndarray, AsyncCopy]] = deque()
        self.renders: deque[tuple[Render, np.ndarray, AsyncCopy]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.launches or self.renders)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done for those who speak before more text arrives."""
        return not self.launches and not self.renders and self.scheduler.is_idle

    def num_pages(self, prompt: Prompt) -> int:
        """All that a request can ever need."""
        return sum(self._lane_pages(prompt))

    def admit(self) -> bool:
        """Give the first in the queue a slot and all the pages of all its lanes: who speaks is never paused.
        -> whether there were enough."""
        job, page_tokens = self.waiting[0], self.runner.page_tokens
        lanes, needed = job.prompt.lanes, self._lane_pages(job.prompt)
        shared = [
            self.pages.match(self.salt, lane.prefix_keys, page_tokens, self.chunk_pages) for lane in lanes
        ]
        num_shared = sum(map(len, shared))
        fresh = self.pages.take(sum(needed) - num_shared)
        if fresh is None:
            for pages in shared:
                self.pages.give_back(pages)
            self.pages.shared -= num_shared  # nothing came of it
            return False
        self.waiting.popleft()
        self.num_admitted += 1
        self.queue_s += self.clock() - job.queued_s
        job.slot, dealt = self.free_slots.pop(), iter(fresh)
        job.pages = [
            pages + list(itertools.islice(dealt, count - len(pages)))
            for pages, count in zip(shared, needed, strict=True)
        ]
        skips = [len(pages) * page_tokens for pages in shared]
        self.running[job.slot] = job
        self.scheduler.open(
            job.slot,
            [len(lane.inputs) - 1 for lane in lanes],
            skips,
            grid_offset=job.prompt.grid_offset,
            steps=job.prompt.num_fed_steps,
            is_pinned=job.is_pinned or self.is_deterministic,
            plays_until_s=job.plays_until_s,
        )
        self.runner.streams.lm.wait_for(job.is_made)
        self.runner.open(job.slot, job.prompt, job.pages, skips)
        return True

    def feed(self, job: Job, tokens: Sequence[int], is_last: bool) -> None:
        """More text for a request in a slot. Raises RequestError for more than the slot holds, and behind the
        last of the text."""
        if self.scheduler.has_all_text(job.slot):
            instead = "feed a request that is_open, and not after its last text"
            raise RequestError("text", f"more text came, but the text was complete: {instead}")
        steps = self.runner.feed(job.slot, tokens, is_last)
        self.scheduler.feed(job.slot, None if is_last else steps)

    def release(self, job: Job) -> None:
        """Take back whatever a request holds. What is under way for its slot still runs, ahead of anything
        the next tenant launches."""
        if job.slot < 0:
            self.waiting.remove(job)
            return
        del self.running[job.slot]
        job.past_frames += job.pass_frames
        job.plays_until_s = float(self.scheduler.plays_until_s[job.slot])
        self.scheduler.close(job.slot)
        self.runner.close(job.slot)
        self._tenancy[job.slot] += 1
        for pages in job.pages:
            self.pages.give_back(pages)
        self.leaving.add(job.slot)
        self._free_slots()
        job.slot, job.pages = -1, []

    def _free_slots(self) -> None:
        free = [slot for slot in self.leaving if not self.num_rendering[slot]]
        self.free_slots.extend(free)
        self.leaving.difference_update(free)

    def publish_turn(self, job: Job) -> None:
        """Let the conversation's next turn find what was generated in the KV cache. For a pass that is
        over."""
        lane, pages = job.prompt.lanes[0], job.pages[0]
        keys = (*lane.prefix_keys, *self.family.end_turn(job.prompt, self.tape(job)))
        filled = int(self.runner.kv_lens[self.runner.sequences(np.array([job.slot]))[0]])
        self.pages.publish(self.salt, keys[:filled], self.runner.page_tokens, pages)

    def tape(self, job: Job) -> Tensor:
        """The frames of its pass so far [F, *frame], on the host."""
        return self.runner.frames(job.slot, int(self.scheduler.num_ready[job.slot]))

    def launch(self) -> bool:
        """One stretch of prompts, then one step of everybody who speaks. -> whether there was anything to
        launch."""
        chunks = self.scheduler.next_chunks()
        if chunks:
            for launch in [[chunk] for chunk in chunks] if self.is_deterministic else [chunks]:
                self.runner.prefill(launch)
            for chunk in chunks:
                self.scheduler.record_prefill(chunk)
                if chunk.is_last:
                    job, lane = self.running[chunk.slot], chunk.lane
                    self.pages.publish(
                        self.salt,
                        job.prompt.lanes[lane].prefix_keys[:-1],
                        self.runner.page_tokens,
                        job.pages[lane],
                    )
        slots = self.scheduler.decoding_slots()
        if slots.size:
            self.launches.append((slots, self._tenancy[slots], self.runner.step(slots)))
            self.scheduler.record_step(slots)
        return bool(chunks) or bool(slots.size)

    def collect(self, launched: bool, is_alone: bool = True) -> None:
        """What came of it: reports, the windows that are due because of them, samples to their listeners.
        While there are launches under way, the last `report_lag` of them are left alone. Windows are handed on
        as they are done; where there is nothing else to do (`is_alone`: for no model), the next one is waited
        for."""
        self._collect_reports(self.report_lag if launched else 0)
        self._render()
        self._deliver(is_waiting=is_alone and not launched)

    def finished(self) -> list[Job]:
        """Who has spoken, and whose listener has all of it."""
        return [self.running[int(slot)] for slot in self.scheduler.finished_slots()]

    def stats(self, arriving: int) -> dict[str, int | float]:
        """arriving: requests that are on their way into the queue."""
        return {
            "slots": self.runner.num_slots,
            "running": len(self.running),
            "waiting": len(self.waiting) + arriving,
            "underruns": self.scheduler.underruns,
            "graph_misses": self.runner.graph_misses,
            "admitted": self.num_admitted,
            "queue_s": self.queue_s,
        }

    def _lane_pages(self, prompt: Prompt) -> list[int]:
        return [-(-positions // self.runner.page_tokens) for positions in prompt.max_positions]

    def _collect_reports(self, report_lag: int) -> None:
        while len(self.launches) > report_lag:
            slots, tenancy, copy = self.launches.popleft()
            [report] = copy.read()
            same = self._tenancy[slots] == tenancy
            slots, (ready, done, written) = slots[same], report[same].T
            # A slot that was done already took a step in vain, whose report says again what the one before
            # said.
            has_text = ((written >= 0) | (done > 0)) & ~self.scheduler.is_done[slots]
            self.scheduler.report(slots, ready, done > 0)
            for slot, token, is_done in zip(
                slots[has_text].tolist(), written[has_text].tolist(), done[has_text].tolist(), strict=True
            ):
                self.running[slot].write(token, bool(is_done))

    def _render(self) -> None:
        for render in self.scheduler.take_due_windows(self.clock()):
            self.num_rendering[render.slots] += 1
            self.renders.append((render, self._tenancy[render.slots], self.runner.render(render)))

    def _deliver(self, is_waiting: bool) -> None:
        while self.renders and (is_waiting or self.renders[0][2].is_there):
            is_waiting = False
            render, tenancy, copy = self.renders.popleft()
            samples, valid = copy.read()
            self.num_rendering[render.slots] -= 1
            same = np.flatnonzero(self._tenancy[render.slots] == tenancy)
            slots, counts, num_samples = render.slots[same], render.count[same], valid[same]
            for row, slot, frames, num in zip(
                same.tolist(), slots.tolist(), counts.tolist(), num_samples.tolist(), strict=True
            ):
                self.running[slot].deliver(Audio(samples[row, :num].copy(), frames))
            given_s = num_samples / self.family.spec.sample_rate_hz
            self.scheduler.record_delivery(
                slots, counts, given_s, render.is_last[same], render.handed_s, self.clock()
            )
        self._free_slots()
