"""One model in the engine: its queue, its slots, its launches, and what is known of every request in them.

    arrive ─> waiting ─admit─> slot ─launch─> prefill, step, step, ... ─collect─> frames ready ─render─> samples ─deliver─> client

The engine drives it, one round a turn. With the other models it shares the pages, which it takes and gives
back, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from serving.engine.admission import Forecaster
from serving.engine.job import Audio, Job, Place
from serving.engine.launches import Render
from serving.engine.pages import Pages
from serving.engine.policy import PREFILL_TURNS, RENDERS_UNDER_WAY, Policy
from serving.engine.runner import Arena, AsyncCopy, Runner
from serving.engine.scheduler import Scheduler
from serving.histogram import Histogram
from zoo.contract import Family, Prompt, RequestError
from zoo.text import odd_length

CHUNK_PAGES = 4
SPARE_S = 0.3  # of audio that each listener has in hand, where one more speaks than estimates allow
_salts = itertools.count(1)  # one per loaded model: equal keys under other weights are other pages


class ModelWorker:
    """A family with `num_slots` slots of its own, on pages that it may have to share. is_timed: only so many speak at
    once as are made faster than they are heard. grows: a request gets the pages that it usually needs, and more as it
    goes; else all that it can ever need. after_delivery: called when some of a turn's audio was given, and more may be
    made; between: after each window, when requests may come and go. Raises ValueError for a policy that is none."""

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
        make_runner: Callable[..., Any] = Runner,
        is_timed: bool = False,
        grows: bool = False,
        max_unread_s: float = np.inf,
        is_deterministic: bool = False,
        codec: str = "float32",
        after_delivery: Callable[[], None] = lambda: None,
        between: Callable[[], None] = lambda: None,
    ):
        spec = family.spec
        self.after_delivery, self.between = after_delivery, between
        self.family, self.pages, self.report_lag, self.clock = family, pages, report_lag, clock
        frame_s, is_gpu = 1 / spec.frame_rate_hz, family.device.type == "cuda"
        # Where equal requests are to give equal bits, a prompt is always cut alike, and shared in such
        # pieces.
        self.chunk_pages = CHUNK_PAGES if is_deterministic else 1
        chunk_tokens = CHUNK_PAGES * arena.page_tokens(family) if is_deterministic else None
        self.scheduler = Scheduler(
            num_slots,
            Policy.named(policy),
            spec.window,
            frame_s,
            spec.lanes,
            chunk_tokens,
            max_unread_s,
            prefill_turns=PREFILL_TURNS if is_gpu else 1,
            hold_s=spec.window.hold_samples / spec.sample_rate_hz,
            is_one_by_one=family.strategy.cuts_renders,
        )
        self.most_renders = RENDERS_UNDER_WAY if is_gpu else math.inf  # under way
        self.runner = make_runner(
            family, num_slots, arena, compile, is_deterministic, self.scheduler.max_prefill_tokens, codec
        )
        self.scheduler.is_one_by_one &= self.runner.is_synchronous  # else steps wait for no window
        self.salt = next(_salts)
        self.is_deterministic, self.grows = is_deterministic, grows

        # what is known of its time: of turns, prompts and speeches
        first_frames = self.scheduler.first_frames + report_lag + 1
        self.forecaster = Forecaster(num_slots, frame_s, first_frames, is_timed)
        self.load = (0, 0, 0)  # slots, prompt positions and rendered frames of this turn

        self.line: dict[
            str, Place
        ] = {}  # all who have no slot yet, wherever they are: the engine's lock guards it
        self.waiting: deque[Job] = deque()  # those of them whose prompts are made
        self.num_admitted, self.queue_s = 0, 0.0  # what those waited who got in
        self.num_refused, self.num_left_early = 0, 0  # for want of room; before their prompt was made
        self.audio_s = 0.0  # that was delivered
        self.first_audio_s: float | None = None  # of the last that was first heard
        self.num_short, self.num_long = 0, 0  # passes whose speech is no speech of their text
        self.queue_times = Histogram()
        self.running: dict[int, Job] = {}  # by slot
        self.room = np.zeros(
            len(self.runner.kv_lens), np.int64
        )  # positions that the pages of each sequence hold
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

    def has_place(self, is_flex: bool, speed: float = 1.0) -> bool:
        """Whether one more may speak now, whose listener plays at that speed. A quarter of the slots is kept from flexible
        requests."""
        num_flex = sum(job.is_flex for job in self.running.values())
        if is_flex:
            num_slots = self.runner.num_slots
            return bool(self.free_slots) and num_flex < num_slots - num_slots // 4
        fastest = max([speed, *(job.speed for job in self.running.values() if not job.is_flex)])
        places = min(self.forecaster.outlook.places, self.forecaster.places(self.scheduler.frame_s / fastest))
        num = len(self.running) - num_flex
        is_room = num < places or (num == places and self._may_try(num + 1))
        return bool(self.free_slots) and is_room

    def _may_try(self, num: int) -> bool:
        """Whether so many may speak, one more than estimates allow: they may be wrong, and were not tried for long; and those
        who speak would not hear it at once."""
        return self.forecaster.costs.is_stale(num) and self.scheduler.dry_in_s(self.clock()) >= SPARE_S

    def candidates(self, count: int) -> list[Job]:
        """The first of those who wait, as far as there are places for them; flexible requests come last."""
        waiting = sorted(self.waiting, key=lambda job: job.rank)
        if not waiting:
            return []
        # A fast listener at the head leaves room for fewer, and is not passed for it.
        able = {False: self.has_place(False, waiting[0].speed), True: self.has_place(True)}
        return [job for job in waiting if able[job.is_flex]][:count]

    def predicted_first_audio_s(self, text_bytes: int, has_recordings: bool) -> float | None:
        """As `Forecaster.first_audio_s`, of a request that is not flexible and comes now."""
        places = [place for place in self.line.values() if not place.is_flex]
        line = [self.forecaster.expected(place.text_bytes) for place in places]
        ahead = (
            sum(place.reference_bytes > 0 and not place.is_made for place in places) if has_recordings else 0
        )
        return self.forecaster.first_audio_s(text_bytes, line, has_recordings, ahead)

    def record_speakers(self) -> None:
        scheduler = self.scheduler
        self.forecaster.record_speakers(
            scheduler.frames_left, scheduler.tokens_left, scheduler.shortest_frame_s
        )
        scheduler.turn_s, scheduler.other_s = self.forecaster.turn_s, self.forecaster.outlook.other_s
        scheduler.step_s = self.forecaster.costs.turn_s(slots=len(self.running))

    def num_pages(self, prompt: Prompt) -> int:
        """All that a request can ever need."""
        return sum(self._lane_pages(prompt))

    def admit(self, job: Job, max_committed: int) -> bool:
        """Give a request a slot, and the pages that speech of its text usually takes, of all its lanes. max_committed:
        pages that it may come to need. -> whether there were enough."""
        lanes, page_tokens = job.prompt.lanes, self.runner.page_tokens
        committed = self.num_pages(job.prompt)
        if self.pages.free <= job.lacked or committed > max_committed:
            return False
        needed = self._lane_pages(job.prompt, self._usual_frames(job) if self.grows else None)
        shared = [
            self.pages.match(self.salt, lane.prefix_keys, page_tokens, self.chunk_pages) for lane in lanes
        ]
        num_shared = sum(map(len, shared))
        fresh = self.pages.take(sum(needed) - num_shared)
        if fresh is None:
            for pages in shared:
                self.pages.give_back(pages)
            self.pages.shared -= num_shared  # nothing came of it
            job.lacked = self.pages.free
            return False
        self.waiting.remove(job)
        self.num_admitted += 1
        waited_s = self.clock() - job.queued_s
        self.queue_s += waited_s
        self.queue_times.add(waited_s)
        job.slot, dealt, job.committed = self.free_slots.pop(), iter(fresh), committed
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
            expected_frames=self._expected_frames(job),
            unread_frames=job.unread_frames,
            is_flex=job.is_flex,
            speed=job.speed,
        )
        self.runner.streams.lm.wait_for(job.is_made)
        self.runner.open(job.slot, job.prompt, job.pages, skips)
        self._count_pages(job)
        return True

    # pages

    def _usual_frames(self, job: Job) -> int:
        """Of a pass, as few texts of its length exceed."""
        usual = self.forecaster.lengths.usual(job.text_bytes) - job.past_frames
        return max(usual, self.scheduler.first_frames)

    def _lane_pages(self, prompt: Prompt, frames: int | None = None) -> list[int]:
        """Of each lane, for so many frames; None: all that it can ever need."""
        tokens = self.runner.page_tokens
        most = [-(-positions // tokens) for positions in prompt.max_positions]
        if frames is None:
            return most
        steps = frames + max(prompt.max_steps - prompt.max_frames, 0)
        return [
            min(-(-(len(lane.inputs) + steps) // tokens), limit)
            for lane, limit in zip(prompt.lanes, most, strict=True)
        ]

    def _count_pages(self, job: Job) -> None:
        sequences = self.runner.sequences(np.array([job.slot]))
        self.room[sequences] = [len(pages) * self.runner.page_tokens for pages in job.pages]

    def short_jobs(self) -> list[Job]:
        """Those who are to take a step, and have no page for it."""
        if not self.running:
            return []
        slots = self.scheduler.decoding_slots()
        sequences = self.runner.sequences(slots)
        is_short = self.runner.kv_lens[sequences] >= self.room[sequences]  # [L * B]
        return [
            self.running[slot] for slot in np.unique(slots[np.flatnonzero(is_short) % len(slots)]).tolist()
        ]

    def speaking_jobs(self) -> list[Job]:
        """Those who take steps, and could be paused."""
        return [self.running[slot] for slot in self.scheduler.decoding_slots().tolist()]

    def ahead_s(self, job: Job) -> float:
        """The audio that its listener has not played yet."""
        return float(self.scheduler.ahead_s(self.clock())[job.slot])

    def grow(self, job: Job) -> bool:
        """A page more for each lane that needs one. -> whether there were enough."""
        [sequences] = self.runner.sequences(np.array([job.slot])).reshape(-1, len(job.pages))
        lanes = np.flatnonzero(self.runner.kv_lens[sequences] >= self.room[sequences]).tolist()
        fresh = self.pages.take(len(lanes))
        if fresh is None:
            return False
        for lane, page in zip(lanes, fresh, strict=True):
            job.pages[lane].append(page)
            self.runner.set_pages(job.slot, lane, job.pages[lane])
        self._count_pages(job)
        return True

    def _written_pages(self, job: Job) -> list[int]:
        """How many each lane has written to."""
        sequences = self.runner.sequences(np.array([job.slot]))
        return (-(-self.runner.kv_lens[sequences] // self.runner.page_tokens)).tolist()

    def pages_to_resume(self, job: Job) -> int:
        """For what it had written, and its next step."""
        sequences = self.runner.sequences(np.array([job.slot]))
        return int((self.runner.kv_lens[sequences] // self.runner.page_tokens + 1).sum())

    def pause(self, job: Job) -> None:
        """Its pages are others'; what they hold is kept on the host."""
        written = [pages[:count] for pages, count in zip(job.pages, self._written_pages(job), strict=True)]
        job.saved = self.runner.save([page for pages in written for page in pages])
        for pages in job.pages:
            self.pages.give_back(pages)
        job.pages = [[] for _ in job.pages]
        self._count_pages(job)
        self.scheduler.is_paused[job.slot] = True

    def resume(self, job: Job) -> bool:
        """-> whether there were enough pages."""
        assert job.saved is not None, f"{job.id} is resumed, but it is not paused"
        fresh = self.pages.take(self.pages_to_resume(job))
        if fresh is None:
            return False
        dealt, written = iter(fresh), self._written_pages(job)
        job.pages = [list(itertools.islice(dealt, count)) for count in written]
        for lane, pages in enumerate(job.pages):
            self.runner.set_pages(job.slot, lane, pages)
        self.runner.restore([page for pages in job.pages for page in pages], job.saved)
        for lane, page in zip(self._lanes_at_an_end(job), dealt, strict=True):
            job.pages[lane].append(page)
            self.runner.set_pages(job.slot, lane, job.pages[lane])
        job.saved = None
        self._count_pages(job)
        self.scheduler.is_paused[job.slot] = False
        return True

    def _lanes_at_an_end(self, job: Job) -> list[int]:
        """Whose next step begins a page."""
        lens = self.runner.kv_lens[self.runner.sequences(np.array([job.slot]))]
        return np.flatnonzero(lens % self.runner.page_tokens == 0).tolist()

    def read(self, job: Job, frames: int) -> None:
        """Its listener took so many frames."""
        if job.slot >= 0:
            self.scheduler.read(job.slot, frames, self.clock())
        elif job.unread_frames is not None:
            job.unread_frames = max(job.unread_frames - frames, 0)

    def stalled_jobs(self, since_s: float) -> list[Job]:
        """Those whose listeners have been held back since before then."""
        return [self.running[slot] for slot in np.flatnonzero(self.scheduler.held_s < since_s).tolist()]

    def _expected_frames(self, job: Job) -> float:
        """Of this pass and those behind it."""
        frames = self.forecaster.lengths.expected(job.text_bytes) - job.past_frames
        return min(frames, job.prompt.max_frames) if job.prompt.is_final else frames

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
        if job.unread_frames is not None:
            job.unread_frames = int(self.scheduler.num_unread[job.slot])
        self.scheduler.close(job.slot)
        self.runner.close(job.slot)
        self._tenancy[job.slot] += 1
        for pages in job.pages:
            self.pages.give_back(pages)
        self.leaving.add(job.slot)
        self._free_slots()
        job.slot, job.pages, job.saved, job.lacked = -1, [], None, -1

    def _free_slots(self) -> None:
        free = [slot for slot in self.leaving if not self.num_rendering[slot]]
        self.free_slots.extend(free)
        self.leaving.difference_update(free)

    def publish_turn(self, job: Job) -> None:
        """Let the conversation's next turn find what was generated in the KV cache. For a pass that is
        over."""
        if job.saved is not None:
            return  # its pages are others'
        lane, pages = job.prompt.lanes[0], job.pages[0]
        keys = (*lane.prefix_keys, *self.family.end_turn(job.prompt, self.tape(job)))
        filled = int(self.runner.kv_lens[self.runner.sequences(np.array([job.slot]))[0]])
        self.pages.publish(self.salt, keys[:filled], self.runner.page_tokens, pages)

    def record_pass(self, job: Job) -> None:
        """Of a pass that is over: whether it was cut, and whether its speech is of a length that its text can hardly have."""
        is_cut = job.pass_frames >= job.prompt.max_frames
        job.was_cut |= is_cut
        if not job.prompt.expected_s:
            return
        odd = odd_length(job.pass_frames / self.family.spec.frame_rate_hz, job.prompt.expected_s)
        self.num_long += odd == "long"
        self.num_short += odd == "short" and not is_cut

    def tape(self, job: Job) -> Tensor:
        """The frames of its pass so far [F, *frame], on the host."""
        return self.runner.frames(job.slot, int(self.scheduler.num_ready[job.slot]))

    def launch(self) -> bool:
        """One stretch of prompts, then one step of everybody who speaks. -> whether there was anything to
        launch."""
        num_waiting = min(self.scheduler.tokens_left, self.scheduler.policy.prefill_tokens)
        chunks = self.scheduler.next_chunks(self.clock(), self.forecaster.costs.prefill_s(num_waiting))
        num_tokens = sum(chunk.stop - chunk.start for chunk in chunks)
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
        self.load = (slots.size, num_tokens, 0)
        return bool(chunks) or bool(slots.size)

    def collect(self, launched: bool, is_alone: bool = True) -> None:
        """What came of it: reports, the windows that are due because of them, samples to their listeners.
        While there are launches under way, the last `report_lag` of them are left alone. Windows are handed on
        as they are done; where there is nothing else to do (`is_alone`: for no model), the next one is waited
        for."""
        self._collect_reports(self.report_lag if launched else 0)
        self._render()
        self._deliver(is_waiting=is_alone and not launched)

    def _record_first_audio(self, job: Job) -> None:
        job.is_heard = True
        self.first_audio_s = self.clock() - job.accepted_s
        if job.predicted_s is not None:
            self.forecaster.correction.record(job.predicted_s, self.clock() - job.accepted_s)

    def finished(self) -> list[Job]:
        """Who has spoken, and whose listener has all of it."""
        return [self.running[int(slot)] for slot in self.scheduler.finished_slots()]

    def stats(self) -> dict[str, Any]:
        """To be asked under the engine's lock."""
        preparing = sum(not place.is_made for place in self.line.values())
        costs, outlook = self.forecaster.costs, self.forecaster.outlook
        return {
            "slots": self.runner.num_slots,
            "running": len(self.running),
            "preparing": preparing,
            "waiting": len(self.line) - preparing,
            "places": outlook.places,
            "predicted_turn_s": float(costs.steady_s(len(outlook.left))),
            "underruns": self.scheduler.underruns,
            "graph_misses": self.runner.graph_misses,
            "admitted": self.num_admitted,
            "queue_s": self.queue_s,
            "held": int(self.scheduler.is_held.sum()),
            "paused": int(self.scheduler.is_paused.sum()),
            "refused": self.num_refused,
            "left_early": self.num_left_early,
            "short_passes": self.num_short,
            "long_passes": self.num_long,
            "audio_s": self.audio_s,
            "first_audio_s": self.first_audio_s,
            "queue_times": self.queue_times,
        }

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
        if len(self.renders) >= self.most_renders:
            return
        renders = self.scheduler.take_due_windows(self.clock())
        slots, tokens, frames = self.load
        self.load = (slots, tokens, frames + sum(render.frames * len(render.slots) for render in renders))
        # A slot that changes hands between two windows is kept until its own is made, for nobody.
        tenancies = [self._tenancy[render.slots] for render in renders]
        for render in renders:
            self.num_rendering[render.slots] += 1
        for render, tenancy in zip(renders, tenancies, strict=True):
            self.renders.append((render, tenancy, self.runner.render(render)))
            # Where a launch returns when it is done, who is in a hurry does not wait for the others' windows.
            self._deliver(is_waiting=False)
            self.after_delivery()
            self.between()

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
                job = self.running[slot]
                job.deliver(Audio(samples[row, :num].copy(), frames))
                job.num_samples += num
                if num and not job.is_heard:
                    self._record_first_audio(job)
            given_s = num_samples / self.family.spec.sample_rate_hz
            self.audio_s += float(given_s.sum())
            self.scheduler.record_delivery(
                slots, counts, given_s, render.is_last[same], render.handed_s, self.clock()
            )
        self._free_slots()
