"""The HTTP process on a real port, with a fake engine (fake_engine.py)."""

import asyncio
import socket
import threading
import time

import httpx
from fake_engine import MODEL, FakeEngine

from serving.engine_client import EngineClient
from serving.http.app import create_app
from serving.http.listener import Listener
from serving.settings import Aliases, Security, Settings


class Server:
    """uvicorn, the app and a fake engine, all on one event loop in their own thread."""

    def __init__(
        self, directory, models=(MODEL,), api_key=None, tracing=None, stall_s=None, hosts=("*",), **options
    ):
        """options: fields of Settings and of Security, and `names` for the aliases."""
        self.models = models
        self.voices_dir = options.setdefault("voices_dir", directory / "voices")
        self.path = str(directory / "engine.sock")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        client = EngineClient(self.path)
        settings = settings_of(**options)
        self.app = create_app(client, settings, api_key=api_key, tracing=tracing)
        app = tracing.around(self.app) if tracing else self.app
        origins = settings.security.cors_origins
        self.uvicorn = Listener(app, self.app.state.server, 1, origins, hosts, stall_s)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(
            target=self.loop.run_until_complete, args=[self.uvicorn.serve(sockets=[self.listener])]
        )
        self.http = httpx.Client(base_url=self.url, timeout=10)

    def __enter__(self):
        self.thread.start()
        self.start_engine()
        return self

    def __exit__(self, *_):
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive(), "uvicorn did not stop"

    def start_engine(self):
        self.engine = FakeEngine(self.models)
        asyncio.run_coroutine_threadsafe(self.engine.listen(self.path), self.loop).result(5)
        until(lambda: self.http.get("/ready").status_code == 200)

    def call(self, function, *args):
        self.loop.call_soon_threadsafe(function, *args)

    def speak(self, text, **fields):
        return self.http.post("/v1/audio/speech", json=self.body(text, **fields))

    def stream(self, text, **fields):
        return self.http.stream("POST", "/v1/audio/speech", json=self.body(text, **fields))

    def body(self, text, **fields):
        """Return the body of a speech request. The defaults are WAV and, with several models, the first
        one."""
        chosen = {"model": self.models[0].id} if len(self.models) > 1 else {}
        return {"input": text, "response_format": "wav", **chosen, **fields}


def settings_of(names=None, cors_origins=(), private_metrics=False, **fields):
    more = {name: fields.pop(name) for name in ("api_keys", "speech_urls") if name in fields}
    return Settings(
        aliases=names or Aliases(),
        security=Security(private_metrics, tuple(cors_origins), **more),
        **{**fields, "voices_dir": str(fields["voices_dir"])},
    )


def until(fact, seconds=30.0):
    """Wait for a fact. The time is for a machine that does much else; a test passes as soon as the fact is true."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, f"still false after {seconds} s"
        time.sleep(0.01)


def error(answer, status):
    """Check the status and shape of an error answer, and return its error object."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return body["error"]
