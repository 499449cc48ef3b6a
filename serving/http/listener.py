"""uvicorn with limits: clients that send or read too slowly, or send too much, are disconnected, and no
client can take an interrupted answer for a complete one."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import struct
from collections.abc import Collection, Mapping
from typing import Any, cast

import httptools
import msgspec
import structlog
import uvicorn
from litestar.enums import HttpMethod
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Response
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

from serving.http.accepting import Acceptor
from serving.http.errors import SOCKETS, cut, new_id
from serving.http.events import MAX_MESSAGE_BYTES
from serving.http.metrics import Metrics
from serving.http.objects import Error, ErrorBody
from serving.http.server import Server

MAX_HEAD_BYTES = 64 << 10  # of a request without its body
HEAD_S = 10.0  # for the first line and the headers
BODY_S = 60.0
PING_S = 20.0
WRITE_S = 60.0  # default for stall_s: how long a client may read nothing
LAST_WORDS_S = 2  # from the end of the grace period to the end of the process
STOPPING = "this server is stopping"
UNREADABLE = (
    "the request is not valid HTTP/1.1: its first line, a header, or the length or a chunk of its body is wrong; "
    "in a URL, characters outside ASCII must be percent-encoded"
)
NO_HANDSHAKE = "a WebSocket opens with a GET request that has no body and at most 128 headers of 8 KiB each"
# uvicorn's messages: a stream was cut off; a WebSocket was refused with an answer of its own
CUT_OFF = "ASGI callable returned without completing response."
REFUSED = "ASGI callable returned without completing handshake."
ANY = "*"  # allows every host or origin
SOCKET = re.compile("|".join(re.sub(r"\{\w+\}", "[^/]+", path) for path in SOCKETS))

log = structlog.get_logger()


class Listener(uvicorn.Server):
    """The server. A shutdown lets open answers finish within `grace_s`. Answers that are still open then fail
    as if the engine had stopped."""

    def __init__(
        self,
        app: ASGIApp,
        server: Server,
        grace_s: int,
        origins: Collection[str] = (),
        hosts: Collection[str] = (ANY,),
        stall_s: float | None = None,
    ):
        """app: the server's app, or what wraps it. The others are as in `Guard` and `Connection`."""
        self.engine = server.engine
        self.metrics = server.metrics
        self.grace_s = grace_s
        config = uvicorn.Config(
            Guard(app, server.metrics, origins, hosts),
            log_config=None,
            access_log=False,
            lifespan="on",
            http=type("Connection", (Connection,), {"stall_s": stall_s}),
            ws=type("Socket", (Socket,), {"stall_s": stall_s}),
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,  # a small message could unpack to a large one
            ws_ping_interval=PING_S,
            # A slow reader gets to the ping only after all that it has not read yet.
            ws_ping_timeout=stall_s or WRITE_S,
            timeout_graceful_shutdown=grace_s + LAST_WORDS_S,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(is_unexpected)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, with an `Acceptor` for each socket instead of uvloop's server."""
        await super().startup([])
        acceptors = [Acceptor(socket, self._connection, self.metrics) for socket in sockets or []]
        self.servers.extend(cast(list[asyncio.Server], acceptors))

    def _connection(self) -> asyncio.Protocol:
        config = cast(Any, self.config)
        return cast(
            asyncio.Protocol,
            config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            ),
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self.grace_s, self.engine.close, STOPPING)
        loop.call_later(self.grace_s + LAST_WORDS_S / 2, self._close_sessions)
        await super().shutdown(sockets)

    def _close_sessions(self) -> None:
        """Close sessions whose last utterance has been told to fail but still waits for text."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Socket):
                connection.end()


class HeadTooLarge(Exception):
    """Stops the parser before the request begins."""


class Connection(HttpToolsProtocol):
    """An HTTP connection with limits that uvicorn lacks: on the size of a request without its body, and on
    the times to send a request and to read the answer.

    stall_s: how long a client may read nothing; None: WRITE_S.
    """

    stall_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.num_bytes = self.num_body_bytes = 0  # of the request being read
        self.is_reading_body = self.is_read_again = False
        self.sending: asyncio.TimerHandle | None = None
        self.reading: asyncio.TimerHandle | None = None
        self.answered: RequestResponseCycle | None = None  # the request whose answer has begun last
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn tells only the request that arrived last. The client may have sent it during the answer to
        # another one.
        if self.answered is not None:
            self.answered.disconnected = not self.answered.response_complete
            self.answered.message_event.set()
        for timer in (self.reading, self.sending):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self.reading is None:  # the next request on this connection
            self._expect(HEAD_S)
        self.num_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.is_read_again:
                self._read_again(data[upgrade.args[0] :])
            else:  # CONNECT: what follows belongs to a tunnel, which the answer refuses
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse_unreadable()
        if self.num_bytes - self.num_body_bytes > MAX_HEAD_BYTES + self.num_body_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.num_bytes = self.num_body_bytes = 0

    def on_headers_complete(self) -> None:
        """Raise HeadTooLarge for a head that came too large in one read, which `num_bytes` does not count."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
            raise HeadTooLarge
        is_connect = self.parser.get_method() == b"CONNECT"
        self.is_read_again = self.parser.should_upgrade() and not self._should_upgrade() and not is_connect
        if self.is_read_again:
            return
        super().on_headers_complete()
        self.is_reading_body = True
        self._expect(BODY_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answered = cycle
        super()._start_asgi_task(cycle, cast(Any, WithoutChunks(app, cycle)) if is_old(cycle) else app)

    def _read_again(self, rest: bytes) -> None:
        """Read a request that asks for another protocol as well, such as HTTP/2 (Java's client does), without that
        wish. The parser would skip its body. rest: what follows the head."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _refuse_unreadable(self) -> None:
        """Refuse what the parser could not read. An earlier request gets its answer first."""
        if self.is_answering and not self.is_reading_body:
            self.cycle.keep_alive = False
        else:
            self._refuse(400, UNREADABLE, "invalid_http")

    def on_body(self, body: bytes) -> None:
        self.num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.is_read_again:
            return
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
        """Set the deadline for the rest of the head or body that is being read; None removes it."""
        if self.reading is not None:
            self.reading.cancel()
        self.reading = None if within_s is None else self.loop.call_later(within_s, self._is_late, within_s)

    def _is_late(self, within_s: float) -> None:
        self.reading = None
        if self.pipeline:  # its answer waits for another one, and uvicorn reads nothing meanwhile
            self._expect(within_s)
        elif self.is_reading_body:
            self._refuse(408, f"the body did not arrive within {within_s:g} s", "too_slow")
        elif not self.is_answering:  # bytes that arrive during an answer are not a request yet
            self._refuse(408, f"the request did not arrive within {within_s:g} s", "too_slow")

    def _refuse_head(self) -> None:
        self._refuse(
            431, f"the request's headers are longer than {MAX_HEAD_BYTES} bytes", "headers_too_large"
        )

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Close the connection, with an error as the answer if none has begun."""
        if self.transport.is_closing():
            return
        is_waiting = self.is_reading_body and not self.pipeline
        if not self.is_answering or (is_waiting and not self.cycle.response_started):
            body = error_body(status, message, code)
            head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived whose answer is not complete or whose body is still being read."""
        return self.cycle is not None and (self.is_reading_body or not self.cycle.response_complete)


def is_old(cycle: RequestResponseCycle) -> bool:
    """Return whether a client speaks HTTP/1.0, to which no chunks may be sent (RFC 9112, 6.1)."""
    return cycle.scope["http_version"] == "1.0"


class WithoutChunks:
    """An ASGI middleware for one request: an answer of unknown length ends with the connection. One that is cut off
    resets the connection, since it would look complete otherwise."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle):
        self.app, self.cycle = app, cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, has_length = self.cycle, True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = b"content-length" in dict(message["headers"])
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        try:
            await self.app(scope, receive, send_plain)
        finally:
            if not (has_length or cycle.response_complete or cycle.disconnected):
                reset_when_closed(cycle.transport)


def reset_when_closed(transport: asyncio.Transport) -> None:
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


class Handshake(ServerProtocol):
    """The handshake and the frames of a WebSocket. A refusal of the handshake has OpenAI's shape."""

    def reject(self, status: StatusLike, text: str) -> Response:
        message = " ".join(text.split())
        response = super().reject(status, error_body(int(status), message, "invalid_handshake").decode())
        del response.headers["content-type"]
        response.headers["content-type"] = "application/json"
        return response


class Socket(WebSocketsSansIOProtocol):
    """A WebSocket that disconnects a client whose handshake cannot be read, or that stops reading. uvicorn's own
    waits for both forever, and queues answers to pings. stall_s: as in Connection."""

    stall_s: float | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = Handshake(max_size=self.config.ws_max_size, logger=self.conn.logger)
        self.sending: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Refuse the connection if its first data, which are the whole handshake, cannot be read."""
        super().data_received(data)
        if not self.handshake_initiated:
            said = b"".join(self.conn.data_to_send())
            self.transport.write(said or self.conn.reject(400, NO_HANDSHAKE).serialize())
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Join the fragments of a message as they come: as objects, small ones take forty times their size."""
        if isinstance(self.frames[0], bytes):
            self.frames[0] = cast(bytes, bytearray(self.frames[0]))
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.sending is not None:
            self.sending.cancel()

    async def send(self, message: Any) -> None:
        """Raise ClientDisconnected also if the connection is closing before the handshake is complete.
        uvicorn would let the session run, and log an error when it ends."""
        if self.transport.is_closing() and not self.handshake_complete:
            raise ClientDisconnected
        await super().send(message)

    def shutdown(self) -> None:
        """Tell the session to stop. It ends once it has spoken the utterances that have begun."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait(cast(Any, {"type": "websocket.stopping"}))  # a message of our own
        else:
            super().shutdown()

    def end(self) -> None:
        """Close the connection immediately, as uvicorn's own `shutdown` does."""
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()  # otherwise answers to the client's pings pile up
        self.sending = self.loop.call_later(self.stall_s or WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self.sending is not None:
            self.sending.cancel()
        if not self.read_paused:
            self.transport.resume_reading()
        super().resume_writing()


class Guard:
    """An ASGI middleware for every request. It refuses pages of other sites, adds a request ID and serves
    HEAD as GET (uvicorn leaves out the body). It answers 503 in OpenAI's shape if a shutdown cancels a
    request before its answer begins."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, origins: Collection[str] = (), hosts: Collection[str] = (ANY,)
    ):
        """origins: other sites whose pages may use this server. hosts: the names that Host headers may have,
        besides localhost and IP addresses. ANY in either allows all."""
        self.app = app
        self.metrics = metrics
        self.origins = origins
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self.guard_socket(scope, receive, send)
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = given_id(scope)
        id = given or new_id()  # of an answer without one
        scope["state"]["request_id"] = given
        is_started = False

        async def begin(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                headers = dict(message["headers"])
                if given is not None or b"x-request-id" not in headers:
                    headers[b"x-request-id"] = id.encode()
                if b"allow" in headers:
                    headers[b"allow"] = whole_allow(headers[b"allow"])
                if ANY not in self.origins:
                    headers[b"cross-origin-resource-policy"] = b"same-origin"
                message["headers"] = list(headers.items())
            await send(message)

        if (wrong := self.foreign(scope, id)) is not None:
            return await answer(begin, 403, wrong, "foreign")
        if is_socket(scope["path"]):
            message = f"{cut(scope['path'])} is a WebSocket; connect with ws:// or wss://"
            return await answer(begin, 426, message, "upgrade_required")
        inner = cast(HTTPScope, dict(scope))
        if inner["method"] == "HEAD":
            inner["method"] = HttpMethod.GET
            inner["state"]["is_head"] = True
        try:
            await self.app(inner, receive, begin)
        except asyncio.CancelledError:
            if not is_started:
                await answer(begin, 503, STOPPING, "stopping")

    async def guard_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a WebSocket. Browsers let pages of any site open one and read its messages."""
        id = given_id(scope) or new_id()
        if (wrong := self.foreign(scope, id)) is not None:
            return await deny(send, 403, wrong, "foreign", id)
        if not is_socket(scope["path"]):
            message = f"{cut(scope['path'])} is no WebSocket; these are: {', '.join(SOCKETS)}"
            return await deny(send, 404, message, "not_found")
        scope["state"]["request_id"] = given_id(scope)
        await self.app(scope, receive, send)

    def foreign(self, scope: Scope, id: str) -> str | None:
        """Return why a request may have been forged through a browser, or None if it looks genuine. A forged
        one is logged with its ID and counted."""
        headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        why = self.foreign_host(headers.get(b"host", "")) or self.foreign_page(headers)
        if why is not None:
            log.info("refused", id=id, path=cut(scope["path"]), status=403, error=why, code="foreign")
            self.metrics.foreign.inc()
        return why

    def foreign_host(self, host: str) -> str | None:
        """Return why a Host header is not allowed: an attacker's name can resolve to this machine (DNS
        rebinding). An address cannot, and a browser always sends the header."""
        name = re.sub(r":\d*$", "", host).strip("[]")
        if not host or ANY in self.hosts or name in ("localhost", *self.hosts) or is_address(name):
            return None
        return f"this server does not accept the host {host[:100]!r}; --allowed-host {name[:100]} allows it"

    def foreign_page(self, headers: Mapping[bytes, str]) -> str | None:
        """Return why a page of another site may not send a request. Such a page cannot read most answers, but
        it can make the server work, play audio, and see whether an answer is an error."""
        origin = headers.get(b"origin") or None
        if ANY in self.origins or origin in self.origins:
            return None
        if origin is not None and (origin == "null" or origin.partition("://")[2] != headers.get(b"host")):
            return f"pages of {origin[:100]!r} may not use this server; --cors-origin allows them"
        is_foreign = headers.get(b"sec-fetch-site") in ("cross-site", "same-site")
        is_link = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == ("navigate", "document")
        if is_foreign and origin is None and not is_link:
            return "pages of other sites may not use this server; --cors-origin allows them, with crossorigin"
        return None


def is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's errors about a stream that was cut off and a WebSocket that was refused. The server
    does both on purpose: when a stream fails, and `Speech.fail` has logged why; and in `deny`."""
    return record.msg not in (CUT_OFF, REFUSED)


def is_socket(path: str) -> bool:
    """Return whether a path is that of a WebSocket."""
    return SOCKET.fullmatch(path.rstrip("/")) is not None


def is_address(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def given_id(scope: Scope) -> str | None:
    """Return the request ID that the client or a proxy sent, or None if there is none or it is malformed."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else None


def whole_allow(methods: bytes) -> bytes:
    """Add HEAD to an Allow header that has GET."""
    names = {name.strip() for name in methods.split(b",")}
    if b"GET" in names:
        names.add(b"HEAD")
    return b", ".join(sorted(names))


async def answer(send: Send, status: int, message: str, code: str | None, id: str | None = None) -> None:
    """Send an error without Litestar. id: of the request, if the log has it."""
    body = error_body(status, message, code)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    if id is not None:
        headers.append((b"x-request-id", id.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def deny(send: Send, status: int, message: str, code: str | None, id: str | None = None) -> None:
    """Refuse to open a WebSocket, with an error as the answer to its HTTP request. id: as in `answer`."""

    async def instead(part: Message) -> None:
        await send(cast(Message, {**part, "type": f"websocket.{part['type']}"}))

    await answer(instead, status, message, code, id)


def error_body(status: int, message: str, code: str | None) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode(ErrorBody(Error(message, kind, None, code)))
