"""One client sends more than the rest can bear: texts, recordings, requests. The others go on as before."""

from __future__ import annotations

import base64
import io
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import soundfile

from tests.attack.report import Row
from tests.attack.target import Target

MIB = 1 << 20
TEXT = "word " * (6 * MIB // 5)
MAX_GAP_S = 3.0  # of the other client's stream
MAX_GROWTH_MIB = 400
SECONDS = 60


def long_texts(directory: Path) -> Iterator[Row]:
    """Texts without end, in every field that has one."""
    bomb = base64.b64encode(silence(5, 16000)).decode()
    fields: dict[str, dict[str, object]] = {
        "input": {"text": TEXT},
        "instructions": {"instructions": TEXT},
        "ref_text": {"ref_audio": bomb, "ref_text": TEXT},
        "references": {"references": [{"audio": bomb, "text": TEXT}]},
        "language": {"language": TEXT},
        "voice": {"voice": TEXT},
        "an option": {"text_mode": TEXT},
        "a field's name": {TEXT: 1},
    }
    with Target("tiny-base", directory) as target:
        upload(target)
        for name, given in fields.items():
            yield disturb(f"2 posts of 6 MB of {name}", target, [given] * 2, {400})


def disturb(name: str, target: Target, posts: list[dict[str, object]], allowed: set[int]) -> Row:
    """All posts at once, while another client listens: how they are answered, and what it hears."""
    before = {process: target.resident_bytes(process) for process in target.pids}
    with ThreadPoolExecutor(len(posts) + 1) as pool:
        listening = pool.submit(longest_gap_s, target)
        time.sleep(0.3)
        answers = list(pool.map(lambda post: outcome(target, post), posts))
        gap_s = listening.result()
    growth = {process: (target.resident_bytes(process) - before[process]) / MIB for process in before}
    wrong = sum(not isinstance(answer, int) or answer not in allowed for answer in answers)
    failed = wrong + (gap_s > MAX_GAP_S) + sum(grown > MAX_GROWTH_MIB for grown in growth.values())
    counts = ", ".join(f"{count} x {status}" for status, count in Counter(answers).items())
    grown = ", ".join(f"{process} {mib:+.0f} MiB" for process, mib in growth.items())
    return Row(name, len(posts), failed, f"{counts}; longest gap {gap_s:.1f} s; {grown}")


def outcome(target: Target, post: dict[str, object]) -> int | str:
    try:
        return target.speak(**{"text": "Hello.", **post}).status_code
    except httpx.TransportError as error:
        return type(error).__name__


def longest_gap_s(target: Target) -> float:
    """Between two pieces of a stream, which speaks in an uploaded voice."""
    last, longest = time.monotonic(), 0.0
    body = {"input": "word " * 100, "voice": "other", "response_format": "pcm", "max_new_tokens": 60}
    with target.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for _ in answer.iter_raw():
            now = time.monotonic()
            last, longest = now, max(longest, now - last)
    return longest


def upload(target: Target) -> None:
    """The voice of the other client, which has spoken once."""
    sample = {"audio_sample": ("other.flac", silence(5, 16000))}
    answer = target.http.post("/v1/audio/voices", data={"name": "other"}, files=sample)
    assert answer.status_code == 200, answer.text
    answer = target.speak(voice="other")
    assert answer.status_code == 200, answer.text


def silence(seconds: float, rate_hz: int, form: str = "FLAC") -> bytes:
    file = io.BytesIO()
    samples = np.zeros(int(seconds * rate_hz), np.int16)
    samples[:100] = 9000
    soundfile.write(file, samples, rate_hz, format=form, subtype="PCM_16")
    return file.getvalue()
