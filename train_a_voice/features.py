"""Features of a frame of speech (80 ms): a log mel spectrogram, pitch and voicing, eight hops of each.

The window of hop j ends where the hop ends and begins at most 360 samples before it. So features depend only
on samples up to their frame, and a causal decoder can reproduce them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import soxr

RATE_HZ = 24_000
FRAME = 1920  # samples
HOPS = 8  # per frame
HOP = FRAME // HOPS  # samples, 10 ms
WINDOW = 600  # samples, 25 ms
BEFORE = WINDOW - HOP  # samples of the window before its hop
BANDS = 40
TOP_HZ = 8_000.0  # flite's voice has no energy above
# -62 dB below a loud band. Bands are sums over triangles of height one. Triangles of equal area, librosa's
# default, would put everything above 1 kHz below any floor.
FLOOR = 0.02
PITCH_HZ = (100.0, 300.0)


@dataclass(frozen=True)
class Features:
    mel: np.ndarray  # [T, HOPS, BANDS], natural log
    pitch_hz: np.ndarray  # [T, HOPS]; interpolated through silence and noise
    voicing: np.ndarray  # [T, HOPS], 0 to 1


def resample(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    return soxr.resample(samples, rate_hz, RATE_HZ, quality="HQ").astype(np.float32)


@cache
def mel_matrix() -> np.ndarray:
    """Return [bins, BANDS]: triangles of height one, with corners at equal distances on the mel scale."""
    top = 2595 * np.log10(1 + TOP_HZ / 700)
    corners = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    bins = np.arange(WINDOW // 2 + 1) * RATE_HZ / WINDOW
    up = (bins[:, None] - corners[:-2]) / (corners[1:-1] - corners[:-2])
    down = (corners[2:] - bins[:, None]) / (corners[2:] - corners[1:-1])
    return np.maximum(0, np.minimum(up, down)).astype(np.float32)


@cache
def hann() -> np.ndarray:
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)


def windows(samples: np.ndarray) -> np.ndarray:
    """Return windows [N / HOP, WINDOW] of samples [N] as a view; N is a multiple of HOP."""
    padded = np.concatenate((np.zeros(BEFORE, np.float32), samples))
    return np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]


def spectra(samples: np.ndarray) -> np.ndarray:
    """Return complex spectra [N / HOP, bins] of samples [N]; N is a multiple of HOP."""
    return np.fft.rfft(windows(samples) * hann(), axis=1).astype(np.complex64)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Return the log mel spectrogram [N / HOP, BANDS] of samples [N]."""
    return np.log(np.maximum(np.abs(spectra(samples)) @ mel_matrix(), FLOOR))


def pad_to_frames(samples: np.ndarray) -> np.ndarray:
    return np.pad(samples, (0, -len(samples) % FRAME))


def analyse(samples: np.ndarray) -> Features:
    """Return the features of ceil(N / FRAME) frames of samples [N] at 24 kHz."""
    samples = pad_to_frames(samples)
    pitch_hz, voicing = pitch(samples)
    mel = log_mel(samples)
    by_frame = [x.reshape(-1, HOPS, *x.shape[1:]) for x in (mel, pitch_hz, voicing)]
    return Features(*(x.astype(np.float32) for x in by_frame))


def pitch(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Hz and voicing, [N / HOP] each, of samples [N].

    The method is the autocorrelation of the lowest 1.2 kHz, divided by that of the window, and the best path
    through it (Boersma 1993, with our own costs)."""
    rate_hz = 4_000
    low = soxr.resample(samples, RATE_HZ, rate_hz, quality="HQ").astype(np.float32)
    hop, window = rate_hz * HOP // RATE_HZ, 160  # 10 and 40 ms
    before = window // 2 + hop // 2  # the middle of WINDOW is 5 ms before its hop's end, about as here
    padded = np.pad(low, (before, window))
    parts = np.lib.stride_tricks.sliding_window_view(padded, window)[: len(samples) // HOP * hop : hop]
    taper = 0.5 - 0.5 * np.cos(2 * np.pi * (np.arange(window) + 0.5) / window)
    spectrum = np.abs(np.fft.rfft((parts - parts.mean(1, keepdims=True)) * taper, 1024, axis=1)) ** 2
    spectrum[:, int(1200 / rate_hz * 1024) :] = 0
    own = np.fft.irfft(np.abs(np.fft.rfft(taper, 1024)) ** 2)
    correlation = np.fft.irfft(spectrum, axis=1)
    energy = correlation[:, :1]
    lags = np.arange(rate_hz / PITCH_HZ[1], rate_hz / PITCH_HZ[0], 0.25)
    low_lag = lags.astype(int)
    part = lags - low_lag
    normed = correlation[:, :64] / (own[:64] / own[0]) / np.maximum(energy, 1e-9)
    strength = normed[:, low_lag] * (1 - part) + normed[:, low_lag + 1] * part  # [J, lags]
    path = best_path(strength - 0.06 * np.log2(lags / lags[0]), np.log2(lags))
    best = strength[np.arange(len(path)), path]
    loud = energy[:, 0] > 1e-4 * np.quantile(energy, 0.95)
    is_voiced = (best > 0.6) & loud
    voicing = np.convolve(np.pad(is_voiced.astype(np.float32), 1, mode="edge"), (0.25, 0.5, 0.25), "valid")
    return fill_gaps(rate_hz / lags[path], is_voiced), voicing


def best_path(scores: np.ndarray, octaves: np.ndarray) -> np.ndarray:
    """Return indices [J] with the greatest sum of scores [J, L], minus 1.5 for each octave of a jump."""
    jump = 1.5 * np.abs(octaves[:, None] - octaves)
    total, back = scores[0], np.zeros(scores.shape, np.int64)
    for j in range(1, len(scores)):
        from_each = total[:, None] - jump
        back[j] = from_each.argmax(0)
        total = from_each.max(0) + scores[j]
    path = [int(total.argmax())]
    for j in range(len(scores) - 1, 0, -1):
        path.append(int(back[j, path[-1]]))
    return np.array(path[::-1])


def fill_gaps(pitch_hz: np.ndarray, is_voiced: np.ndarray) -> np.ndarray:
    where = np.flatnonzero(is_voiced)
    if len(where) == 0:
        return np.full(len(pitch_hz), 175.0)
    return np.interp(np.arange(len(pitch_hz)), where, pitch_hz[where])
