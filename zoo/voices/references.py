"""Reference audio: check and resample a user's clip for an encoder, and keep encoded clips in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from zoo.nn.resample import by_soxr, resampled
from zoo.request import AudioClip, RequestError, recording_name

RATES_HZ = (8_000, 192_000)
REFERENCES = "references"  # the field of a request whose clips are voices
SILENT = 1e-3  # a peak of -60 dB of full scale
LOUDEST = 2.0**31  # integers of 32 bits, written as floats; the squares of much larger ones are infinite


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class Copy(Protocol[T]):
    """A copy of one encoded reference on disk (zoo/voices/encoded_files.py)."""

    def read(self) -> T | None: ...

    def write(self, value: T) -> None: ...

    def read_recording(self) -> None: ...


class References(Generic[T]):
    """A cache of encoded references that evicts the least recently used. May be called from several threads.

    `num_encoded` counts how often a clip was encoded.
    """

    def __init__(self, max_bytes: int = 256 << 20):
        self.max_bytes = max_bytes
        self.num_encoded = 0
        self._held_bytes = 0
        self._held: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding = threading.Lock()

    def __deepcopy__(self, memo: object) -> References[T]:
        """Return an empty cache, for a copy of a family."""
        return References(self.max_bytes)

    def get(self, key: bytes, encode: Callable[[], T], file: Copy[T] | None = None) -> T:
        """Return the encoded reference from memory, or else from the file, or else from `encode`, and keep
        it. The result of `encode` is also written to the file. Exceptions of `encode` pass through.

        Only a reference that must be encoded waits for others that are."""
        found = self._find(key)
        if found is None and file is not None:
            found = self._from_file(key, file)
        if found is not None:
            return found
        # One at a time: encoders are wide, and a thread that had to wait may find its reference encoded.
        with self._encoding:
            found = self._find(key)
            if found is None:
                found = self._made(encode, file)
                self._hold(key, found)
            return found

    def _from_file(self, key: bytes, file: Copy[T]) -> T | None:
        found = file.read()
        if found is None:
            file.read_recording()
        else:
            self._hold(key, found)
        return found

    def _made(self, encode: Callable[[], T], file: Copy[T] | None) -> T:
        made = encode()
        self.num_encoded += 1
        if file is not None:
            file.write(made)
        return made

    def _find(self, key: bytes) -> T | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def _hold(self, key: bytes, value: T) -> None:
        with self._lock:
            if key in self._held:  # another thread read the same file
                return
            self._held[key] = value
            self._held_bytes += value.num_bytes
            while self._held_bytes > self.max_bytes:
                _, given_up = self._held.popitem(last=False)
                self._held_bytes -= given_up.num_bytes


def content(clip: AudioClip, *what_else: object, field: str = REFERENCES) -> bytes:
    """Return a clip's key: a hash of 16 bytes of its samples, its rate and `what_else`. field and errors are
    those of `mono`."""
    name = clip.name
    if name is None:
        _check_form(clip, field)
        name = recording_name(clip.samples, clip.sample_rate_hz)
    return blake2b(repr((name, *what_else)).encode(), digest_size=16).digest()


def first_channel(clip: AudioClip, clip_s: tuple[float, float], field: str = REFERENCES) -> np.ndarray:
    """Return the first channel of a clip [N] float32, at the clip's rate. The limits, `field` and errors are
    those of `mono`."""
    first = clip.samples if clip.samples.ndim == 1 else clip.samples[0]
    return mono(AudioClip(first, clip.sample_rate_hz), clip.sample_rate_hz, clip_s, field)


def mono(clip: AudioClip, rate_hz: int, clip_s: tuple[float, float], field: str = REFERENCES) -> np.ndarray:
    """Return a clip as one channel at rate_hz, [N] float32: channels are averaged, then resampled (soxr, high
    quality).

    clip_s: the shortest and the longest clip. field: of the request that has the clip, "references" or "turns".
    Raises RequestError with that field for audio that cannot be used.
    Source: librosa, to_mono and resample, which the reference implementations use: N is rounded up.
    """
    _check_form(clip, field)
    samples = np.ascontiguousarray(clip.samples if clip.samples.ndim == 1 else clip.samples.mean(0))
    lasts_s, (shortest_s, longest_s) = len(samples) / clip.sample_rate_hz, clip_s
    if not shortest_s <= lasts_s <= longest_s:
        raise RequestError(
            field,
            f"{_noun(field)} lasts {lasts_s:.4g} s; from {shortest_s:g} to {longest_s:g} s are possible",
        )
    if not np.isfinite(samples).all():
        raise RequestError(field, f"{_noun(field)} has samples that are not finite (NaN or infinite)")
    peak = np.abs(samples).max()
    if peak < SILENT:
        raise RequestError(field, f"{_noun(field)} is silent: its loudest sample is {peak:.2g} of full scale")
    if peak > LOUDEST:
        raise RequestError(
            field,
            f"{_noun(field)}'s loudest sample is {peak:.2g} times full scale; up to {LOUDEST:.2g} is possible",
        )
    return samples if clip.sample_rate_hz == rate_hz else by_soxr(samples, clip.sample_rate_hz, rate_hz)


def mono_by_sinc(clip: AudioClip, rate_hz: int, clip_s: tuple[float, float]) -> Tensor:
    """Return the same as `mono`, [N] on the CPU, resampled by the windowed sinc of torchaudio."""
    samples = torch.tensor(mono(clip, clip.sample_rate_hz, clip_s))
    return resampled(samples, clip.sample_rate_hz, rate_hz)


def _noun(field: str) -> str:
    return "the reference" if field == REFERENCES else "the clip"


def _check_form(clip: AudioClip, field: str) -> None:
    samples, rate_hz = clip.samples, clip.sample_rate_hz
    if (
        not isinstance(samples, np.ndarray)
        or samples.dtype != np.float32
        or samples.ndim not in (1, 2)
        or len(samples) == 0
    ):
        came = (
            f"{samples.dtype} {list(samples.shape)}"
            if isinstance(samples, np.ndarray)
            else type(samples).__name__
        )
        raise RequestError(
            field,
            f"{_noun(field)}'s samples are {came}; a float32 array [N] or [channels, N] is needed",
        )
    if not isinstance(rate_hz, int) or not RATES_HZ[0] <= rate_hz <= RATES_HZ[1]:
        raise RequestError(
            field,
            f"{_noun(field)}'s rate is {rate_hz!r} Hz; an integer from {RATES_HZ[0]} to {RATES_HZ[1]} is possible",
        )
