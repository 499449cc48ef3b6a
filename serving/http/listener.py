"""uvicorn as this server runs it: clients that send or read too slowly, or too much, are left, and an end is
one that no client takes for a whole answer."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Collection, Mapping
from typing import Any, cast

import msgspec
import uvicorn
from litestar.enums import HttpMethod
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from serving.engine_client import EngineClient
from serving.http.errors import new_id
from serving.http.events import MAX_MESSAGE_BYTES
from serving.http.schemas import Error, ErrorBody

MAX_HEAD_BYTES = 64 << 10  # of a request, beside its body
HEAD_S = 10.0  # for the first line and the headers
BODY_S = 60.0
PING_S = 20.0
WRITE_S = 60.0  # for which a client that reads may take nothing, where nobody says
LAST_WORDS_S = 2  # from the end of the grace to the end of the process
STOPPING = "this server is stopping"


class Listener(uvicorn.Server):
    """A shutdown lets open answers end within `grace_s`; what is open then fails, as if the engine had
    gone."""

    def __init__(
        self,
        app: ASGIApp,
        engine: EngineClient,
        grace_s: int,
        origins: Collection[str] = (),
        hosts: Collection[str] = (),
        stall_s: float | None = None,
    ):
        self.engine, self.grace_s = engine, grace_s
        config = uvicorn.Config(
            Guard(app, origins, hosts),
            log_config=None,
            access_log=False,
            lifespan="on",
            http=type("Connection", (Connection,), {"stall_s": stall_s}),
            ws=type("Socket", (Socket,), {"stall_s": stall_s}),
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,  # a small message could unpack to a large one
            ws_ping_interval=PING_S,
            ws_ping_timeout=stall_s or WRITE_S,  # a slow reader has a ping behind all it has not read
            timeout_graceful_shutdown=grace_s + LAST_WORDS_S,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.grace_s, self.engine.close, STOPPING)
        loop.call_later(self.grace_s + LAST_WORDS_S / 2, self._close_sessions)
        await super().shutdown(sockets)

    def _close_sessions(self) -> None:
        """Those whose last utterance, told to fail, still waits for text."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Socket):
                connection.end()


class Connection(HttpToolsProtocol):
    """uvicorn's, which has neither a limit for what comes before a body nor a deadline for anything but the
    next request. stall_s: for which a client that reads may take nothing; None: WRITE_S."""

    stall_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.num_bytes = self.num_body_bytes = 0  # of the request that is being read
        self.is_reading_body = False
        self.sending: asyncio.TimerHandle | None = None
        self.reading: asyncio.TimerHandle | None = None
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self.reading, self.sending):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self.reading is None:  # the next request on this connection
            self._expect(HEAD_S)
        self.num_bytes += len(data)
        super().data_received(data)
        if self.num_bytes - self.num_body_bytes > MAX_HEAD_BYTES + self.num_body_bytes:
            self._refuse(
                431, f"what comes before the body is longer than {MAX_HEAD_BYTES} bytes", "headers_too_large"
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.num_bytes = self.num_body_bytes = 0

    def on_headers_complete(self) -> None:
        self.is_reading_body = True
        self._expect(BODY_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.is_reading_body = False
        self._expect(None)
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.sending = self.loop.call_later(self.stall_s or WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self.sending is not None:
            self.sending.cancel()
        super().resume_writing()

    def _expect(self, within_s: float | None) -> None:
        """The head, or the whole, of a request; None: it is there."""
        if self.reading is not None:
            self.reading.cancel()
        self.reading = None if within_s is None else self.loop.call_later(within_s, self._is_late, within_s)

    def _is_late(self, within_s: float) -> None:
        self.reading = None
        if self.is_reading_body:
            self._refuse(408, f"the body did not come within {within_s:g} s", "too_slow")
        elif not self.is_answering:  # what came while an answer is under way is no request yet
            self._refuse(408, f"the request did not come within {within_s:g} s", "too_slow")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Closes, and says why where no answer has begun."""
        if self.transport.is_closing():
            return
        if not self.is_answering or (self.is_reading_body and not self.cycle.response_started):
            body = error_body(status, message, code)
            head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether a request came whose answer is not over, or whose body is still to come."""
        return self.cycle is not None and (self.is_reading_body or not self.cycle.response_complete)


class Socket(WebSocketsSansIOProtocol):
    """uvicorn's, which waits for a client that does not read, and answers its pings meanwhile. stall_s: as
    Connection's."""

    stall_s: float | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sending: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.sending is not None:
            self.sending.cancel()

    def shutdown(self) -> None:
        """The session is told, which ends once what it has begun is spoken."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait(cast(Any, {"type": "websocket.stopping"}))  # a message of our own
        else:
            super().shutdown()

    def end(self) -> None:
        """At once, as uvicorn would have."""
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()  # or answers to its pings would pile up
        self.sending = self.loop.call_later(self.stall_s or WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self.sending is not None:
            self.sending.cancel()
        if not self.read_paused:
            self.transport.resume_reading()
        super().resume_writing()


class Guard:
    """Around the app, what is the same for every request: whether a page of another site sent it; an id;
    HEAD as GET without its body, which uvicorn leaves out; and an answer that a shutdown cancels before it
    began is a 503 in OpenAI's shape."""

    def __init__(self, app: ASGIApp, origins: Collection[str] = (), hosts: Collection[str] = ()):
        """origins: of pages of other sites that may ask; hosts: by which this server may be asked, none: any."""
        self.app, self.origins, self.hosts = app, origins, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self.guard_socket(scope, receive, send)
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = given_id(scope)
        scope["state"]["request_id"] = given
        is_started = False

        async def begin(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                headers = dict(message["headers"])
                if given is not None or b"x-request-id" not in headers:
                    headers[b"x-request-id"] = (given or new_id()).encode()
                if b"allow" in headers:
                    headers[b"allow"] = whole_allow(headers[b"allow"])
                message["headers"] = list(headers.items())
            await send(message)

        if (wrong := self.foreign(dict(scope["headers"]))) is not None:
            return await answer(begin, 403, wrong, "foreign")
        inner = cast(HTTPScope, dict(scope))
        if inner["method"] == "HEAD":
            inner["method"] = HttpMethod.GET
        try:
            await self.app(inner, receive, begin)
        except asyncio.CancelledError:
            if not is_started:
                await answer(begin, 503, STOPPING, "stopping")

    async def guard_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A page of another site may open one, and hear what comes."""
        if (wrong := self.foreign(dict(scope["headers"]))) is not None:
            return await deny(send, 403, wrong, "foreign")
        scope["state"]["request_id"] = given_id(scope)
        await self.app(scope, receive, send)

    def foreign(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Why a browser may have been led to ask, in a line. By a page of another site, which may not read the answer, but may ask; or by
        one whose name was made to mean this machine (DNS rebinding)."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if self.hosts and re.sub(r":\d*$", "", host).strip("[]") not in self.hosts:
            return f"this server is not asked as {host[:100]!r}; --allowed-host makes it so"
        own = origin.partition("://")[2] == host
        if origin and not own and not {origin, "*"} & set(self.origins):
            return f"pages of {origin[:100]!r} may not use this server; --cors-origin lets them"
        return None


def given_id(scope: Scope) -> str | None:
    """What the client, or a proxy, calls this request."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else None


def whole_allow(methods: bytes) -> bytes:
    """Of an Allow header: whatever has GET has HEAD."""
    names = {name.strip() for name in methods.split(b",")}
    if b"GET" in names:
        names.add(b"HEAD")
    return b", ".join(sorted(names))


async def answer(send: Send, status: int, message: str, code: str | None) -> None:
    """An error, from where there is no Litestar."""
    body = error_body(status, message, code)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def deny(send: Send, status: int, message: str, code: str | None) -> None:
    """A WebSocket that is not opened, and why, as an answer to its request."""

    async def instead(part: Message) -> None:
        await send(cast(Message, {**part, "type": f"websocket.{part['type']}"}))

    await answer(instead, status, message, code)


def error_body(status: int, message: str, code: str | None) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode(ErrorBody(Error(message, kind, None, code)))
