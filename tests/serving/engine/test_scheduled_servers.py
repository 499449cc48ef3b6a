"""The scheduler: whole servers on a simulated clock."""

from __future__ import annotations

import random

import numpy as np
import pytest
from schedulers import FRAME_S, SIZES, Timed

from serving.engine.schedule.policy import Streaming, Throughput
from zoo.contract import Window


class Server:
    """A model on a simulated clock. A turn takes step_s, plus prefill_s for each 256 prompt positions, plus
    render_s per launch; reports come a turn late, and audio reaches its listener a turn after its window was
    launched."""

    def __init__(
        self,
        num_slots,
        policy,
        sizes=SIZES,
        step_s=0.010,
        prefill_s=0.015,
        render_s=0.004,
        context=0,
    ):
        window = Window(sizes, lookahead=context, left=context)
        self.scheduler = Timed(num_slots, policy, window, FRAME_S)
        self.step_s, self.prefill_s, self.render_s = step_s, prefill_s, render_s
        self.now = 0.0
        self.frames = np.zeros(num_slots, int)  # on the device's tape
        self.total = np.zeros(num_slots, int)
        self.opened_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}  # time to first audio
        self.heard: dict[int, list[tuple[int, int, int]]] = {}  # windows: start, count, frames
        self.underruns = 0

    def open(self, slot, prompt_tokens, num_frames, skip=0):
        self.scheduler.open(slot, prompt_tokens, skip)
        self.frames[slot], self.total[slot] = 0, num_frames
        self.opened_s[slot], self.heard[slot] = self.now, []
        self.first_s.pop(slot, None)

    def run(self, arrivals):
        """arrivals: (time, slot, prompt positions, frames), by time. Until all have been heard to the end."""
        arrivals = list(arrivals)
        stepped, in_flight = np.zeros(0, int), []
        while arrivals or self.scheduler.slots.is_occupied.any():
            while arrivals and arrivals[0][0] <= self.now:
                _, slot, prompt_tokens, num_frames = arrivals.pop(0)
                self.open(slot, prompt_tokens, num_frames)
            chunks = self.scheduler.next_chunks()
            assert sum(c.stop - c.start for c in chunks) <= self.scheduler.policy.prefill_tokens
            launch = np.concatenate(
                [[c.slot for c in chunks if c.is_last], self.scheduler.decoding_slots()]
            ).astype(int)
            for chunk in chunks:
                self.scheduler.record_prefill(chunk)
            self.scheduler.report(stepped, self.frames[stepped], self.frames[stepped] == self.total[stepped])
            self.frames[launch] = np.minimum(self.frames[launch] + 1, self.total[launch])
            renders = self.scheduler.take_due_windows(self.now)
            self.now += (
                self.step_s
                + self.prefill_s * sum(c.stop - c.start for c in chunks) / 256
                + self.render_s * len(renders)
            )
            for render in in_flight:
                self.hear(render)
            stepped, in_flight = launch, renders
            for slot in self.scheduler.finished_slots():
                self.underruns += self.scheduler.slots.listener.num_underruns[slot]
                self.scheduler.close(slot)
            stepped = stepped[self.scheduler.slots.is_occupied[stepped]]

    def hear(self, render):
        for slot, start, count in zip(render.slots, render.start, render.count, strict=True):
            self.first_s.setdefault(slot, self.now - self.opened_s[slot])
            assert start == sum(n for _, n, _ in self.heard[slot])
            assert 1 <= count <= render.frames
            # of what is heard, and the lookahead behind it is on the tape by now, unless the tape ends before
            end = start + count
            assert self.frames[slot] >= min(end + self.scheduler.shapes.window.lookahead, self.total[slot])
            self.heard[slot].append((int(start), int(count), render.frames))
        given_s = render.count * FRAME_S
        self.scheduler.record_delivery(
            render.slots, render.count, given_s, render.is_last, render.handed_s, self.now
        )


def crowd(num, every_s, rng):
    return [(i * every_s, i, rng.randrange(20, 700), rng.randrange(30, 300)) for i in range(num)]


@pytest.mark.parametrize("window", [(1, 4, 25), (1, 2), (4, 10), (3,)])
@pytest.mark.parametrize("every_s", [0.0, 0.05, 0.4])
def test_sixteen_listeners_hear_no_gap_when_the_model_is_fast_enough(window, every_s):
    server = Server(16, Streaming(), window)
    arrivals = crowd(16, every_s, random.Random(3))
    server.run(arrivals)
    assert server.underruns == 0
    for _, slot, _, num_frames in arrivals:
        assert sum(count for _, count, _ in server.heard[slot]) == num_frames


@pytest.mark.parametrize("policy", [Streaming(), Throughput()], ids=lambda policy: policy.name)
def test_sixteen_listeners_of_a_renderer_that_looks_ahead(policy):
    """A speech that is shorter than the lookahead is heard whole too."""
    server, rng = Server(16, policy, (4, 25), context=10), random.Random(3)
    arrivals = [
        (0.05 * slot, slot, rng.randrange(20, 700), rng.choice((1, 9, 10, 11, 14, 15, 120)))
        for slot in range(16)
    ]
    server.run(arrivals)
    assert server.underruns == 0
    for _, slot, _, num_frames in arrivals:
        assert sum(count for _, count, _ in server.heard[slot]) == num_frames


def test_underruns_show_a_model_slower_than_real_time():
    server = Server(16, Streaming(), step_s=0.1)
    server.run(crowd(16, 0.05, random.Random(3)))
    assert server.underruns > 16


def test_first_audio_comes_soon_while_fifteen_others_play():
    server = Server(16, Streaming())
    server.run([(0.0, slot, 300, 400) for slot in range(15)] + [(3.0, 15, 300, 20)])
    assert server.underruns == 0
    assert server.first_s[15] < 0.12  # two turns of prefill, one of report, one of the renderer
    assert server.heard[15][0] == (0, 1, 1)


def test_a_fast_model_reaches_the_largest_window():
    server = Server(1, Streaming())
    server.run([(0.0, 0, 10, 400)])
    shapes = [frames for _, _, frames in server.heard[0]]
    assert shapes[0] == 1 and shapes.count(25) > 10
    assert all(count == frames for _, count, frames in server.heard[0][2:-1])


def test_a_throughput_server_renders_full_windows_until_the_end():
    server = Server(16, Throughput())
    arrivals = crowd(16, 0.05, random.Random(5))
    server.run(arrivals)
    for _, slot, _, num_frames in arrivals:
        full, rest = divmod(num_frames, 25)
        heard = server.heard[slot]
        assert heard[:full] == [(i * 25, 25, 25) for i in range(full)]
        assert sum(count for _, count, _ in heard[full:]) == rest and all(
            frames < 25 for _, _, frames in heard[full:] if rest < 13
        )


@pytest.mark.parametrize("policy", [Streaming(), Throughput()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_requests_in_reused_slots_is_heard_whole(policy, seed):
    rng = random.Random(seed)
    sizes, step_s = rng.choice([(1, 4, 25), (2, 7), (5,)]), rng.choice([0.005, 0.05, 0.09])
    server = Server(4, policy, sizes, step_s)
    for _ in range(3):
        arrivals = [
            (server.now + rng.random(), slot, rng.randrange(1, 900), rng.randrange(1, 120))
            for slot in range(4)
        ]
        server.run(sorted(arrivals))
        for _, slot, _, num_frames in arrivals:
            assert sum(count for _, count, _ in server.heard[slot]) == num_frames
    assert not server.scheduler.slots.is_occupied.any() and not server.scheduler.slots.prompt.queue
