"""The microphone and the speakers of this machine, by the package sounddevice (extra `microphone`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

RATE_HZ = 24_000
MAX_S = 60.0


def problem() -> str | None:
    """Return why the sound card cannot play, or None if it can."""
    try:
        sounddevice = importlib.import_module("sounddevice")
        sounddevice.check_output_settings(samplerate=RATE_HZ, channels=1)
    except ImportError:
        return "that needs the package sounddevice: pip install -e '.[microphone]'"
    except OSError as error:  # of the package, without its library
        return f"{error} (apt install libportaudio2)"
    except ValueError as error:
        return f"there is no sound device: {error}"
    except sounddevice.PortAudioError as error:
        return f"there is no sound device: {error}"
    return None


def record(until: Callable[[], Any]) -> np.ndarray:
    """Record until the function returns -> samples [N] float32, at most MAX_S. Raises ValueError without a
    microphone."""
    sounddevice = importlib.import_module("sounddevice")
    chunks: list[np.ndarray] = []

    def take(chunk: np.ndarray, *_: object) -> None:
        if sum(map(len, chunks)) < MAX_S * RATE_HZ:
            chunks.append(chunk[:, 0].copy())

    try:
        stream = sounddevice.InputStream(samplerate=RATE_HZ, channels=1, dtype="float32", callback=take)
    except sounddevice.PortAudioError as error:
        raise ValueError(f"the microphone cannot be used: {error}") from None
    with stream:
        until()
    return np.concatenate([np.zeros(0, np.float32), *chunks])


class Player:
    """Plays samples in the order in which they come, while more are made. Another thread waits for the card."""

    def __init__(self, rate_hz: int):
        self._queue: SimpleQueue[np.ndarray | None] = SimpleQueue()
        self._problem: Exception | None = None
        self._thread = Thread(target=self._play, args=(rate_hz,), daemon=True)
        self._thread.start()

    def write(self, samples: np.ndarray) -> None:
        """Add samples [N] float32."""
        self._queue.put(samples)

    def close(self) -> None:
        """Wait until everything has been played. Raises ValueError if the card failed."""
        self._queue.put(None)
        self._thread.join()
        if self._problem is not None:
            raise ValueError(f"the answer cannot be played: {self._problem}")

    def _play(self, rate_hz: int) -> None:
        sounddevice = importlib.import_module("sounddevice")
        try:
            with sounddevice.OutputStream(samplerate=rate_hz, channels=1, dtype="float32") as stream:
                while (samples := self._queue.get()) is not None:
                    stream.write(np.ascontiguousarray(samples[:, None]))
        except sounddevice.PortAudioError as error:
            self._problem = error
