"""What a GPU would do, from counts alone: a prediction, no measurement.

    python benchmarks/predict.py [--cards h100 h200 4090] [--counts DIR] [--rate 40]

Counts of launches, bytes and FLOPs at the published sizes (`benchmarks/rehearse.py FAMILY --size full
--json`; those in `benchmarks/counts` are dated in LOG.md) become times by a roofline: a kernel takes the
longest of its start, its bytes and its arithmetic, one after the other (`rehearsal/cards.py` has the
constants). The project's scheduler then serves requests on a virtual clock at these costs. Not in it: HTTP,
encoders, prompts' making, and whatever a real device does beside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rehearsal.cards import CARDS, GRAPH_LAUNCH_US, Card
from benchmarks.rehearsal.costs import Counts, Part, Row
from benchmarks.rehearsal.simulation import Load, Server

COUNTS = Path(__file__).parent / "counts"
STREAMS = 64
SPEECH_S = 4.2  # the mean of a simulated answer
AIM_CARD = "h200"
# audio-s/s at 64 streams
AIMS = {"qwen3_tts": 400, "voxcpm2": 300, "higgs_v3": 300, "fish_s2": 250, "cosyvoice2": 300}
RATE_FAMILY = "qwen3_tts"


@dataclass(frozen=True)
class Prediction:
    """Of one family on one card, times in ms. frame: a frame of audio for all of STREAMS, step and render."""

    counts: Counts
    card: Card

    def step_ms(self, slots: int) -> float:
        return self.counts.at("step", slots).device_ms(self.card)

    def render_ms(self) -> float:
        """A frame of STREAMS, in the largest windows: the longer of the device's time and the host's."""
        part = self._largest()
        return max(part.device_ms(self.card), part.host_ms()) / part.frames

    def prefill_ms(self) -> float:
        part = self.counts.at("prefill", 1)
        return max(part.device_ms(self.card), part.host_ms())

    def audio_s_per_s(self) -> float:
        return STREAMS * self.counts.frame_s / (self.step_ms(STREAMS) + self.render_ms()) * 1e3

    def _largest(self) -> Part:
        window = self.counts.window
        return self.counts.at("render", STREAMS, window.sizes[-1], (window.lengths or (0,))[0])

    def obstacles(self) -> Iterator[tuple[float, str]]:
        """What a frame's milliseconds go to, each with its words."""
        step, render = self.counts.at("step", STREAMS), self._largest()

        def starts(row: Row) -> bool:
            us = self.card.launch_us(row.bytes, row.flops, row.arithmetic, GRAPH_LAUNCH_US)
            return us == GRAPH_LAUNCH_US and row.within != "paged_attention"

        def attends(row: Row) -> bool:
            return row.within == "paged_attention"

        def is_wide(row: Row) -> bool:
            return row.flops > 0 and row.arithmetic == "fp32"

        num = sum(row.num for row in step.rows if starts(row))
        yield step.device_ms(self.card, starts), f"the starts of {num} small launches in a step"
        yield step.device_ms(self.card, attends), "attention over pages"
        yield (
            step.device_ms(self.card, lambda row: not starts(row) and not attends(row)),
            "the step's other bytes",
        )
        yield render.device_ms(self.card, is_wide) / render.frames, "products in fp32 while rendering"
        yield (
            render.device_ms(self.card, lambda row: not is_wide(row)) / render.frames,
            "the renderer's bytes",
        )
        waits_ms = max(render.host_ms() - render.device_ms(self.card), 0) / render.frames
        yield waits_ms, "Python asking for the renderer's launches"


def table(predictions: list[Prediction]) -> Iterator[str]:
    yield "| | card | launches a step | step at 1 / 16 / 64, ms | prefill, ms | render a frame of 64, ms | audio-s/s at 64 | aim |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in predictions:
        counts, step = one.counts, one.counts.at("step", STREAMS)
        steps = " / ".join(f"{one.step_ms(slots):.1f}" for slots in (1, 16, 64))
        aim = AIMS.get(counts.family, "") if one.card is CARDS[AIM_CARD] else ""
        cells = (
            f"{counts.family} {counts.size}", one.card.name, f"{step.num_launches:,}", steps, f"{one.prefill_ms():.1f}",
            f"{one.render_ms():.2f}", f"{one.audio_s_per_s():.0f}", str(aim),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def in_the_way(one: Prediction) -> str:
    aim, reached = AIMS[one.counts.family], one.audio_s_per_s()
    if reached >= aim:
        return f"{one.counts.family}: {reached:.0f} of {aim} audio-s/s, the aim is within reach"
    allowed_ms = STREAMS * one.counts.frame_s / aim * 1e3
    parts = sorted(one.obstacles(), reverse=True)
    most = "; ".join(f"{ms:.1f} ms {what}" for ms, what in parts if ms >= 0.1 * allowed_ms)
    frame_ms = one.step_ms(STREAMS) + one.render_ms()
    return f"{one.counts.family}: {reached:.0f} of {aim} audio-s/s: a frame takes {frame_ms:.1f} ms, {allowed_ms:.1f} are allowed: {most}"


def served(counts: Counts, card: Card, rate: float) -> Iterator[str]:
    frames = SPEECH_S / counts.frame_s
    heard = Server(counts, card, STREAMS).serve(Load.closed(6 * STREAMS, frames))
    yield (
        f"{counts.family} on {card.name}, the scheduler on a virtual clock: {STREAMS} streams, each followed by the next: "
        f"{heard.audio_s_per_s:.0f} audio-s/s, first audio after {heard.ttfa_ms(50):.0f} ms (p95 {heard.ttfa_ms(95):.0f}), "
        f"{heard.underruns} underruns of {len(heard.first_s)} speeches"
    )
    if counts.family != RATE_FAMILY:
        return
    heard = Server(counts, card, STREAMS).serve(Load.poisson(rate, 60, frames))
    yield (
        f"{counts.family} on {card.name}, {rate:g} requests a second for 60 s, {SPEECH_S} s each: first audio after "
        f"{heard.ttfa_ms(50):.0f} ms (p95 {heard.ttfa_ms(95):.0f}), {heard.underruns} underruns of {len(heard.first_s)} speeches, "
        f"{heard.audio_s_per_s:.0f} audio-s/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--counts", type=Path, default=COUNTS)
    parser.add_argument("--rate", type=float, default=40, help=f"requests a second of {RATE_FAMILY}")
    options = parser.parse_args()
    known = [Counts.read(path) for path in sorted(options.counts.glob("*.json"))]
    if not known:
        parser.error(
            f"{options.counts} holds no counts: write some with benchmarks/rehearse.py FAMILY --size full --json"
        )
    print("A prediction from counts, not a measurement: nothing here has run on a GPU.\n")
    print(
        "\n".join(table([Prediction(counts, CARDS[card]) for counts in known for card in options.cards])),
        end="\n\n",
    )
    for card in (CARDS[name] for name in options.cards):
        if card is CARDS[AIM_CARD]:
            print("\n".join(in_the_way(Prediction(counts, card)) for counts in known), end="\n\n")
    for counts in known:
        for name in options.cards:
            print("\n".join(served(counts, CARDS[name], options.rate)), flush=True)


if __name__ == "__main__":
    main()
