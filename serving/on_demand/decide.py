"""Which model is loaded or unloaded now. Pure functions of the models' states.

- An idle model is unloaded when it has been idle for the keep-alive.
- One model is loaded at a time: the one whose request came first.
- If the memory plan of that model does not fit next to the others, those that have been idle longest are
  unloaded. If all idle ones together are not enough, nothing is unloaded, and the model waits: a model that
  speaks is never unloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.protocol import ModelStage

BEING_LOADED = ("loading", "warming")


@dataclass(frozen=True)
class Look:
    """A model at one time. asked_s: since when requests wait for it; None: none does. idle_s: since when no
    request uses it; None: some do."""

    name: str
    stage: ModelStage
    planned_bytes: int
    asked_s: float | None = None
    idle_s: float | None = None

    @property
    def has_memory(self) -> bool:
        return self.stage not in ("cold", "waiting")

    @property
    def is_idle(self) -> bool:
        return self.stage == "loaded" and self.idle_s is not None


@dataclass(frozen=True)
class Decision:
    """load: the model to load now. unload: the idle ones to unload now. next_s: when the next keep-alive ends;
    None: never."""

    load: str | None = None
    unload: tuple[str, ...] = ()
    next_s: float | None = None


def decide(models: Sequence[Look], room_bytes: int, keep_alive_s: float | None, now_s: float) -> Decision:
    idle = sorted((model for model in models if model.is_idle), key=idle_since)
    expired = [
        model for model in idle if keep_alive_s is not None and idle_since(model) + keep_alive_s <= now_s
    ]
    kept = [model for model in idle if model not in expired]
    wanted = next_wanted(models)
    evicted: list[Look] = []
    if wanted is not None:
        evicted = evictions(wanted, models, expired, kept, room_bytes)
        kept = [model for model in kept if model not in evicted]
    fits = wanted is not None and wanted.planned_bytes <= room_bytes - taken_bytes(models)
    next_s = None if keep_alive_s is None or not kept else idle_since(kept[0]) + keep_alive_s
    gone = tuple(model.name for model in (*expired, *evicted))
    return Decision(wanted.name if wanted is not None and fits else None, gone, next_s)


def next_wanted(models: Sequence[Look]) -> Look | None:
    """Return the model to load next; None if none is wanted, or one is being loaded."""
    if any(model.stage in BEING_LOADED for model in models):
        return None
    wanted = [
        (model.asked_s, model) for model in models if model.asked_s is not None and not model.has_memory
    ]
    return min(wanted, key=lambda pair: pair[0])[1] if wanted else None


def evictions(
    wanted: Look, models: Sequence[Look], expired: Sequence[Look], kept: Sequence[Look], room_bytes: int
) -> list[Look]:
    """Return the idle models to unload so that the wanted one fits: those that have been idle longest, and no
    more than needed. None if all of them are not enough."""
    leaving = taken_bytes([model for model in models if model.stage == "unloading"]) + taken_bytes(expired)
    lacking = wanted.planned_bytes - (room_bytes - taken_bytes(models)) - leaving
    evicted: list[Look] = []
    for model in kept:
        if lacking <= 0:
            break
        evicted.append(model)
        lacking -= model.planned_bytes
    return evicted if lacking <= 0 else []


def taken_bytes(models: Sequence[Look]) -> int:
    """Return the memory of all models that have a process, until it has ended."""
    return sum(model.planned_bytes for model in models if model.has_memory)


def idle_since(model: Look) -> float:
    assert model.idle_s is not None, f"{model.name} is in use"
    return model.idle_s
