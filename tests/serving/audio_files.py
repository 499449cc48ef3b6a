"""Audio files as a strict listener reads them."""

import io

import av
import numpy as np


def decoded(name, data, rate_hz):
    """A strict reader: any error in the data is an error. -> samples [N] float, mono; the rate is checked."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32767
    with av.open(io.BytesIO(data), options={"err_detect": "crccheck+bitstream+buffer+explode"}) as file:
        [stream] = file.streams
        assert stream.codec_context.channels == 1
        frames = list(file.decode(stream))
        assert {frame.sample_rate for frame in frames} == {rate_hz}
        samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return samples / 32768 if samples.dtype == np.int16 else samples
