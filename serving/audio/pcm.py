"""Convert samples to 16-bit PCM, and build the 44-byte header of a WAV file."""

from __future__ import annotations

import struct

import numpy as np

UNKNOWN_BYTES = 0xFFFFFFFF  # stands for an unknown length: players then read to the end of the stream
HEADER_BYTES = 44


def pcm16(samples: np.ndarray) -> bytes:
    """Return [N] float32 samples as 2N bytes of int16, little-endian. Values outside -1 .. 1 are clipped."""
    return np.round(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def wav_header(sample_rate_hz: int, num_bytes: int | None = None) -> bytes:
    """Return the RIFF header of mono 16-bit PCM. num_bytes: of the samples; None: a stream of unknown length.

    Source: Microsoft and IBM, Multimedia Programming Interface and Data Specifications 1.0, "WAVE".
    """
    data = UNKNOWN_BYTES if num_bytes is None else num_bytes
    riff = UNKNOWN_BYTES if num_bytes is None else num_bytes + HEADER_BYTES - 8
    head = struct.pack("<4sI4s", b"RIFF", riff, b"WAVE")
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate_hz, 2 * sample_rate_hz, 2, 16)
    return head + form + struct.pack("<4sI", b"data", data)
