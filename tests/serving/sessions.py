"""One utterance over a WebSocket."""

import json

from websockets.sync.client import connect

PATH = "/v1/audio/speech/stream"


def spoken(server, text, size=1000, headers=None, **config):
    """Say a text in parts of `size` characters. Return all events, and the audio."""
    events, audio = [], b""
    url = server.url.replace("http", "ws") + PATH
    with connect(url, compression=None, additional_headers=headers) as socket:
        socket.send(json.dumps({"type": "session.config", "model": "fake", "voice": "vivian", **config}))
        for at in range(0, len(text), size):
            socket.send(json.dumps({"type": "input.text", "text": text[at : at + size]}))
        socket.send(json.dumps({"type": "input.done"}))
        while not events or events[-1]["type"] not in ("audio.done", "error"):
            message = socket.recv(timeout=5)
            if isinstance(message, bytes):
                audio += message
            else:
                events.append(json.loads(message))
    return events, audio
