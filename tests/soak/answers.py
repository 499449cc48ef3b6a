"""Compare an answer with the first answer to the same request, or with the shape of an error."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp
import av
import numpy as np

CONTAINERS = {"mp3": "mp3", "opus": "ogg", "aac": "aac", "flac": "flac", "wav": "wav"}
LOSSLESS = ("pcm", "wav", "flac")
# Steps of 16 bits between a stream and the reproducible file, or between two files of a model of latents.
# Rounding differs by one; a change of the sample rate or the speed adds up several of those.
MAX_STEPS = 2
# Of a lossy stream: the difference's RMS over the file's. One step can change an encoder's decision, by up to
# 21 % of a short AAC file (15 of 20,000 answers in an hour); another speech differs by 1.4.
MAX_ERROR = 0.3
# Samples before the speech in a stream of MP3; a file states them in its header, and decoders drop them.
MP3_DELAY = 1105
MAX_TAIL = 2304  # more samples in a stream of MP3 or AAC than in the speech: docs/http.md
READY_S = 90.0  # for a server after a kill
ERROR_KEYS = {"message", "type", "param", "code"}
BUSY = ("engine_full", "server_busy", "model_loading")
STOPPED = (
    *("engine_not_ready", "engine_stopped", "engine_failed", "stopping"),
    *("works_unavailable", "model_not_loaded"),
)


NO_STATUS = 0  # of an error in an event or in a batch's entry


class Wrong(Exception):
    """The server's answer is neither whole and equal to the first one, nor a proper error."""


class Refused(Exception):
    """The server refused the request with a proper error. `code` is OpenAI's field."""

    def __init__(self, status: int, error: dict[str, Any]):
        super().__init__(f"{status} {error['message']}")
        self.status = status
        self.code = error["code"]

    @property
    def is_busy(self) -> bool:
        return self.status in (NO_STATUS, 503) and self.code in BUSY

    @property
    def is_stopped(self) -> bool:
        return self.status in (NO_STATUS, 500, 503) and self.code in STOPPED


BROKEN = (aiohttp.ClientError, ConnectionError)
UNAVAILABLE = (Refused, Wrong, TimeoutError, *BROKEN)


def refusal(status: int, error: object) -> Refused:
    """Return the error object of an answer, an event or a batch's entry. Raises Wrong."""
    if not isinstance(error, dict) or set(error) != ERROR_KEYS or not error["message"]:
        raise Wrong(f"{status} without OpenAI's error object: {str(error)[:200]}")
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status != NO_STATUS and error["type"] != kind:
        raise Wrong(f"{status} has the type {error['type']}")
    return Refused(status, error)


def refusal_of(status: int, data: bytes, retry_after: str | None) -> Refused:
    """Return the error of an HTTP answer. Raises Wrong."""
    try:
        body = json.loads(data)
    except ValueError:
        raise Wrong(f"{status} is not JSON: {data[:200]!r}") from None
    if not isinstance(body, dict) or set(body) != {"error"}:
        raise Wrong(f"{status} without OpenAI's error object: {data[:200]!r}")
    found = refusal(status, body["error"])
    if found.is_busy and retry_after is None:
        raise Wrong("503 without Retry-After")
    return found


def check_status(status: int, data: bytes, retry_after: str | None) -> None:
    """Raises Refused or Wrong if the status is not one of success."""
    if status >= 300:
        raise refusal_of(status, data, retry_after)


def decoded(form: str, data: bytes) -> np.ndarray:
    """Return the samples of a file or stream, int32 [samples]. Raises Wrong."""
    if form == "pcm":
        if len(data) % 2:
            raise Wrong(f"pcm of {len(data)} bytes ends within a sample")
        return np.frombuffer(data, "<i2").astype(np.int32)
    parts = [np.zeros(0, np.int32)]
    try:
        with av.open(io.BytesIO(data), format=CONTAINERS[form]) as file:
            for frame in file.decode(file.streams.audio[0]):
                parts.append(as_int(frame.to_ndarray().reshape(-1)))
    except (av.FFmpegError, IndexError) as error:
        raise Wrong(f"{form} of {len(data)} bytes cannot be decoded: {error}") from None
    return np.concatenate(parts)


def as_int(samples: np.ndarray) -> np.ndarray:
    if samples.dtype == np.int16:
        return samples.astype(np.int32)
    assert samples.dtype == np.float32, samples.dtype
    return np.rint(samples * 32768).astype(np.int32)


def check_file(form: str, data: bytes, first: bytes, *, is_exact: bool) -> None:
    """Compare two answers with `"stream": false`. Raises Wrong.

    is_exact: whether equal requests give equal bytes, as they do for models that draw codes in fp32."""
    if data == first:
        return
    if is_exact:
        raise Wrong(f"a {form} file of {len(data)} bytes differs from the first, of {len(first)} bytes")
    check_samples(form, decoded(form, data), decoded(form, first))


def check_stream(form: str, data: bytes, first: bytes) -> None:
    """Compare a whole stream with the first file. Raises Wrong."""
    samples, expected = decoded(form, data), decoded(form, first)
    if form == "mp3":
        samples = without_delay(samples, len(expected))
    check_samples(form, samples, expected)


def without_delay(samples: np.ndarray, num_samples: int) -> np.ndarray:
    num_more = len(samples) - num_samples
    if not MP3_DELAY <= num_more <= MAX_TAIL:
        raise Wrong(f"a stream of MP3 has {num_more} samples more than the file")
    return samples[MP3_DELAY : MP3_DELAY + num_samples]


def check_samples(form: str, samples: np.ndarray, expected: np.ndarray) -> None:
    if len(samples) != len(expected):
        raise Wrong(f"{form}: {len(samples)} samples, and the first answer had {len(expected)}")
    if not len(samples):
        raise Wrong(f"{form} without a sample")
    difference = np.abs(samples - expected)
    if form in LOSSLESS:
        if difference.max() > MAX_STEPS:
            at = int(difference.argmax())
            raise Wrong(f"{form}: sample {at} differs from the first answer's by {difference.max()}")
    elif (error := rms(difference) / max(1.0, rms(expected))) > MAX_ERROR:
        raise Wrong(f"{form}: differs from the first answer by {error:.1%}")


def rms(samples: np.ndarray) -> float:
    return float(np.sqrt((samples.astype(np.float64) ** 2).mean()))


def check_beginning(data: bytes, first: bytes) -> None:
    """Compare the beginning of a pcm stream, which the client left, with the first file. Raises Wrong."""
    samples = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.int32)
    expected = decoded("pcm", first)
    if len(samples) > len(expected):
        raise Wrong(f"{len(samples)} samples, and the first answer had {len(expected)}")
    if len(samples):
        check_samples("pcm", samples, expected[: len(samples)])
