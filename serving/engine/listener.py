"""The settings of a request's listener."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Listener:
    """One frozen object from the request's message to the scheduler's row.

    speed: at which the listener plays, so a fast one needs its audio sooner. is_flexible: the audio may come
    late; it is made while no other listener waits for first audio or is at risk. is_reproducible:
    windows follow from frame numbers alone, so equal requests give equal bytes. is_metered: the client
    reports the frames that it consumed. wants_timestamps: the client is told which samples each piece of the
    text took.
    """

    speed: float = 1.0
    is_flexible: bool = False
    is_reproducible: bool = False
    is_metered: bool = False
    wants_timestamps: bool = False
