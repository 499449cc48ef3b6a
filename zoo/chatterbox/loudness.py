"""Bring a recording to a loudness: ITU-R BS.1770-4, two filters and two gates, for one channel.

Source: pyloudnorm 0.1.1, Meter with its default filters, which Chatterbox Turbo uses.
"""

from __future__ import annotations

import math

import numpy as np

BLOCK_S, STEP = 0.4, 0.25  # a block, and the share of it after which the next one begins
ABSOLUTE_LUFS, RELATIVE_LU, OFFSET = -70.0, -10.0, -0.691


def at_loudness(samples: np.ndarray, rate_hz: int, lufs: float) -> np.ndarray:
    """Return samples [N] float32 with a gain. A recording without a block above the gates stays as it is."""
    loudness = integrated(samples, rate_hz)
    gain = 10 ** ((lufs - loudness) / 20) if math.isfinite(loudness) else 1.0
    return samples * np.float32(gain)


def integrated(samples: np.ndarray, rate_hz: int) -> float:
    """Return the loudness of samples [N] in LUFS; -inf if all blocks are below the gates."""
    filters = shelf(1500.0, 4.0, 1 / math.sqrt(2), rate_hz), high_pass(38.0, 0.5, rate_hz)
    x = filtered(samples.astype(np.float64), filters, rate_hz)
    num = round((len(x) / rate_hz - BLOCK_S) / (BLOCK_S * STEP)) + 1
    starts = [int(BLOCK_S * j * STEP * rate_hz) for j in range(num)]
    stops = [int(BLOCK_S * (j * STEP + 1) * rate_hz) for j in range(num)]
    power = np.array([np.square(x[a:b]).sum() for a, b in zip(starts, stops, strict=True)]) / (
        BLOCK_S * rate_hz
    )
    loud = power[power > 0]
    loud = loud[OFFSET + 10 * np.log10(loud) >= ABSOLUTE_LUFS]
    if len(loud) == 0:
        return -math.inf
    gate = OFFSET + 10 * math.log10(loud.mean()) + RELATIVE_LU
    loud = loud[OFFSET + 10 * np.log10(loud) > gate]
    return OFFSET + 10 * math.log10(loud.mean())


Filter = tuple[np.ndarray, np.ndarray]


def shelf(hz: float, gain_db: float, q: float, rate_hz: int) -> Filter:
    """Return a high shelf (R. Bristow-Johnson, Audio EQ Cookbook)."""
    amplitude = 10 ** (gain_db / 40)
    w = 2 * math.pi * hz / rate_hz
    alpha, cos = math.sin(w) / (2 * q), math.cos(w)
    root = 2 * math.sqrt(amplitude) * alpha
    up, down = amplitude + 1, amplitude - 1
    b = [
        amplitude * (up + down * cos + root),
        -2 * amplitude * (down + up * cos),
        amplitude * (up + down * cos - root),
    ]
    a = [up - down * cos + root, 2 * (down - up * cos), up - down * cos - root]
    return np.array(b) / a[0], np.array(a) / a[0]


def high_pass(hz: float, q: float, rate_hz: int) -> Filter:
    """Return a high pass (R. Bristow-Johnson, Audio EQ Cookbook)."""
    w = 2 * math.pi * hz / rate_hz
    alpha, cos = math.sin(w) / (2 * q), math.cos(w)
    b = [(1 + cos) / 2, -(1 + cos), (1 + cos) / 2]
    a = [1 + alpha, -2 * cos, 1 - alpha]
    return np.array(b) / a[0], np.array(a) / a[0]


def filtered(x: np.ndarray, filters: tuple[Filter, ...], rate_hz: int) -> np.ndarray:
    """Apply filters to x [N] float64, as a product of spectra. A second of zeros behind x holds all of their
    response that would wrap around."""
    size = len(x) + rate_hz
    spectrum = np.fft.rfft(x, size)
    for b, a in filters:
        spectrum *= np.fft.rfft(b, size) / np.fft.rfft(a, size)
    return np.fft.irfft(spectrum, size)[: len(x)]
