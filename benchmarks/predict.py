"""Predict from counts alone what a GPU would do. This is not a measurement.

    python benchmarks/predict.py [--cards h100 h200 4090] [--counts DIR]

The counts are launches, bytes and FLOPs at the published sizes, from `benchmarks/rehearse.py FAMILY --size
full --json`. LOG.md says when those in `benchmarks/counts` were made. A roofline turns them into times:
kernels run one after the other, and each takes its start and then the longer of its bytes and its arithmetic
(constants in `rehearsal/cards.py`).

The real engine then serves requests on a virtual clock at these costs, with a codec in fp32 and in TF32 (`zoo serve
--codec tf32`). Steps and renders share the device, as they do on an H200 (`serving/tools/simulated_device.py`). The
prediction leaves out HTTP, encoders and the building of prompts. In conversations it includes the encoder of the user's
clip, alone, but neither voice detection nor a slower encoder next to the steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rehearsal.cards import CARDS, GRAPH_LAUNCH_US, Card
from benchmarks.rehearsal.costs import APART, CLIP_S, Counts, Part, Row, reads_pages
from benchmarks.rehearsal.l2 import ASSUMED as L2_ASSUMED
from benchmarks.rehearsal.simulation import simulation
from benchmarks.simulated_loads import Experience, arrivals, conversations, followed

COUNTS = Path(__file__).parent / "counts"
STREAMS = 64
SPEECH_S = 4.2  # mean length of a simulated answer
RATES = {
    "qwen3_tts": (40, 80),
    "cosyvoice2": (12, 20),
    "orpheus": (10, 24),
    "csm": (24,),
}  # requests a second
CONVERSATIONS, CONVERSATION_TURNS = (1, 16), 12
RATE_S = 60  # seconds of requests at each rate
CLOSED_S, RAMP_S = 40.0, 10.0  # of streams that follow each other, and of it what does not count


@dataclass(frozen=True)
class Prediction:
    """The predicted times of one family on one card, in ms. codec: "float32" or "tf32"."""

    counts: Counts
    card: Card
    codec: str = "float32"

    def step_ms(self, slots: int) -> float:
        return self.counts.at("step", slots).device_ms(self.card)

    def render_ms(self) -> float:
        """Return the time of a frame of STREAMS in the largest windows: the longer of device and host."""
        part = self._largest()
        return max(part.device_ms(self.card), part.host_ms()) / part.frames

    def prefill_ms(self) -> float:
        part = self.counts.at("prefill", 1)
        return max(part.device_ms(self.card), part.host_ms())

    def frame_ms(self) -> float:
        """Return the time of a frame of audio for all STREAMS, with step and render at the same time."""
        render, steps = self._largest(), self.counts.steps_per_frame
        busy_ms = steps * self.counts.at("step", STREAMS).busy_ms(self.card)
        busy_ms += render.busy_ms(self.card) / render.frames
        return max(steps * self.step_ms(STREAMS), self.render_ms(), busy_ms)

    def least_bytes(self) -> int:
        """Return the bytes that a step of STREAMS must move: weights, and the keys and values of all slots.

        A solver's and a code predictor's weights count as often as a step reads them. So weights are what a
        step of one slot moves, without its keys and values."""
        one, many = self.counts.at("step", 1), self.counts.at("step", STREAMS)
        return one.num_bytes() - one.num_bytes(reads_pages) + many.num_bytes(reads_pages)

    def read_ratio(self) -> float:
        """Return the bytes that a step of STREAMS moves, divided by the least it must move."""
        return self.counts.at("step", STREAMS).num_bytes() / self.least_bytes()

    def audio_s_per_s(self) -> float:
        return STREAMS * self.counts.frame_s / self.frame_ms() * 1e3

    def floor_ms(self, slots: int) -> float:
        """Return the time of the bytes that a step of 1 or STREAMS must move, at the card's full
        bandwidth."""
        num_bytes = self.least_bytes() if slots == STREAMS else self.counts.at("step", slots).num_bytes()
        return num_bytes / (self.card.gb_per_s * 1e6)

    def floor_of_frame_ms(self) -> float:
        """Return the time that the steps of a frame of STREAMS take at their floor."""
        return self.counts.steps_per_frame * self.floor_ms(STREAMS)

    def _largest(self) -> Part:
        window = self.counts.window
        return self.counts.at("render", STREAMS, window.sizes[-1], window.usual_length)

    def obstacles(self) -> Iterator[tuple[float, str]]:
        """Yield the parts of a frame's time: milliseconds, and a description."""
        step, render = self.counts.at("step", STREAMS), self._largest()
        steps = self.counts.steps_per_frame

        def starts_ms(part: Part) -> float:
            return part.num_launches * GRAPH_LAUNCH_US / 1e3

        def is_wide(row: Row) -> bool:
            return row.flops > 0 and row.arithmetic in ("fp32", "tf32")

        def others(row: Row) -> bool:
            return not is_wide(row)

        attention_ms = steps * step.busy_ms(self.card, reads_pages)
        yield (
            steps * starts_ms(step),
            f"the starts of {steps * step.num_launches:,.0f} launches in a frame's steps",
        )
        yield attention_ms, "keys and values"
        yield steps * step.busy_ms(self.card) - attention_ms, "the steps' other bytes"
        yield starts_ms(render) / render.frames, f"the starts of {render.num_launches:,} launches in a render"
        yield render.busy_ms(self.card, is_wide) / render.frames, "fp32 products of the renderer"
        yield render.busy_ms(self.card, others) / render.frames, "the renderer's bytes"
        waits_ms = max(render.host_ms() - render.device_ms(self.card), 0) / render.frames
        yield waits_ms, "Python's launches of the renderer"


def table(pairs: list[tuple[Prediction, Prediction]]) -> Iterator[str]:
    """Yield the lines of a Markdown table. pairs: with the codec in fp32, and in TF32."""
    yield (
        "| | card | launches a step at 1 / 64 | GB a step at 64, and beyond L2 | of weights and live KV | step at 1 / 16 / 64, ms "
        "| floor at 1 / 64, ms | prefill, ms | render a frame of 64, fp32 / TF32, ms | audio-s/s at 64, fp32 / TF32 |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one, fast in pairs:
        counts = one.counts
        launches = " / ".join(f"{counts.at('step', slots).num_launches:,}" for slots in (1, STREAMS))
        step, least = counts.at("step", STREAMS), one.least_bytes()
        kinds = [n for n in (step.num_bytes(), step.num_memory_bytes()) if n is not None]
        moved = ", ".join(f"{n / 1e9:.1f}" for n in kinds)
        ratios = ", ".join(f"{n / least:.2f}" for n in kinds)
        steps = " / ".join(f"{one.step_ms(slots):.1f}" for slots in (1, 16, STREAMS))
        floors = " / ".join(f"{one.floor_ms(slots):.1f}" for slots in (1, STREAMS))
        cells = (
            f"{counts.family} {counts.size}", one.card.name, launches, moved, ratios, steps, floors, f"{one.prefill_ms():.1f}",
            f"{one.render_ms():.2f} / {fast.render_ms():.2f}", f"{one.audio_s_per_s():.0f} / {fast.audio_s_per_s():.0f}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def apart(one: Prediction) -> Iterator[str]:
    """Yield the costs of the same step with unfused gated products.

    The table has fused ones; a device measures which way is faster (`zoo.nn.swiglu`)."""
    known = {part.slots: part for part in one.counts.parts.get(APART, [])}
    if STREAMS in known:
        part, least = known[STREAMS], one.least_bytes()
        kinds = [n for n in (part.num_bytes(), part.num_memory_bytes()) if n is not None]
        moved = ", ".join(f"{n / 1e9:.1f} GB ({n / least:.2f})" for n in kinds)
        yield f"{one.counts.family} on {one.card.name}: {part.num_launches:,} launches, {moved}, {part.device_ms(one.card):.1f} ms"


def in_the_way(one: Prediction) -> str:
    floor_ms, reached = one.floor_of_frame_ms(), one.audio_s_per_s()
    at_floor = STREAMS * one.counts.frame_s / floor_ms * 1e3
    parts = sorted(one.obstacles(), reverse=True)
    most = "; ".join(f"{ms:.1f} ms {what}" for ms, what in parts if ms >= 0.1 * floor_ms)
    whose = f"{one.counts.family} on {one.card.name}, codec in {one.codec}: {reached:.0f} of {at_floor:.0f} audio-s/s at the floor"
    return f"{whose}: a frame takes {one.frame_ms():.1f} ms, the floor of its steps is {floor_ms:.1f}: {most}"


def served(one: Prediction) -> Iterator[str]:
    counts, frames = one.counts, round(SPEECH_S / one.counts.frame_s)
    whose = f"{counts.family} {counts.size} on {one.card.name}, codec in {one.codec}"
    strategy = import_module(f"zoo.{counts.family}.strategy").STRATEGY
    fresh = partial(simulation, counts, one.card, STREAMS, strategy)
    for streams in (1, STREAMS):
        rate, heard = followed(fresh(), streams, frames, CLOSED_S, RAMP_S)
        yield f"{whose}, {streams} streams, each followed by the next: {rate:.1f} audio-s/s, {Experience.of(heard)}"
    for num in CONVERSATIONS if "listen" in counts.parts else ():
        heard = conversations(fresh(), num, CONVERSATION_TURNS, frames, CLIP_S, counts.listen_s(one.card))
        yield (
            f"{whose}, {num} conversations of {CONVERSATION_TURNS} turns, {CLIP_S:g} s of the user and {SPEECH_S} s of the "
            f"model each: {Experience.of(heard)}"
        )
    for rate in RATES.get(counts.family, ()):
        heard = arrivals(fresh(), rate, frames, RATE_S, seed=0)
        yield f"{whose}, {rate} requests a second for {RATE_S} s, {SPEECH_S} s each: {Experience.of(heard)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--counts", type=Path, default=COUNTS)
    options = parser.parse_args()
    paths = sorted(options.counts.glob("*.json"))
    if not paths:
        parser.error(
            f"no counts in {options.counts}; write them with benchmarks/rehearse.py FAMILY --size full --json FILE"
        )
    known = [tuple((codec, Counts.read(path, codec)) for codec in ("float32", "tf32")) for path in paths]
    cards = [CARDS[name] for name in options.cards]
    pairs = [[Prediction(counts, card, codec) for codec, counts in both] for both in known for card in cards]
    print("This is a prediction from counts. Nothing here was measured on a GPU.\n")
    print("\n".join(table([(one, fast) for one, fast in pairs])))
    print(f"\nBeyond L2: {L2_ASSUMED} Times assume that all bytes come from memory.\n")
    print(
        f"A step of {STREAMS} with unfused gated products, for devices on which that is faster (in the table they are fused):"
    )
    print("\n".join(line for pair in pairs for line in apart(pair[0])) + "\n")
    for one in (one for pair in pairs for one in pair):
        print(in_the_way(one))
    print()
    for one in (one for pair in pairs for one in pair):
        print("\n".join(served(one)), flush=True)


if __name__ == "__main__":
    main()
