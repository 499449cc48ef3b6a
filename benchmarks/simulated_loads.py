"""Loads for the simulator (serving/tools/simulate.py), and what their listeners hear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compile_cache.strategy import Strategy
from serving.tools.simulate import RATE_HZ, Heard, Simulation, Voice
from zoo.contract import Window
from zoo.request import Request

TEXT = "x" * 50  # a byte is a position of the prompt
GAP_S = 1e-3  # of silence between two chunks, from which a stream is not viable


def voice_of(window: Window, frame_s: float, sample_rate_hz: int, steps_per_frame: int = 1) -> Voice:
    """Return a voice with the windows of a family whose renders are batched."""
    window = replace(window, hold_samples=round(window.hold_samples * RATE_HZ / sample_rate_hz))
    voice = Voice(window, frame_s, guard=1.0, steps_per_frame=steps_per_frame, has_offsets=False)
    voice.strategy = Strategy(cuts_renders=window.grid > 1)
    return voice


def asked(frames: int, seed: int) -> Request:
    return Request(text=TEXT, seed=seed, max_frames=frames)


def together(simulation: Simulation, streams: int, frames: int) -> list[Heard]:
    """Let `streams` requests begin at the same time."""
    return simulation.run([(0.0, asked(frames, seed)) for seed in range(streams)])


def arrivals(simulation: Simulation, rate: float, frames: int, seconds: float, seed: int) -> list[Heard]:
    """Send requests of equal length at random times."""
    chance = np.random.default_rng(seed)
    at_s = np.cumsum(chance.exponential(1 / rate, max(1, round(rate * seconds))))
    return simulation.run([(at, asked(frames, index)) for index, at in enumerate(at_s.tolist())])


def followed(
    simulation: Simulation, streams: int, frames: int, seconds: float, ramp_s: float
) -> tuple[float, list[Heard]]:
    """Keep `streams` requests running for so long, each followed by the next. Their lengths vary from half to one and a
    half of `frames`. Return audio-s/s after the ramp, and the listeners."""
    chance, heard, running = np.random.default_rng(0), list[Heard](), list[Heard]()

    def speak() -> None:
        length = int(chance.integers(frames // 2, 3 * frames // 2))
        heard.append(simulation.submit(asked(length, len(heard))))
        running.append(heard[-1])

    for _ in range(streams):
        speak()
    early_s = given_s = 0.0  # audio at the end of the ramp, and at the end
    while running:
        simulation.turn()
        now_s, audio_s = simulation.clock.now_s, sum(one.audio_s for one in heard)
        early_s = audio_s if now_s < ramp_s else early_s
        given_s = audio_s if now_s < seconds else given_s
        for one in [one for one in running if one.end is not None]:
            running.remove(one)
            if now_s < seconds:
                speak()
    return (given_s - early_s) / (seconds - ramp_s), heard


def conversations(
    simulation: Simulation, num: int, turns: int, frames: int, pause_s: float, listen_s: float
) -> list[Heard]:
    """Hold `num` conversations. A turn follows when its listener has heard the answer and has spoken, for half to one and
    a half of `pause_s`. The answer begins `listen_s` later, which counts to its first audio."""
    chance = np.random.default_rng(0)
    due_s = chance.uniform(0, pause_s, num)  # when each user has spoken
    left, heard, open_ = np.full(num, turns), list[Heard](), dict[int, Heard]()
    while left.any() or open_:
        now_s = simulation.clock.now_s
        for one in np.flatnonzero((due_s + listen_s <= now_s) & (left > 0)).tolist():
            if one not in open_:
                open_[one] = simulation.submit(
                    asked(int(chance.integers(frames // 2, 3 * frames // 2)), len(heard))
                )
                open_[one].submitted_s = float(due_s[one])
                heard.append(open_[one])
                left[one] -= 1
        is_busy = simulation.turn()
        for one, answer in list(open_.items()):
            if answer.end is not None:
                due_s[one] = max(answer.plays_until_s, simulation.clock.now_s) + pause_s * chance.uniform(
                    0.5, 1.5
                )
                del open_[one]
        if not is_busy and not open_ and left.any():
            simulation.clock.now_s = max(simulation.clock.now_s, float(due_s[left > 0].min()) + listen_s)
    return heard


@dataclass(frozen=True)
class Experience:
    """What the listeners of a load had. viable: the share without a gap."""

    p50_ms: float
    p90_ms: float
    p95_ms: float
    viable: float

    @classmethod
    def of(cls, heard: Sequence[Heard]) -> Experience:
        first_ms = [1e3 * (one.ttfa_s or np.inf) for one in heard]
        viable = float(np.mean([one.late_s < GAP_S for one in heard]))
        return cls(*map(float, np.percentile(first_ms, (50, 90, 95), method="higher")), viable)

    def __str__(self) -> str:
        first = f"first audio p50 {self.p50_ms:.0f}, p90 {self.p90_ms:.0f}, p95 {self.p95_ms:.0f} ms"
        return f"{first}, viable {self.viable:.1%}"
