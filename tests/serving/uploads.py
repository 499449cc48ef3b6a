"""Helpers that make recordings and upload them to a server."""

import io

import numpy as np
import soundfile

from serving import protocol
from zoo.request import recording_name

RATE_HZ = 16000
NOISE = np.random.default_rng(1).uniform(-0.5, 0.5, 2 * RATE_HZ).astype(np.float32)


def recording(samples=NOISE, rate_hz=RATE_HZ, kind="WAV", subtype="FLOAT"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


def upload(server, name="anna", sample=None, **fields):
    return server.http.post(
        "/v1/audio/voices",
        data={"name": name, **fields},
        files={"audio_sample": ("x.wav", sample or recording())},
    )


def stored(directory, samples=NOISE):
    """Return what the engine is sent of an uploaded voice."""
    name = recording_name(samples, RATE_HZ)
    return protocol.StoredClip(name, len(samples), RATE_HZ, str(directory))
