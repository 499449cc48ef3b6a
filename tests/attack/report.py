"""The result of an attack: how often it tried, and how often the server failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the result. failed: tries after which the server was in a wrong state."""

    attack: str
    tried: int
    failed: int
    seen: str = ""


def table(rows: Sequence[Row]) -> str:
    width = max(len(row.attack) for row in rows)
    lines = [f"{'attack':{width}}  {'tried':>6}  {'failed':>6}  seen"]
    lines += [f"{row.attack:{width}}  {row.tried:6}  {row.failed:6}  {row.seen}" for row in rows]
    return "\n".join(lines)
