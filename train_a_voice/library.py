"""Flite as a library in this process: the speech of the program (`flite.py`) in two thirds of the time.

It needs only the shared objects in a directory.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from train_a_voice.flite import RATE_HZ, VOICE, Utterance, trim

SYSTEM = Path("/usr/lib/x86_64-linux-gnu")
# In the order of their dependencies. Flite links to ALSA, which is never called here.
OBJECTS = (
    "libasound.so.2",
    "libflite.so.1",
    "libflite_usenglish.so.1",
    "libflite_cmulex.so.1",
    f"libflite_cmu_us_{VOICE}.so.1",
)
POINTER, TEXT = ctypes.c_void_p, ctypes.c_char_p


class Wave(ctypes.Structure):
    """cst_wave of flite/include/cst_wave.h"""

    _fields_ = [
        ("type", TEXT),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    ]


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "flite_synth_text": (POINTER, [TEXT, POINTER]),
    "utt_wave": (ctypes.POINTER(Wave), [POINTER]),
    "utt_relation": (POINTER, [POINTER, TEXT]),
    "relation_head": (POINTER, [POINTER]),
    "item_next": (POINTER, [POINTER]),
    "item_feat_string": (TEXT, [POINTER, TEXT]),
    "item_feat_float": (ctypes.c_float, [POINTER, TEXT]),
    "delete_utterance": (None, [POINTER]),
}


class Flite:
    """One speaker. Do not call it from two threads."""

    def __init__(self, directory: Path = SYSTEM):
        """Load the library. Raises ValueError if the shared objects are missing."""
        try:
            loaded = [ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL) for name in OBJECTS]
        except OSError as error:
            raise ValueError(f"flite's libraries are not in {directory}: {error}") from None
        self._flite: Any = loaded[1]
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self._flite, name)
            function.restype, function.argtypes = result, arguments
        register = getattr(loaded[-1], f"register_cmu_us_{VOICE}")
        register.restype, register.argtypes = POINTER, [TEXT]
        self._flite.flite_init()
        self._voice = register(None)

    def speak(self, text: str) -> tuple[np.ndarray, Utterance]:
        """Return samples and their description, as `flite.speak` does."""
        flite = self._flite
        spoken = flite.flite_synth_text(text.encode(), self._voice)
        try:
            wave = flite.utt_wave(spoken).contents
            assert wave.sample_rate == RATE_HZ, (
                f"flite's speech has {wave.sample_rate} Hz instead of {RATE_HZ}"
            )
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).copy()
            phones, ends_s = [], []
            item = flite.relation_head(flite.utt_relation(spoken, b"Segment"))
            while item:
                phones.append(flite.item_feat_string(item, b"name").decode())
                ends_s.append(round(flite.item_feat_float(item, b"end"), 3))  # as the program prints them
                item = flite.item_next(item)
        finally:
            flite.delete_utterance(spoken)
        return trim(text, samples, phones, np.array(ends_s))
