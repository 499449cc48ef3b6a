"""How many replicas there should be: our policy for Ray Serve's autoscaling.

More if a new request would wait too long for its first audio; fewer if the rest could speak for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from serving import protocol
from serving.cluster.routing import num_open, predicted_s

FIRST_AUDIO, BUSY = "expected_first_audio_s", "busy"
MAX_FIRST_AUDIO_S = (
    1.0  # of a new request, as a mean over replicas; if it waits longer, one more replica starts
)
MAX_BUSY = 0.7  # of the places of the remaining replicas, if one is to end


def load_of(stats: protocol.Stats | None) -> dict[str, float]:
    """Return the load of a replica for the policy: its slowest model's expected first audio, and the busy
    share of its places."""
    if stats is None:
        return {}
    models = stats.models.values()
    waits_s = [predicted_s(model, num_open(model)) for model in models if model.expected_first_audio_s]
    shares = [num_open(model) / max(model.places, 1) for model in models]
    return {FIRST_AUDIO: max(waits_s, default=0.0), BUSY: max(shares, default=0.0)}


def num_wanted(current: int, waits_s: Iterable[float], shares: Iterable[float]) -> int:
    """Return how many replicas there should be, given each one's expected first audio and busy share."""
    waits = list(waits_s)
    if waits and sum(waits) / len(waits) > MAX_FIRST_AUDIO_S:
        return current + 1
    busy = list(shares)
    if current > 1 and len(busy) == current and sum(busy) <= MAX_BUSY * (current - 1):
        return current - 1
    return current


def by_first_audio(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide for Ray Serve (`ray.serve.config.AutoscalingContext`). Serve keeps the bounds and the delays."""
    figures = context.aggregated_metrics or {}
    waits_s, shares = (figures.get(name, {}).values() for name in (FIRST_AUDIO, BUSY))
    return num_wanted(context.target_num_replicas, waits_s, shares), {}
