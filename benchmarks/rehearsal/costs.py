"""Costs of a family's launches on a card, from the counts of `benchmarks/rehearse.py`.

They follow from a roofline and are not measured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rehearsal.cards import EAGER_LAUNCH_US, GRAPH_LAUNCH_US, PHASE_US, Card
from zoo.contract import Window

CLIP_S = 5.0  # of what a user says
# Tokens of text and codes in turn, of models that write while they speak.
PATTERNS = {"glm4_voice": (13, 26), "step_audio2": (1, 4)}
# A step on a device where cuBLAS with a second launch is faster than a fused gated product (`zoo.nn.swiglu`).
APART = "step, products apart"


class Row(NamedTuple):
    """`num` launches of equal cost; see `launches.Launch`. memory_bytes is None in old counts."""

    num: int
    kind: str
    within: str
    bytes: int
    flops: int
    arithmetic: str
    memory_bytes: int | None = None

    @property
    def start_us(self) -> float:
        return PHASE_US if self.kind == "phase" else GRAPH_LAUNCH_US


class Cost(NamedTuple):
    """The cost of one launch of the server.

    host_s: Python's time for launching its kernels; device_s: the kernels' time one after the other, alone on
    the device; busy_s: the part of device_s that is bytes and arithmetic, not starts."""

    host_s: float
    device_s: float
    busy_s: float = 0.0


@dataclass(frozen=True)
class Part:
    """The launches of a step, a prefill or a render of `slots` slots."""

    slots: int
    frames: int
    length: int
    rows: tuple[Row, ...]

    def device_ms(self, card: Card) -> float:
        rows = self.rows
        return sum(r.num * card.launch_us(r.bytes, r.flops, r.arithmetic, r.start_us) for r in rows) / 1e3

    def busy_ms(self, card: Card, which: Callable[[Row], bool] = lambda row: True) -> float:
        rows = filter(which, self.rows)
        return sum(r.num * card.busy_us(r.bytes, r.flops, r.arithmetic) for r in rows) / 1e3

    def host_ms(self) -> float:
        """Return the host's time. A recorded graph is launched once and not counted."""
        return sum(row.num for row in self.rows if row.kind == "eager") * EAGER_LAUNCH_US / 1e3

    @property
    def num_launches(self) -> int:
        return sum(row.num for row in self.rows if row.kind != "phase")

    def num_bytes(self, which: Callable[[Row], bool] = lambda row: True) -> int:
        return sum(row.num * row.bytes for row in self.rows if which(row))

    def num_memory_bytes(self) -> int | None:
        """Return the bytes that the card's cache does not hold (`l2`), or None if they were not counted."""
        known = [row.num * row.memory_bytes for row in self.rows if row.memory_bytes is not None]
        return sum(known) if len(known) == len(self.rows) else None


@dataclass(frozen=True)
class Counts:
    """A family's parts by name, at the numbers of slots that were counted.

    Names are "step", "prefill", "render", APART if that step differs, and "listen" for a family that listens: the
    encoder of one clip. pattern: how many steps write text, and how many speak, in turn."""

    family: str
    size: str
    frame_s: float
    sample_rate_hz: int
    window: Window
    parts: dict[str, list[Part]]
    steps_per_frame: float = 1
    pattern: tuple[int, int] | None = None

    @classmethod
    def read(cls, path: Path, codec: str = "float32") -> Counts:
        """Read counts from a file. codec: precision of a render's products that were counted in fp32."""
        content = json.loads(path.read_text())
        parts: dict[str, list[Part]] = defaultdict(list)
        for part in content["parts"]:
            rows = tuple(Row(*row) for row in part["launches"])
            if part["name"] == "render" and codec == "tf32":
                rows = tuple(
                    row._replace(arithmetic="tf32") if row.arithmetic == "fp32" else row for row in rows
                )
            parts[part["name"]].append(Part(part["slots"], part["frames"], part["length"], rows))
        fields: dict[str, Any] = content["window"]
        window = Window(**fields | {name: tuple(fields[name]) for name in ("sizes", "lengths")})
        steps_per_frame, pattern = content.get("steps_per_frame", 1), PATTERNS.get(content["family"])
        if pattern is not None:
            steps_per_frame = sum(pattern) / pattern[1]
        facts = content["family"], content["size"], content["frame_s"], content["sample_rate_hz"]
        return cls(*facts, window, dict(parts), steps_per_frame, pattern)

    def frames(self, steps: np.ndarray) -> np.ndarray:
        """Return how many frames there are after so many steps."""
        silent, spoken = self.pattern or (int(self.steps_per_frame) - 1, 1)
        whole, rest = np.divmod(steps, silent + spoken)
        return whole * spoken + np.clip(rest - silent, 0, spoken)

    def listen_s(self, card: Card) -> float:
        """Return the seconds until a clip is encoded; 0 for a family that does not listen."""
        if "listen" not in self.parts:
            return 0.0
        [part] = self.parts["listen"]
        return max(part.device_ms(card), part.host_ms()) / 1e3

    def of(self, name: str, frames: int = 0, length: int = 0) -> list[Part]:
        """Return the counted launches of a kind and shape, those of the fewest slots first."""
        found = [part for part in self.parts[name] if (part.frames, part.length) == (frames, length)]
        assert found, f"{self.family}: no {name} of {frames} frames and length {length} was counted"
        return sorted(found, key=lambda part: part.slots)

    def at(self, name: str, slots: int, frames: int = 0, length: int = 0) -> Part:
        return next(part for part in self.of(name, frames, length) if part.slots == slots)

    def cost(self, card: Card, name: str, slots: int, frames: int = 0, length: int = 0) -> Cost:
        """Return a cost, interpolated between the counted numbers of slots."""
        known = self.of(name, frames, length)
        sizes = [part.slots for part in known]
        times_ms = [(part.host_ms(), part.device_ms(card), part.busy_ms(card)) for part in known]
        return Cost(*(float(np.interp(slots, sizes, column)) / 1e3 for column in zip(*times_ms, strict=True)))


def reads_pages(row: Row) -> bool:
    return row.within in ("paged_attention", "rotary_paged_attention")


# A launch this small takes hardly more than GRAPH_LAUNCH_US on any card.
SMALL_BYTES, SMALL_FLOPS = 1 << 20, 10_000_000


def merged(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Merge equal launches into rows [num, kind, within, bytes, flops, arithmetic, memory_bytes].

    Equal launches become one row with their mean memory_bytes. All small launches of a kind become one row
    with their mean bytes and FLOPs."""
    sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for num, kind, within, num_bytes, flops, arithmetic, memory_bytes in rows:
        is_small = num_bytes <= SMALL_BYTES and flops <= SMALL_FLOPS
        key = (kind, within, arithmetic, () if is_small else (num_bytes, flops))
        for i, value in enumerate((num, num * num_bytes, num * flops, num * memory_bytes)):
            sums[key][i] += value
    return [
        [num, kind, within, num_bytes // num, flops // num, arithmetic, memory_bytes // num]
        for (kind, within, arithmetic, _), (num, num_bytes, flops, memory_bytes) in sums.items()
    ]
