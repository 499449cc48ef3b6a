"""Helpers that make recordings and upload them to a server."""

import base64
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


def spoken(seconds=1.0, rate_hz=RATE_HZ):
    """Return a message of a conversation with a clip: a tone."""
    at = np.arange(int(seconds * rate_hz)) / rate_hz
    file = recording(np.sin(2 * np.pi * 200 * at) / 3, rate_hz, subtype="PCM_16")
    clip = {"data": base64.b64encode(file).decode(), "format": "wav"}
    return {"role": "user", "content": [{"type": "input_audio", "input_audio": clip}]}


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
