"""Flite as a library: from text to phones and to the parameters of its voices, at 16 kHz.

Flite is from CMU (http://cmuflite.org; Debian's package `flite`). Only its shared objects are needed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train_a_voice.features import HOPS

SYSTEM = Path("/usr/lib/x86_64-linux-gnu")
SPEAKERS = ("slt", "rms")  # a woman and a man of the CMU ARCTIC recordings
# In the order of their dependencies. Flite links to ALSA, which is never called here.
OBJECTS = (
    "libasound.so.2",
    "libflite.so.1",
    "libflite_usenglish.so.1",
    "libflite_cmulex.so.1",
    *(f"libflite_cmu_us_{speaker}.so.1" for speaker in SPEAKERS),
)
RATE_HZ = 16_000
TRACK_S = 0.005  # step of the parameters
CHANNELS = 102
LEAD_S, TAIL_S = 0.06, 0.12  # silence that is kept; flite adds about 0.2 s on either side
PAUSE = "pau"
_PHONES = "aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p pau r s sh t th uh uw v w y z zh"
PHONES = tuple(_PHONES.split())
POINTER, TEXT = ctypes.c_void_p, ctypes.c_char_p
LISTENER = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, ctypes.c_int, ctypes.c_int, ctypes.c_int, POINTER)
GO_ON, STOP = 0, -1  # answers of a LISTENER


@dataclass(frozen=True)
class Utterance:
    """A text with its phones. Times are seconds after the utterance's first frame."""

    text: str
    phones: tuple[str, ...]
    ends_s: tuple[float, ...]  # of the phones
    num_frames: int


@dataclass(frozen=True)
class Speech:
    utterance: Utterance
    track: np.ndarray  # [N, CHANNELS], parameters, with all of flite's silence
    first: int  # row of the track where the utterance's first frame begins
    last: int  # row where its sound ends
    samples: np.ndarray | None  # [M] int16 at RATE_HZ, without most of the silence


class Wave(ctypes.Structure):
    """cst_wave of flite/include/cst_wave.h"""

    _fields_ = [
        ("type", TEXT),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    ]


class Track(ctypes.Structure):
    """cst_track of flite/include/cst_track.h"""

    _fields_ = [
        ("type", TEXT),
        ("num_frames", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("times", ctypes.POINTER(ctypes.c_float)),
        ("frames", ctypes.POINTER(ctypes.POINTER(ctypes.c_float))),
    ]


class Streaming(ctypes.Structure):
    """The first fields of cst_audio_streaming_info of flite/include/cst_audio.h"""

    _fields_ = [("min_buffsize", ctypes.c_int), ("listener", LISTENER)]


class Voice(ctypes.Structure):
    """The first fields of cst_voice of flite/include/cst_voice.h"""

    _fields_ = [("name", TEXT), ("features", POINTER)]


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "flite_synth_text": (POINTER, [TEXT, POINTER]),
    "utt_wave": (ctypes.POINTER(Wave), [POINTER]),
    "utt_relation": (POINTER, [POINTER, TEXT]),
    "relation_head": (POINTER, [POINTER]),
    "item_next": (POINTER, [POINTER]),
    "item_feat_string": (TEXT, [POINTER, TEXT]),
    "item_feat_float": (ctypes.c_float, [POINTER, TEXT]),
    "feat_val": (POINTER, [POINTER, TEXT]),
    "feat_set": (None, [POINTER, TEXT, POINTER]),
    "val_track": (ctypes.POINTER(Track), [POINTER]),
    "new_audio_streaming_info": (ctypes.POINTER(Streaming), []),
    "audio_streaming_info_val": (POINTER, [POINTER]),
    "delete_utterance": (None, [POINTER]),
}


class Flite:
    """All speakers. Do not call it from two threads."""

    def __init__(self, directory: Path = SYSTEM):
        """Load the library. Raises ValueError if the shared objects are missing."""
        try:
            loaded = {name: ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL) for name in OBJECTS}
        except OSError as error:
            raise ValueError(f"flite's libraries are not in {directory}: {error}") from None
        self._flite: Any = loaded["libflite.so.1"]
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self._flite, name)
            function.restype, function.argtypes = result, arguments
        self._flite.flite_init()
        self._is_silent = False
        self._listener = LISTENER(lambda *_: STOP if self._is_silent else GO_ON)
        self._voices = [self._voice(loaded, speaker) for speaker in SPEAKERS]

    def _voice(self, loaded: dict[str, Any], speaker: str) -> int:
        register = getattr(loaded[f"libflite_cmu_us_{speaker}.so.1"], f"register_cmu_us_{speaker}")
        register.restype, register.argtypes = POINTER, [TEXT]
        voice: int = register(None)
        streaming = self._flite.new_audio_streaming_info()
        streaming.contents.min_buffsize, streaming.contents.listener = 0, self._listener
        features = ctypes.cast(voice, ctypes.POINTER(Voice)).contents.features
        self._flite.feat_set(features, b"streaming_info", self._flite.audio_streaming_info_val(streaming))
        return voice

    def speak(self, text: str, speaker: int, has_samples: bool = False) -> Speech:
        """Speak a text. Without samples, flite stops before its vocoder, which takes two thirds of the
        time."""
        flite = self._flite
        self._is_silent = not has_samples
        spoken = flite.flite_synth_text(text.encode(), self._voices[speaker])
        try:
            phones, ends_s = self._phones(spoken)
            features = ctypes.cast(spoken, ctypes.POINTER(POINTER))[0]
            track = read_track(flite.val_track(flite.feat_val(features, b"param_track")).contents)
            samples = read_wave(flite.utt_wave(spoken).contents) if has_samples else None
        finally:
            flite.delete_utterance(spoken)
        return trim(text, phones, ends_s, track, samples)

    def _phones(self, spoken: int) -> tuple[list[str], np.ndarray]:
        flite = self._flite
        phones, ends_s = [], []
        item = flite.relation_head(flite.utt_relation(spoken, b"Segment"))
        while item:
            phones.append(flite.item_feat_string(item, b"name").decode())
            ends_s.append(flite.item_feat_float(item, b"end"))
            item = flite.item_next(item)
        return phones, np.array(ends_s)


def read_track(track: Track) -> np.ndarray:
    assert track.num_channels == CHANNELS, f"flite's parameters have {track.num_channels} channels"
    places = ctypes.cast(track.frames, ctypes.POINTER(ctypes.c_size_t))[: track.num_frames]
    rows = b"".join(ctypes.string_at(place, 4 * CHANNELS) for place in places)
    return np.frombuffer(rows, np.float32).reshape(-1, CHANNELS).astype(np.float64)


def read_wave(wave: Wave) -> np.ndarray:
    assert wave.sample_rate == RATE_HZ, f"flite's speech has {wave.sample_rate} Hz instead of {RATE_HZ}"
    return np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()


def trim(
    text: str, phones: Sequence[str], ends_s: np.ndarray, track: np.ndarray, samples: np.ndarray | None
) -> Speech:
    """Remove most of the silence before and after speech."""
    first_s = max(0.0, ends_s[0] - LEAD_S) if phones[0] == PAUSE else 0.0
    last_s = min(ends_s[-1], ends_s[-2] + TAIL_S) if phones[-1] == PAUSE else ends_s[-1]
    first, last = round(first_s / TRACK_S), round(last_s / TRACK_S)
    if samples is not None:
        samples = samples[round(first_s * RATE_HZ) : round(last_s * RATE_HZ)]
    num_frames = math.ceil((last - first) / (2 * HOPS))
    inside = np.clip(ends_s - first_s, 0, last_s - first_s)
    ends = tuple(round(float(end_s), 4) for end_s in inside)
    return Speech(Utterance(text, tuple(phones), ends, num_frames), track, first, last, samples)


_loaded: dict[Path, Flite] = {}


def flite_of(directory: Path = SYSTEM) -> Flite:
    """Return the process's flite. A second one would share its voices, which know one listener each."""
    if directory not in _loaded:
        _loaded[directory] = Flite(directory)
    return _loaded[directory]
