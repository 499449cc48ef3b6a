"""The HTTP process: Litestar routes in front of the engine. It imports neither torch nor zoo: it starts at
once and stays responsive.

    python -m serving.http.app '{"socket": PATH, "fd": LISTENING_SOCKET, ...}'

The supervisor starts it so, with `Options` as JSON.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
from litestar import Litestar, Router
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ControllerRouterHandler

from serving import logs
from serving.engine_client import EngineClient
from serving.exit_with_parent import exit_with_parent
from serving.http import openapi
from serving.http.door import LargeBodies
from serving.http.errors import answer_error
from serving.http.listener import Listener
from serving.http.names import Names
from serving.http.routes import playground as page
from serving.http.routes.batch import speak_batch
from serving.http.routes.models import list_choices, list_models, one_model
from serving.http.routes.session import speak_in_session
from serving.http.routes.speech import speak
from serving.http.routes.status import health, metrics, ready
from serving.http.routes.voices import (
    add_voice,
    list_voices,
    preview_voice,
    remove_voice,
    rename_voice,
    voices_options,
)
from serving.http.schemas import Limits
from serving.http.server import Server, check_key

if TYPE_CHECKING:  # it comes with an extra
    from serving.http.tracing import Tracing

log = structlog.get_logger()

EXPOSED = ["x-request-id", "x-sample-rate", "x-seed", "x-warning", "retry-after"]  # to pages of other sites
MAX_BODY_BYTES = 1 << 20  # of what is neither speech nor an upload
DEFAULT = Limits()
NO_ALIASES = Names()


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """What the HTTP process is started with. The API key comes by the environment (ZOO_API_KEY): arguments
    are for everyone to see."""

    socket: str  # where the engine listens
    # a bound socket, which outlives this process: clients wait in it while the process is started again
    fd: int
    limits: Limits = DEFAULT
    names: Names = NO_ALIASES
    voices_dir: str | None = None
    cors_origins: list[str] = []  # of pages that may use this server
    hosts: list[str] = []  # by which it may be asked; none: any
    stall_s: float = 60.0  # for which a client that reads may take nothing
    playground: bool = True  # whether there is a page to try the models at
    private_metrics: bool = False  # whether the API key guards /metrics too
    otel: bool = False  # whether a trace of each request is sent on
    grace_s: int = 5  # how long a shutdown waits for open streams
    parent_fd: int | None = None


def create_app(
    engine: EngineClient,
    *,
    api_key: str | None = None,
    limits: Limits = DEFAULT,
    voices_dir: str | Path | None = None,
    cors_origins: Sequence[str] = (),
    playground: bool = True,
    names: Names = NO_ALIASES,
    private_metrics: bool = False,
    tracing: Tracing | None = None,
) -> Litestar:
    """Every route. `api_key` guards what is under /v1, and with private_metrics /metrics; voices_dir: where
    uploaded voices are kept; tracing: where traces go."""
    server = Server(engine, api_key, limits, voices_dir, names, tracing)
    speech = Router(
        "/",
        route_handlers=[speak, speak_batch],
        request_max_body_size=limits.speech_body_bytes,
        middleware=[LargeBodies],
    )
    uploads = Router(
        "/",
        route_handlers=[voices_options, add_voice],
        request_max_body_size=limits.upload_body_bytes,
        middleware=[LargeBodies],
    )
    guarded: list[ControllerRouterHandler] = [
        speech,
        uploads,
        list_models,
        list_choices,
        one_model,
        list_voices,
        preview_voice,
        rename_voice,
        remove_voice,
        *([metrics] if private_metrics else []),
    ]
    return Litestar(
        [
            Router("/", route_handlers=guarded, guards=[check_key], security=openapi.SECURITY),
            speak_in_session,
            health,
            ready,
            *([] if private_metrics else [metrics]),
            *([page.start, page.part] if playground else [page.start_without_page]),
        ],
        dependencies={"server": Provide(lambda: server, sync_to_thread=False)},
        lifespan=[connect],
        exception_handlers={Exception: answer_error},
        request_max_body_size=MAX_BODY_BYTES,
        state=State({"server": server}),
        openapi_config=openapi.CONFIG,
        cors_config=CORSConfig(list(cors_origins), expose_headers=EXPOSED) if cors_origins else None,
        logging_config=None,
    )


@asynccontextmanager
async def connect(app: Litestar) -> AsyncIterator[None]:
    """To the engine, for as long as the app runs."""
    server: Server = app.state.server
    await asyncio.to_thread(server.voices.tidy)
    if (problem := await asyncio.to_thread(server.voices.problem)) is not None:
        log.warning("voices", problem=problem)
    connection = asyncio.create_task(server.engine.run())
    yield
    connection.cancel()
    with suppress(asyncio.CancelledError):
        await connection
    await server.references.close()
    if server.tracing is not None:
        await asyncio.to_thread(server.tracing.close)


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    logs.configure("http")
    if options.parent_fd is not None:
        exit_with_parent(options.parent_fd)
    api_key = os.environ.get("ZOO_API_KEY") or None
    engine = EngineClient(options.socket)
    tracing = None
    if options.otel:
        from serving.http.tracing import Tracing, exporter

        tracing = Tracing(exporter())
    app = create_app(
        engine,
        api_key=api_key,
        limits=options.limits,
        voices_dir=options.voices_dir,
        cors_origins=options.cors_origins,
        playground=options.playground,
        names=options.names,
        private_metrics=options.private_metrics,
        tracing=tracing,
    )
    Listener(
        tracing.around(app) if tracing else app,
        engine,
        options.grace_s,
        options.cors_origins,
        options.hosts,
        options.stall_s,
    ).run(sockets=[socket.socket(fileno=options.fd)])


if __name__ == "__main__":
    main()
