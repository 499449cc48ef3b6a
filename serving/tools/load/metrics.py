"""Metrics of a load run, as pure functions of the records of its requests.

A request counts from when the plan submits it, not from when the client sends it. A late client, or one that
waits for a slow server, therefore shows as latency (no coordinated omission). `serving.audio.playback`
judges the streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from serving.audio.playback import Playback

TOLERANCES_MS = (50, 100, 200)  # of C50, C100, C200
QUANTILES = (0.5, 0.9, 0.95, 0.99)

Role = Literal["listener", "leaver", "slow"]


class Record(msgspec.Struct):
    """A request as the client saw it. All times are seconds of one clock.

    outcome: "ok", "left" (disconnected as planned), "interrupted" (the run was interrupted), or the kind of
    failure.
    """

    index: int
    role: Role
    submitted_s: float
    sent_s: float
    end_s: float
    outcome: str
    sample_rate_hz: int = 0  # 0: no audio arrived
    arrivals: list[tuple[float, int]] = []  # (time, number of samples) of each chunk
    detail: str = ""  # the server's message of a failure

    @property
    def failure(self) -> str | None:
        """The kind of failure, or None. An answer without audio is a failure."""
        if self.outcome == "ok":
            return None if self.arrivals else "no_audio"
        return None if self.outcome in ("left", "interrupted") else self.outcome

    @property
    def playback(self) -> Playback | None:
        return Playback.of(self.arrivals, self.sample_rate_hz) if self.arrivals else None


class Slo(msgspec.Struct, frozen=True):
    """The limits that a good request keeps."""

    ttfa_s: float = 0.5
    underrun_s: float = 0.0  # longest pause; 0: the stream must be viable


class Heard(msgspec.Struct):
    """A listener's request that received audio, with its playback."""

    record: Record
    playback: Playback

    @property
    def ttfa_s(self) -> float:
        assert self.playback.first_s is not None
        return self.playback.first_s - self.record.submitted_s

    @property
    def total_s(self) -> float:
        return self.record.end_s - self.record.submitted_s

    @property
    def is_whole(self) -> bool:
        return self.record.outcome == "ok"

    def is_good(self, slo: Slo) -> bool:
        return (
            self.is_whole and self.ttfa_s <= slo.ttfa_s and self.playback.longest_underrun_s <= slo.underrun_s
        )


def summary(records: Sequence[Record], slo: Slo, offered_s: float | None = None) -> dict[str, Any]:
    """Return the metrics of the requests that count. Shares are from 0 to 1, and unknown values are None.

    offered_s: how long requests were submitted, in an open loop; None: until the last one ended.

    Only listeners are judged. Clients that disconnect or read slowly are load, and only counted. A broken
    stream is not viable.
    """
    listeners = [
        record for record in records if record.role == "listener" and record.outcome != "interrupted"
    ]
    heard = [Heard(record, playback) for record in listeners if (playback := record.playback) is not None]
    whole = [one for one in heard if one.is_whole]
    failures = kinds(listeners)
    disturbers = [record for record in records if record.role != "listener"]
    wall_s = max((r.end_s for r in listeners), default=0.0) - min(
        (r.submitted_s for r in listeners), default=0.0
    )
    audio_s = sum(one.playback.audio_s for one in heard)
    num_good = sum(one.is_good(slo) for one in heard)
    return {
        "requests": len(listeners),
        "completed": len(whole),
        "failed": sum(failures.values()),
        "failures": failures,
        "leavers": sum(record.role == "leaver" for record in disturbers),
        "slow_readers": sum(record.role == "slow" for record in disturbers),
        "disturber_failures": kinds(disturbers),
        "interrupted": sum(record.outcome == "interrupted" for record in records),
        "wall_s": wall_s,
        "audio_s": audio_s,
        "audio_s_per_s": ratio(audio_s, wall_s),
        "requests_per_s": ratio(len(whole), wall_s),
        "goodput_requests_per_s": ratio(num_good, wall_s if offered_s is None else offered_s),
        "good_share": ratio(num_good, len(listeners)),
        **quantiles("ttfa", "ms", [1e3 * one.ttfa_s for one in heard]),
        **quantiles("total", "s", [one.total_s for one in whole]),
        **quantiles("rtf", "", [one.total_s / one.playback.audio_s for one in whole]),
        **continuity(heard),
    }


def kinds(records: Iterable[Record]) -> dict[str, int]:
    """Return the number of failed requests by kind."""
    return dict(sorted(Counter(record.failure for record in records if record.failure is not None).items()))


def continuity(heard: Sequence[Heard]) -> dict[str, Any]:
    """Return viability by chunk and by stream, underruns, and the share of streams within each tolerance of
    the longest underrun. Streams of one chunk are left out, because a first chunk cannot be late."""
    several = [one for one in heard if one.playback.num_followers or not one.is_whole]
    followers = sum(one.playback.num_followers for one in several)
    late = sum(one.playback.num_late for one in several)
    within = {
        f"c{ms}": share(one.is_whole and one.playback.longest_underrun_s <= ms / 1e3 for one in several)
        for ms in TOLERANCES_MS
    }
    return {
        "streams_of_one_chunk": len(heard) - len(several),
        "chunk_viability": ratio(followers - late, followers),
        "stream_viability": share(one.is_whole and one.playback.is_viable for one in several),
        **within,
        "underruns": sum(one.playback.num_underruns for one in several),
        "underrun_s": sum(one.playback.underrun_s for one in several),
        **quantiles("longest_underrun", "ms", [1e3 * one.playback.longest_underrun_s for one in several]),
    }


def quantiles(name: str, unit: str, values: Iterable[float]) -> dict[str, float | None]:
    """Return the quantiles, mean and maximum, named name_p50_unit and so on."""
    given = list(values)
    parts = [*(f"p{100 * q:g}" for q in QUANTILES), "mean", "max"]
    found: list[float | None] = [None] * len(parts)
    if given:
        found = [*map(float, np.quantile(given, QUANTILES)), float(np.mean(given)), max(given)]
    return {
        "_".join(filter(None, (name, part, unit))): value for part, value in zip(parts, found, strict=True)
    }


def share(facts: Iterable[bool]) -> float | None:
    """Return the share of true values, or None if there are no values."""
    given = list(facts)
    return ratio(sum(given), len(given))


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
