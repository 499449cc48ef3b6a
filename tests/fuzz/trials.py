"""How many examples a part of the fuzz tries, and how."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def trials(num: int) -> settings:
    """Return settings for `num` examples, which may be slow, and none of which is kept."""
    return settings(
        max_examples=num,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
