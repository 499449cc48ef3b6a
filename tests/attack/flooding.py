"""Attack with more texts, recordings and requests than a server can hold, next to an ordinary client."""

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
MAX_GAP_S = 3.0  # longest gap in the other client's stream
MAX_GROWTH_MIB = 700  # 16 bodies of 13 MB, each as received, in one piece, and as text
VOICE = {"tiny": "vivian", "tiny-base": "other"}  # voice of a client that sends no recording


def long_texts(directory: Path) -> Iterator[Row]:
    """Send very long texts in every field that takes text."""
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


def recordings(directory: Path) -> Iterator[Row]:
    """Send small files that decode to large ones. Requests without a recording must not wait for them."""
    bomb = base64.b64encode(silence(29, 192_000)).decode()
    post: dict[str, object] = {"model": "tiny-base", "ref_audio": bomb, "x_vector_only_mode": True}
    with Target("tiny tiny-base", directory) as target:
        target.speak(voice="vivian")
        target.speak(voice=None, **post)
        yield disturb(f"80 posts of {len(bomb) >> 10} KB of FLAC", target, [post] * 80, {200, 503})
        large: dict[str, object] = {
            "model": "tiny-base",
            "ref_audio": base64.b64encode(bytes(10 * MIB)).decode(),
        }
        yield disturb("40 posts of 10 MB that are not audio", target, [large] * 40, {400, 503})


def disturb(
    name: str,
    target: Target,
    posts: list[dict[str, object]],
    allowed: set[int],
    max_growth_mib: int = MAX_GROWTH_MIB,
) -> Row:
    """Send all posts at once while another client listens. Check the answers, the gaps and the memory."""
    before = {process: target.resident_bytes(process) for process in target.pids}
    target.forget_peaks()
    with ThreadPoolExecutor(len(posts) + 1) as pool:
        listening = pool.submit(longest_gap_s, target)
        time.sleep(0.3)
        posting = [pool.submit(outcome, target, post) for post in posts]
        time.sleep(0.5)
        began = time.monotonic()
        cheap = target.speak(voice=VOICE[target.models[0]]).status_code
        waited_s = time.monotonic() - began
        answers = [answer.result() for answer in posting]
        took_s = time.monotonic() - began
        gap_s = listening.result()
    growth = {process: (target.peak_bytes(process) - before[process]) / MIB for process in before}
    wrong = sum(not isinstance(answer, int) or answer not in allowed for answer in answers)
    failed = (
        wrong
        + (cheap != 200)
        + (max(gap_s, waited_s) > MAX_GAP_S)
        + sum(grown > max_growth_mib for grown in growth.values())
    )
    counts = ", ".join(f"{count} x {status}" for status, count in Counter(answers).items())
    grown = ", ".join(f"{process} {mib:+.0f} MiB" for process, mib in growth.items())
    return Row(
        name,
        len(posts),
        failed,
        f"{counts} in {took_s:.1f} s; others waited {gap_s:.1f} and {waited_s:.1f} s; {grown}",
    )


def outcome(target: Target, post: dict[str, object]) -> int | str:
    try:
        with httpx.Client(base_url=target.url, timeout=120) as alone:
            return target.speak(client=alone, **{"text": "Hello.", **post}).status_code
    except httpx.TransportError as error:
        return type(error).__name__


def longest_gap_s(target: Target) -> float:
    """Return the longest time between two chunks of a stream in an uploaded voice."""
    last, longest = time.monotonic(), 0.0
    model = target.models[0]
    body = {"model": model, "input": "word " * 100, "voice": VOICE[model]}
    body |= {"response_format": "pcm", "max_new_tokens": 60}
    with target.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for _ in answer.iter_raw():
            now = time.monotonic()
            last, longest = now, max(longest, now - last)
    return longest


def upload(target: Target) -> None:
    """Upload the other client's voice and speak in it once."""
    sample = {"audio_sample": ("other.flac", silence(5, 16000))}
    answer = target.http.post("/v1/audio/voices", data={"name": "other"}, files=sample)
    assert answer.status_code in (200, 409), answer.text  # an earlier attack may have left it
    answer = target.speak(voice="other")
    assert answer.status_code == 200, answer.text


def silence(seconds: float, rate_hz: int, form: str = "FLAC", start: np.ndarray | None = None) -> bytes:
    """Return a file that is silent after its start."""
    file = io.BytesIO()
    samples = np.zeros(int(seconds * rate_hz), np.int16)
    start = np.full(100, 9000) if start is None else start
    samples[: len(start)] = start
    soundfile.write(file, samples, rate_hz, format=form, subtype="PCM_16")
    return file.getvalue()
