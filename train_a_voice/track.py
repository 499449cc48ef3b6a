"""Features of a frame of speech from the parameters of flite's voices, without their sound.

A row of a track (5 ms) holds the pitch (0 where unvoiced), an unused value, and pairs of mean and standard
deviation: 25 mel cepstra and then their 25 deltas. Flite finds the smooth cepstra that fit all of them best,
sharpens them, and filters pulses and noise with them. A mel band follows from the filter's gain. The pulses
and the noise add a constant to each band, the speaker's colour, which is measured once on a few waves.

Nothing here is random, so a text has one set of codes. A wave by flite has other noise in every speech.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import soxr

from train_a_voice import vocoder
from train_a_voice.features import BANDS, FLOOR, FRAME, HOPS, RATE_HZ, bins_hz, log_mel, mel_matrix
from train_a_voice.flite import RATE_HZ as FLITE_HZ
from train_a_voice.flite import Speech

ORDER = 25  # mel cepstra, with the energy
ALPHA = 0.42  # warping of their frequency axis at 16 kHz
SHARPEN = 1.4  # flite's postfilter, from the third cepstrum on
BETWEEN = (0.25, 0.5, 0.25)  # weights of three rows in a hop of two
LOUD = np.log(0.05)  # bands below it say nothing about the colour
FEW = 5.0  # hops from which a band's own colour counts more than the speaker's
MOST_HZ = 1_000.0  # of a pitch: flite's is infinite in a rare text


@dataclass(frozen=True)
class Features:
    mel: np.ndarray  # [T, HOPS, BANDS] float32, natural log
    cycles: np.ndarray  # [T], see vocoder
    voicing: np.ndarray  # [T, HOPS] float32, 0 to 1
    speaker: int


@dataclass(frozen=True)
class Colours:
    """The bands of flite's pulses and noise, added to the filter's gain: [speakers, BANDS] each, in nats."""

    voiced: np.ndarray
    unvoiced: np.ndarray

    def save(self, path: Path) -> None:
        np.savez(path, voiced=self.voiced, unvoiced=self.unvoiced)

    @classmethod
    def load(cls, path: Path) -> Colours:
        kept = np.load(path)
        return cls(kept["voiced"], kept["unvoiced"])


def smooth(mean: np.ndarray, std: np.ndarray, delta: np.ndarray, delta_std: np.ndarray) -> np.ndarray:
    """Return the values [T, D] that are the likeliest (maximum-likelihood parameter generation).

    They are the least squares of (c[t] - mean[t]) / std[t] and ((c[t + 1] - c[t - 1]) / 2 - delta[t]) /
    delta_std[t]. The first and the last row have no delta. The equations join only t and t + 2, so one pass forwards
    and one backwards solve them."""
    weight, slope = std**-2.0, delta_std[1:-1] ** -2.0 / 4
    diagonal, right = weight.copy(), weight * mean
    diagonal[2:] += slope
    diagonal[:-2] += slope
    right[2:] += 2 * slope * delta[1:-1]
    right[:-2] -= 2 * slope * delta[1:-1]
    factor = np.empty_like(slope)
    # two rows at a time, since a row and the next do not meet in an equation
    edges = [(t, min(t + 2, len(slope))) for t in range(0, len(slope), 2)]
    pairs = [(slice(begin, end), slice(begin + 2, end + 2)) for begin, end in edges]
    for here, later in pairs:
        factor[here] = -slope[here] / diagonal[here]
        diagonal[later] += factor[here] * slope[here]
        right[later] -= factor[here] * right[here]
    values = right / diagonal
    for here, later in reversed(pairs):
        values[here] -= factor[here] * values[later]
    return values


@cache
def cosines() -> np.ndarray:
    """Return [ORDER, bins]: the log gain of a unit of each mel cepstrum. Bins above flite's top get the
    top's."""
    angle = 2 * np.pi * np.minimum(bins_hz(), FLITE_HZ / 2) / FLITE_HZ
    warped = angle + 2 * np.arctan(ALPHA * np.sin(angle) / (1 - ALPHA * np.cos(angle)))
    return np.cos(np.arange(ORDER)[:, None] * warped)


def envelope(cepstra: np.ndarray) -> np.ndarray:
    """Return the log of the filter's mel bands [T, BANDS] for cepstra [T, ORDER]."""
    return np.log(np.exp(cepstra @ cosines()) @ mel_matrix())


def by_hop(rows: np.ndarray, first: int, num_hops: int) -> np.ndarray:
    """Return the means of three rows around each hop's first one: [num_hops, ...] of rows [T, ...]."""
    at = first + 2 * np.arange(num_hops)
    near = (rows[np.clip(at + shift, 0, len(rows) - 1)] for shift in (-1, 0, 1))
    return np.stack([weight * part for weight, part in zip(BETWEEN, near, strict=True)]).sum(0)


def uncoloured(speech: Speech) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hops of the filter's log mel [J, BANDS], of pitch in Hz [J] and of voicing [J]."""
    track, num_hops = speech.track, speech.utterance.num_frames * HOPS
    statics, deltas = track[:, 2 : 2 + 2 * ORDER], track[:, 2 + 2 * ORDER :]
    cepstra = smooth(statics[:, ::2], statics[:, 1::2], deltas[:, ::2], deltas[:, 1::2])
    cepstra[:, 2:] *= SHARPEN
    is_voiced = (track[:, 0] > 0) & (track[:, 0] < MOST_HZ)
    where = np.flatnonzero(is_voiced)
    pitch_hz = np.interp(np.arange(len(track)), where, track[where, 0]) if len(where) else track[:, 0]
    rows = (envelope(cepstra), pitch_hz, is_voiced.astype(float))
    mel, pitch_hz, voicing = (by_hop(x, speech.first, num_hops) for x in rows)
    return mel, pitch_hz, voicing


def analyse(speech: Speech, speaker: int, colours: Colours) -> Features:
    """Return the features of an utterance. Behind its sound they are silent."""
    mel, pitch_hz, voicing = uncoloured(speech)
    voiced = voicing[:, None]
    mel = mel + voiced * colours.voiced[speaker] + (1 - voiced) * colours.unvoiced[speaker]
    is_over = speech.first + 2 * np.arange(len(mel)) > speech.last
    mel[is_over] = np.log(FLOOR)
    voicing[is_over] = 0
    mel = np.maximum(mel, np.log(FLOOR)).astype(np.float32).reshape(-1, HOPS, BANDS)
    by_frame = pitch_hz.reshape(-1, HOPS), voicing.astype(np.float32).reshape(-1, HOPS)
    return Features(mel, vocoder.cycles(*by_frame), by_frame[1], speaker)


def measure_colours(spoken: Sequence[Sequence[Speech]], log_mel: Sequence[Sequence[np.ndarray]]) -> Colours:
    """Return the colour of each speaker: the mean difference between waves and filter, by band.

    spoken: utterances by speaker. log_mel: those of their waves, [J, BANDS] each."""
    voiced: list[np.ndarray] = []
    unvoiced: list[np.ndarray] = []
    for utterances, waves in zip(spoken, log_mel, strict=True):
        found = [uncoloured(speech) for speech in utterances]
        apart = np.concatenate([wave - mel for (mel, _, _), wave in zip(found, waves, strict=True)])
        is_loud = np.concatenate(list(waves)) > LOUD
        voicing = np.concatenate([voicing for _, _, voicing in found])[:, None]
        for means, chosen in ((voiced, voicing > 0.9), (unvoiced, voicing < 0.1)):
            weight = (chosen & is_loud).astype(float)
            overall = (apart * weight).sum() / weight.sum()  # for bands that were never loud
            means.append(((apart * weight).sum(0) + FEW * overall) / (weight.sum(0) + FEW))
    return Colours(np.array(voiced), np.array(unvoiced))


def wave_mel(speech: Speech) -> np.ndarray:
    """Return the log mel spectrogram [J, BANDS] of an utterance's samples."""
    assert speech.samples is not None, "the speech was made without samples"
    samples = soxr.resample(speech.samples.astype(np.float32) / 32768, FLITE_HZ, RATE_HZ, quality="HQ")
    padded = np.zeros(speech.utterance.num_frames * FRAME, np.float32)
    num = min(len(padded), len(samples))
    padded[:num] = samples[:num]
    return log_mel(padded)
