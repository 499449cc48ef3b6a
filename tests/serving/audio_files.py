"""A strict decoder for the audio files of answers."""

import io

import av
import numpy as np


def decoded(name, data, rate_hz):
    """Decode a file, and fail on any error in its data or another rate. Return samples [N] float, mono."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32767
    raw = {"ulaw": "mulaw", "mulaw": "mulaw", "alaw": "alaw"}.get(name)
    if raw is not None:  # FFmpeg reads it at 44.1 kHz unless it is told
        with av.open(io.BytesIO(data), format=raw, options={"sample_rate": str(rate_hz)}) as file:
            return np.concatenate([frame.to_ndarray().reshape(-1) for frame in file.decode()]) / 32768
    with av.open(io.BytesIO(data), options={"err_detect": "crccheck+bitstream+buffer+explode"}) as file:
        [stream] = file.streams
        assert stream.codec_context.channels == 1
        frames = list(file.decode(stream))
        assert {frame.sample_rate for frame in frames} == {rate_hz}
        samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return samples / 32768 if samples.dtype == np.int16 else samples
