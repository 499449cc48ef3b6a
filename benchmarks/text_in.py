"""Measure how soon a server speaks words that arrive one by one, as a language model writes them.

    python benchmarks/text_in.py                                   serves the small voice
    python benchmarks/text_in.py --url http://127.0.0.1:8000       uses a running server (its first model and voice)

A word arrives every 10 or 50 ms over WS /v1/audio/speech/stream, and all at once for comparison. Times count
from the first word.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

from served import served
from websockets.sync.client import ClientConnection, connect

TEXT = (
    "The old man told the children a story about the sea. We had bread and cheese for breakfast this morning. "
    "She opened the window because the room was too hot."
)
PAUSES_MS = (0, 10, 50)


def speak(socket: ClientConnection, pause_s: float) -> dict[str, Any]:
    """Return the milliseconds from the first word to the last word, the first audio and the last audio."""
    began_s = time.perf_counter()
    words = TEXT.split(" ")
    for i, word in enumerate(words):
        late_s = began_s + i * pause_s - time.perf_counter()
        time.sleep(max(late_s, 0))
        socket.send(json.dumps({"type": "input.text", "text": word + " "}))
    socket.send(json.dumps({"type": "input.done"}))
    last_word_s = time.perf_counter() - began_s
    last_s = None
    while True:
        message = socket.recv(timeout=120)
        if isinstance(message, bytes):
            last_s = time.perf_counter() - began_s
            continue
        event = json.loads(message)
        if event["type"] == "error":
            raise SystemExit(event["error"]["message"])
        if event["type"] == "audio.done":
            break
    assert last_s is not None, "the utterance has no audio"
    return {
        "last_word_ms": round(1000 * last_word_s),
        # by the server's clock, because the client is still writing
        "first_audio_ms": round(event["timings"]["first_audio_ms"]),
        "last_audio_ms": round(1000 * last_s),
        "audio_s": event["audio_s"],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("models", nargs="*", help="models to serve (default: the small voice)")
    options.add_argument("--url", help="address of a running server")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--config", default="{}", help="fields of session.config as JSON")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = options.parse_args()
    config = {"seed": 1, **json.loads(given.config)}
    runs = []
    with served(given.models, given.url) as url:
        address = url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
        with connect(address, max_queue=None) as socket:
            socket.send(json.dumps({"type": "session.config", **config}))
            configured = json.loads(socket.recv(timeout=10))
            if configured["type"] == "error":
                raise SystemExit(configured["error"]["message"])
            speak(socket, 0)  # warm-up
            for pause_ms in PAUSES_MS:
                rounds = [speak(socket, pause_ms / 1000) for _ in range(given.rounds)]
                run = {name: median(one[name] for one in rounds) for name in rounds[0]}
                runs.append({"word_every_ms": pause_ms, **run})
    result = {
        "model": configured["model"],
        "split_granularity": configured["split_granularity"],
        "runs": runs,
    }
    if given.json:
        return print(json.dumps(result))
    print(
        f"{result['model']}, {result['split_granularity']} by {result['split_granularity']}, {len(TEXT.split())} words"
    )
    for run in runs:
        print(
            f"a word every {run['word_every_ms']:>3} ms: last word {run['last_word_ms']:>5} ms, first audio {run['first_audio_ms']:>5} ms, "
            f"last audio {run['last_audio_ms']:>6} ms of {run['audio_s']:.1f} s"
        )


if __name__ == "__main__":
    main()
