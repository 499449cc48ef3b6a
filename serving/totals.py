"""The sum of several engines' figures, as if they were one engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from serving import protocol
from serving.histogram import Histogram


def total(replicas: Mapping[str, protocol.Stats]) -> protocol.Stats:
    """Return the sum of the replicas' figures, with each one's own."""
    stats = list(replicas.values())
    names = dict.fromkeys(name for each in stats for name in each.models)
    models = {
        name: total_of_model([each.models[name] for each in stats if name in each.models]) for name in names
    }
    summed = {name: sum_of(getattr(each, name) for each in stats) for name in SUMMED}
    return protocol.Stats(**summed, models=models, replicas=dict(replicas))


def total_of_model(models: list[protocol.ModelStats]) -> protocol.ModelStats:
    """Return the sum of one model's figures. Times are those of the slowest replica, and first audio is that
    of the soonest."""
    summed: dict[str, Any] = {
        name: sum_of(getattr(each, name) for each in models) for name in SUMMED_OF_MODELS
    }
    firsts = [each.first_audio_s for each in models if each.first_audio_s is not None]
    return protocol.ModelStats(
        **summed,
        predicted_turn_s=max(each.predicted_turn_s for each in models),
        first_audio_s=max(firsts, default=None),
        expected_first_audio_s=min(each.expected_first_audio_s for each in models),
    )


def sum_of(values: Iterable[Any]) -> Any:
    first, *others = values
    if not isinstance(first, Histogram):
        return sum(others, first)
    columns = zip(first.counts, *(each.counts for each in others), strict=True)
    return Histogram(list(map(sum, columns)), sum(each.sum_s for each in (first, *others)))


def summed_fields(kind: type[msgspec.Struct], *others: str) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name not in others)


SUMMED = summed_fields(protocol.Stats, "models", "replicas")
SUMMED_OF_MODELS = summed_fields(
    protocol.ModelStats, "predicted_turn_s", "first_audio_s", "expected_first_audio_s"
)
