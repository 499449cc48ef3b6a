"""Audio files that are small, and that a decoder unpacks to a lot of memory or work."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx

from tests.attack.flooding import disturb, outcome, silence
from tests.attack.report import Row
from tests.attack.target import Target
from tests.serving.hostile_files import fragmented_mp4, matroska, mp4

NUM_SAMPLES = 80_000_000
FILES = {
    "an MP4 with a table of 80 million samples": mp4(NUM_SAMPLES),
    "an MP4 with a fragment of 80 million samples": fragmented_mp4(NUM_SAMPLES),
    "a Matroska file with 900 blocks of 10 MB": matroska(900),
}
NUM_POSTS = 4
MAX_GROWTH_MIB = 100  # of the HTTP process
LEAVES_S = 1.0
MAX_WAIT_S = 5.0  # of the next clone, on a machine with two busy cores


def attack(directory: Path) -> Iterator[Row]:
    with Target("tiny tiny-base", directory) as target:
        target.speak(voice="vivian")
        target.speak(voice=None, **post(silence(5, 16000)))
        for name, data in FILES.items():
            yield disturb(
                f"{NUM_POSTS} posts of {name}", target, [post(data)] * NUM_POSTS, {400}, MAX_GROWTH_MIB
            )
        yield clients_that_leave(target)


def post(data: bytes) -> dict[str, object]:
    audio = base64.b64encode(data).decode()
    return {"model": "tiny-base", "ref_audio": audio, "x_vector_only_mode": True}


def clients_that_leave(target: Target) -> Row:
    """The next clone does not wait for files whose clients have disconnected."""
    hostile = post(matroska(900))
    with ThreadPoolExecutor(NUM_POSTS) as pool:
        list(pool.map(lambda _: leave(target, hostile), range(NUM_POSTS)))
    began = time.monotonic()
    status = outcome(target, post(silence(5, 16000)))
    took_s = time.monotonic() - began
    failed = int(status != 200 or took_s > MAX_WAIT_S)
    return Row(
        f"{NUM_POSTS} clients that leave", NUM_POSTS, failed, f"the next clone: {status} in {took_s:.1f} s"
    )


def leave(target: Target, fields: dict[str, object]) -> None:
    with httpx.Client(base_url=target.url, timeout=LEAVES_S) as client, suppress(httpx.TimeoutException):
        target.speak(client=client, **fields)
