"""The API keys of a server while it runs: their limits, and how much each has used.

    the key in a request ─ Keys.find ─ current ─┬─ admit, before it speaks:  429 for a rate or quota that is used up
                                                └─ spoke, when it ends:      counts its characters and audio

Counts of a day begin at midnight UTC, and when the HTTP process starts. A request that begins below its quota is
finished, so requests that run at the same time may exceed it by their own speech.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from litestar.exceptions import HTTPException

from serving.api_keys import ApiKey, digest_of
from serving.http.errors import refusal
from serving.http.metrics import KEY_LIMITS, Metrics

MINUTE_S, DAY_S = 60.0, 86400
RATE, CHARACTERS, AUDIO = KEY_LIMITS


class Rate:
    """A token bucket: `per_minute` requests at once, and then one whenever a minute's share has passed."""

    def __init__(self, per_minute: float, now_s: Callable[[], float] = time.monotonic):
        self.per_minute, self.now_s = per_minute, now_s
        self.most = max(per_minute, 1.0)
        self.left = self.most
        self.then_s = now_s()

    def take(self) -> float:
        """Take a request, and return 0; or return after how many seconds one is free."""
        now_s = self.now_s()
        self.left = min(self.most, self.left + (now_s - self.then_s) * self.per_minute / MINUTE_S)
        self.then_s = now_s
        if self.left < 1:
            return (1 - self.left) * MINUTE_S / self.per_minute
        self.left -= 1
        return 0.0


class Key:
    """A key with its limits, and its use of today."""

    def __init__(self, entry: ApiKey, metrics: Metrics, now_s: Callable[[], float] = time.time):
        self.entry, self.metrics, self.now_s = entry, metrics, now_s
        self.name, self.digest = entry.name, entry.digest
        self.rate = None if entry.requests_per_minute is None else Rate(entry.requests_per_minute)
        self.day = 0
        self.num_chars, self.audio_s = 0, 0.0  # of today
        metrics.add_key(self.name)

    def admit(self, num_chars: int) -> None:
        """Let a request with this many characters begin. Raises the refusal (429)."""
        self._begin_day()
        left_s = DAY_S - self.now_s() % DAY_S
        most_chars, most_s = self.entry.characters_per_day, self.entry.audio_s_per_day
        if most_chars is not None and self.num_chars + max(num_chars, 1) > most_chars:
            used = f"{self.num_chars} of {most_chars:g} characters of today"
            text = f", and this text has {num_chars}" if num_chars else ""
            raise self._refused(CHARACTERS, f"has used {used}{text}", left_s)
        if most_s is not None and self.audio_s >= most_s:
            used = f"{self.audio_s:.0f} of {most_s:g} seconds of audio"
            raise self._refused(AUDIO, f"has used {used} of today", left_s)
        if self.rate is not None and (wait_s := self.rate.take()):
            raise self._refused(RATE, f"may send {self.rate.per_minute:g} requests a minute", wait_s)
        self.metrics.key_requests.labels(self.name).inc()

    def _refused(self, limit: str, what: str, retry_after_s: float) -> HTTPException:
        self.metrics.key_refused.labels(self.name, limit).inc()
        code = "rate_limit_exceeded" if limit == RATE else "insufficient_quota"  # OpenAI's
        return refusal(429, f"the API key {self.name!r} {what}", code=code, retry_after_s=retry_after_s)

    def spoke(self, num_chars: int, audio_s: float) -> None:
        """Count a request that was spoken."""
        self._begin_day()
        self.num_chars += num_chars
        self.audio_s += audio_s
        self.metrics.key_characters.labels(self.name).inc(num_chars)
        self.metrics.key_audio_s.labels(self.name).inc(audio_s)

    def _begin_day(self) -> None:
        today = int(self.now_s() // DAY_S)
        if today != self.day:
            self.day, self.num_chars, self.audio_s = today, 0, 0.0


class Keys:
    """All keys. Without any, every client may use the server."""

    def __init__(self, entries: Iterable[ApiKey], metrics: Metrics):
        self._keys = [Key(entry, metrics) for entry in entries]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: str) -> Key | None:
        """Return the key that a client gave. The time does not depend on how much of it is right."""
        digest = digest_of(given)
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def named(self, name: str) -> Key | None:
        return next((key for key in self._keys if key.name == name), None)


# The key of the request, or of the session, that a task belongs to.
current: ContextVar[Key | None] = ContextVar("current", default=None)


def admit(num_chars: int) -> None:
    """Let a request of the current key begin. Raises the refusal (429)."""
    key = current.get()
    if key is not None:
        key.admit(num_chars)
