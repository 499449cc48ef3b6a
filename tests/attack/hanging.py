"""Stop a process without ending it: requests must get an error, and none may wait forever."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.attack.report import Row
from tests.attack.target import Target, until

NOTICED_S = 7.0
TRIES = 200


def attack(directory: Path) -> Iterator[Row]:
    with Target("tiny", directory) as target, ThreadPoolExecutor(1) as pool:
        target.speak(voice="vivian")
        before = pool.submit(target.speak, "Hello. " * 20, voice="vivian", max_new_tokens=60)
        time.sleep(0.2)
        target.signal("engine", signal.SIGSTOP)
        is_noticed = until(lambda: not is_ready(target), NOTICED_S)
        statuses = Counter(target.speak(voice="vivian").status_code for _ in range(TRIES))
        target.signal("engine", signal.SIGCONT)
        is_back = until(lambda: is_ready(target), 5)
        failed = (
            (not is_noticed) + (TRIES - statuses[503]) + (not is_back) + (before.result().status_code != 200)
        )
        yield Row(
            f"a paused engine, {TRIES} requests",
            TRIES + 1,
            failed,
            f"{dict(statuses)}, the earlier request succeeds",
        )
        target.signal("engine", signal.SIGSTOP)
        began = time.monotonic()
        is_killed = until(lambda: "silent for" in target.said, 60)
        is_back = until(lambda: is_ready(target) and target.speak(voice="vivian").status_code == 200, 60)
        took_s = time.monotonic() - began
        yield Row("a hung engine", 1, int(not (is_killed and is_back)), f"speaks again after {took_s:.0f} s")
        yield hung_http_process(target)


def hung_http_process(target: Target) -> Row:
    """A connection that is opened meanwhile waits for the new process."""
    target.signal("http", signal.SIGSTOP)
    began = time.monotonic()
    with httpx.Client(base_url=target.url, timeout=90) as client:
        is_back = until(lambda: target.speak(client=client, voice="vivian").status_code == 200, 60)
    took_s = time.monotonic() - began
    return Row("a hung HTTP process", 1, int(not is_back), f"speaks again after {took_s:.0f} s")


def is_ready(target: Target) -> bool:
    return target.http.get("/ready").status_code == 200
