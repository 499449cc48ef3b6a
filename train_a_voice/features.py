"""The log mel spectrogram: eight hops a frame of 80 ms, 36 bands each.

The window of hop j ends where the hop ends and begins at most 360 samples before it. So features depend only
on samples up to their frame, and a causal decoder can reproduce them.
"""

from __future__ import annotations

from functools import cache

import numpy as np

RATE_HZ = 24_000
FRAME = 1920  # samples
HOPS = 8  # per frame
HOP = FRAME // HOPS  # samples, 10 ms
WINDOW = 600  # samples, 25 ms
BEFORE = WINDOW - HOP  # samples of the window before its hop
BANDS = 36
# Closer corners would resolve the harmonics of a voice: the bands would then describe its pitch.
LEAST_HZ = 160.0
TOP_HZ = 8_000.0  # flite's voices have no energy above
# -62 dB below a loud band. Bands are sums over triangles of height one. Triangles of equal area, librosa's
# default, would put everything above 1 kHz below any floor.
FLOOR = 0.02


@cache
def bins_hz() -> np.ndarray:
    return np.arange(WINDOW // 2 + 1) * RATE_HZ / WINDOW


@cache
def corners_hz() -> np.ndarray:
    """Return [BANDS + 2] corners up to TOP_HZ: equal steps on the mel scale, but none below LEAST_HZ."""
    low, high = 0.0, 2.0  # step of the mel scale, in units of a tenth of (700 Hz + corner)
    for _ in range(60):
        middle = (low + high) / 2
        corners = [0.0]
        while len(corners) < BANDS + 2:
            corners.append(corners[-1] + max(LEAST_HZ, middle * (corners[-1] + 700) * 0.1))
        low, high = (low, middle) if corners[-1] > TOP_HZ else (middle, high)
    return np.array(corners)


@cache
def mel_matrix() -> np.ndarray:
    """Return [bins, BANDS]: triangles of height one."""
    bins, corners = bins_hz(), corners_hz()
    up = (bins[:, None] - corners[:-2]) / (corners[1:-1] - corners[:-2])
    down = (corners[2:] - bins[:, None]) / (corners[2:] - corners[1:-1])
    return np.maximum(0, np.minimum(up, down)).astype(np.float32)


@cache
def hann() -> np.ndarray:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)


def spectra(samples: np.ndarray) -> np.ndarray:
    """Return complex spectra [N / HOP, bins] of samples [N]; N is a multiple of HOP."""
    padded = np.concatenate((np.zeros(BEFORE, np.float32), samples))
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    return np.fft.rfft(windows * hann(), axis=1).astype(np.complex64)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Return the log mel spectrogram [N / HOP, BANDS] of samples [N]; N is a multiple of HOP."""
    return np.log(np.maximum(np.abs(spectra(samples)) @ mel_matrix(), FLOOR))
