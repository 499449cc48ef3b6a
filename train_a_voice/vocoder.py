"""A channel vocoder, and the voice that the decoder learns: fixed noise and harmonics, shaped by the mel
spectrogram.

The pitch of a frame is a whole number of cycles, `cycles`, of 12.5 Hz each. So all harmonics begin a period
with the frame, and a sample's position in the frame determines their phase. The waveform, noise included, is
a function of the frame's codes. Training can compare samples themselves, not only the loudness of their
bands.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from train_a_voice.features import (
    BANDS,
    BEFORE,
    FRAME,
    HOP,
    HOPS,
    RATE_HZ,
    WINDOW,
    corners_hz,
    hann,
    mel_matrix,
    spectra,
)

MIN_CYCLES, NUM_CYCLES = 5, 16  # 62.5 to 250 Hz: slt speaks at 150 to 216 Hz, rms at 65 to 141 Hz
FRAME_HZ = RATE_HZ / FRAME
# The formants of each speaker as multiples of flite's. With lower ones, fewer words of slt are misheard.
FORMANTS = (0.9, 1.0)
HARMONICS_HZ = 4_000.0  # only noise above
ROUNDS = 3  # of measuring the result and correcting its shape
SEED = 5


def cycles(pitch_hz: np.ndarray, voicing: np.ndarray) -> np.ndarray:
    """Return a frame's cycles [T] from pitch and voicing [T, HOPS]. In doubt, the previous number stays."""
    weights = voicing + 1e-3
    mean = (pitch_hz * weights).sum(1) / weights.sum(1) / FRAME_HZ
    kept = [round(float(mean[0]))]
    for value in mean[1:]:
        kept.append(kept[-1] if abs(value - kept[-1]) < 0.65 else round(float(value)))
    return np.clip(kept, MIN_CYCLES, MIN_CYCLES + NUM_CYCLES - 1)


@cache
def sounds() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return harmonics [NUM_CYCLES, FRAME], and noise above and below HARMONICS_HZ, [FRAME] each.

    They are equally loud in every Hz and periodic: the end of a frame joins its beginning."""
    bins_hz = np.arange(FRAME // 2 + 1) * FRAME_HZ
    rng = np.random.default_rng(SEED)
    phase = np.exp(2j * np.pi * rng.random(len(bins_hz)))
    low = np.clip((HARMONICS_HZ + 500 - bins_hz) / 1000, 0, 1)
    noise_low, noise_high = (np.fft.irfft(phase * part**0.5) for part in (low, 1 - low))
    harmonics = np.zeros((NUM_CYCLES, len(bins_hz)), np.complex128)
    for i in range(NUM_CYCLES):
        count = MIN_CYCLES + i
        k = np.arange(1, int((HARMONICS_HZ + 500) / FRAME_HZ / count) + 1)
        # Schroeder phases: the flattest waveform that equal harmonics can have
        harmonics[i, k * count] = np.exp(-1j * np.pi * k * (k - 1) / len(k)) * (count * low[k * count]) ** 0.5
    scale = FRAME**0.5
    return np.fft.irfft(harmonics) * scale, noise_high * scale, noise_low * scale


def excitation(cycles: np.ndarray, voicing: np.ndarray) -> np.ndarray:
    """Return samples [T * FRAME] with a flat spectrum for cycles [T] and voicing [T, HOPS]."""
    harmonics, noise_high, noise_low = sounds()
    num = len(cycles)
    at = (np.arange(num * FRAME) + BEFORE / 2) / HOP - 0.5
    voiced = np.interp(at, np.arange(num * HOPS), voicing.reshape(-1))
    tone = harmonics[cycles - MIN_CYCLES].reshape(-1)
    return np.tile(noise_high, num) + voiced * tone + (1 - voiced) * np.tile(noise_low, num)


def join(spectrum: np.ndarray) -> np.ndarray:
    """Return samples [J * HOP] of spectra [J, bins] that were windowed with Hann windows.

    Windows are overlapped, added, and divided by the sum of their squares."""
    parts = np.fft.irfft(spectrum, WINDOW, axis=1) * hann()
    total = np.zeros(len(parts) * HOP + BEFORE)
    weight = np.full(len(total), 1e-3)
    # WINDOW is not a multiple of HOP, so the pieces are added one by one
    for offset in range(0, WINDOW, HOP // 4):
        piece = slice(offset, offset + HOP // 4)
        at = np.arange(len(parts))[:, None] * HOP + np.arange(offset, offset + HOP // 4)
        total[at] += parts[:, piece]
        weight[at] += hann()[piece] ** 2
    return (total / weight)[BEFORE:].astype(np.float32)


@cache
def moved(formants: float) -> np.ndarray:
    """Return [BANDS, BANDS]: a log mel spectrogram times it has its formants at `formants` times their
    frequency.

    A band takes the level from the frequency that moves to its middle, by interpolation."""
    middle = corners_hz()[1:-1]
    place = np.interp(middle / formants, middle, np.arange(BANDS))
    below = np.minimum(place.astype(int), BANDS - 2)
    matrix = np.zeros((BANDS, BANDS), np.float32)
    matrix[below, np.arange(BANDS)] = 1 - (place - below)
    matrix[below + 1, np.arange(BANDS)] = place - below
    return matrix


def speak(mel: np.ndarray, cycles: np.ndarray, voicing: np.ndarray, speaker: int) -> np.ndarray:
    """Return samples at 24 kHz [T * FRAME] for mel [T, HOPS, BANDS], cycles [T] and voicing [T, HOPS]."""
    target = mel.reshape(-1, BANDS) @ moved(FORMANTS[speaker])
    flat = excitation(cycles, voicing).astype(np.float32)
    spectrum = spectra(flat)
    matrix = mel_matrix()
    weight = matrix.sum(1)
    back = matrix.T / np.maximum(weight, 1e-3)  # the gain of a bin is the mean of its bands' gains
    spectrum[:, weight < 1e-3] = 0
    gain = np.zeros_like(target)
    samples = flat
    for _ in range(ROUNDS):
        heard = np.log(np.maximum(np.abs(spectra(samples)) @ matrix, 1e-5))
        gain += np.clip(target - heard, -8, 8)
        samples = join(spectrum * np.exp(gain @ back))
    return samples
