"""The HTTP process: Litestar routes in front of the engine. It imports neither torch nor a model, so it
starts at once and stays responsive.

    python -m serving.http.app '{"settings": {...}, "socket": PATH, "fd": LISTENING_SOCKET, ...}'

The supervisor starts it with this command and passes `HTTPArguments` as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import structlog
from litestar import Litestar, Router
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ControllerRouterHandler

from serving import heartbeat, logs
from serving.aligner.client import Aligner
from serving.api_keys import all_keys
from serving.engine_client import EngineClient
from serving.exit_with_parent import exit_with_parent
from serving.http import openapi
from serving.http.bodies import LargeBodies, check_encoding
from serving.http.errors import answer_error, log_lost_session
from serving.http.listener import Listener
from serving.http.names import Names
from serving.http.options import options_of
from serving.http.routes import api_page
from serving.http.routes import playground as page
from serving.http.routes import works as work_routes
from serving.http.routes.batch import speak_batch
from serving.http.routes.chat import complete
from serving.http.routes.elevenlabs import (
    list_voices_in_their_form,
    speak_stream,
    speak_stream_with_times,
    speak_whole,
    speak_whole_with_times,
)
from serving.http.routes.elevenlabs_input import speak_inputs
from serving.http.routes.models import list_choices, list_models, one_model
from serving.http.routes.pronunciations import list_pronunciations, replace_pronunciations
from serving.http.routes.realtime import converse
from serving.http.routes.session import speak_in_session
from serving.http.routes.signed_urls import sign_link, speak_link
from serving.http.routes.speech import speak
from serving.http.routes.ssml import translate
from serving.http.routes.status import health, metrics, ready
from serving.http.routes.transcriptions import transcribe
from serving.http.routes.voices import (
    add_voice,
    list_voices,
    preview_voice,
    remove_voice,
    rename_voice,
)
from serving.http.routes.vox_serve import add_text, end_stream, generate, hear_stream, start_stream
from serving.http.server import Server, check_key
from serving.http.signed_urls import Links
from serving.http.text_streams import TextStreams
from serving.http.works.works import Works
from serving.settings import URL_SECRET, HTTPArguments, Limits, Security, Settings, WorksSettings
from zoo.text.pronunciations import read_file

if TYPE_CHECKING:  # needs the extra `otel`
    from serving.http.tracing import Tracing

log = structlog.get_logger()

# Response headers that pages of other sites may read.
EXPOSED = ["x-request-id", "x-sample-rate", "x-seed", "x-warning", "retry-after"]
M_MMAP_THRESHOLD, LARGE_BYTES = (
    -3,
    1 << 20,
)  # malloc.h; larger blocks go back to the system when they are freed
MAX_BODY_BYTES = 1 << 20  # for requests that are neither speech nor an upload
DEFAULT = Settings()


def create_app(
    engine: EngineClient,
    settings: Settings = DEFAULT,
    *,
    api_key: str | None = None,
    url_secret: str | None = None,
    tracing: Tracing | None = None,
    heartbeat_fd: int | None = None,
) -> Litestar:
    """Return the app with all its routes.

    api_key: required for routes under /v1, and for /metrics with private_metrics; the settings may name a file
    with more. url_secret: signs URLs; by default they work until this process ends. tracing: makes and exports
    the traces. heartbeat_fd: a pipe to the supervisor.
    """
    limits = settings.limits
    security = settings.security
    origins = list(security.cors_origins)
    names = msgspec.convert(settings.aliases, Names, from_attributes=True)
    words = [] if settings.pronunciations is None else read_file(settings.pronunciations)
    keys = all_keys(api_key, security.api_keys)
    aligner = None
    if settings.aligner.directory is not None:
        aligner = Aligner(settings.aligner.directory, settings.aligner.device)
    server = Server(
        engine,
        keys,
        limits,
        settings.voices_dir,
        names,
        tracing,
        words,
        aligner,
        settings.sentence_gap_s,
        has_private_metrics=security.private_metrics,
    )
    streams = TextStreams(server)
    works = Works(server, settings.works)
    links = Links(url_secret or secrets.token_hex())
    return Litestar(
        [
            Router(
                "/",
                route_handlers=guarded_routes(limits, security, settings.works),
                guards=[check_key, check_encoding],
                security=openapi.SECURITY,
            ),
            speak_in_session,
            speak_inputs,
            converse,
            *([speak_link] if security.speech_urls else []),
            health,
            ready,
            *([] if security.private_metrics else [metrics]),
            *([page.start, page.part] if settings.playground else [page.start_without_page]),
            *([api_page.start, api_page.part] if settings.playground else []),
        ],
        dependencies={
            "server": Provide(lambda: server, sync_to_thread=False),
            "streams": Provide(lambda: streams, sync_to_thread=False),
            "works": Provide(lambda: works, sync_to_thread=False),
        },
        lifespan=[connect],
        exception_handlers={Exception: answer_error},
        after_exception=[log_lost_session],
        request_max_body_size=MAX_BODY_BYTES,
        state=State(
            {
                "server": server,
                "streams": streams,
                "works": works,
                "heartbeat_fd": heartbeat_fd,
                "links": links,
            }
        ),
        openapi_config=openapi.config(),
        cors_config=CORSConfig(origins, expose_headers=EXPOSED) if origins else None,
        logging_config=None,
    )


def guarded_routes(limits: Limits, security: Security, works: WorksSettings) -> list[ControllerRouterHandler]:
    """Return the routes that require an API key, if the server has one."""
    speech = Router(
        "/",
        route_handlers=[
            *([options_of(speak, speak_link)] if security.speech_urls else []),
            speak,
            speak_batch,
            complete,
            speak_whole,
            speak_stream,
            speak_whole_with_times,
            speak_stream_with_times,
            generate,
            start_stream,
        ],
        request_max_body_size=limits.speech_body_bytes,
        middleware=[LargeBodies],
    )
    uploads = Router(
        "/",
        route_handlers=[
            options_of(list_voices, add_voice),
            add_voice,
            options_of(list_pronunciations, replace_pronunciations),
            list_pronunciations,
            replace_pronunciations,
            transcribe,
        ],
        request_max_body_size=limits.upload_body_bytes,
        middleware=[LargeBodies],
    )
    documents = Router(
        "/",
        route_handlers=work_routes.ROUTES,
        request_max_body_size=limits.speech_body_bytes + works.document_bytes,
        middleware=[LargeBodies],
    )
    return [
        speech,
        uploads,
        documents,
        list_models,
        list_choices,
        one_model,
        list_voices,
        list_voices_in_their_form,
        preview_voice,
        options_of(rename_voice, remove_voice),
        rename_voice,
        remove_voice,
        add_text,
        hear_stream,
        end_stream,
        translate,
        *([metrics] if security.private_metrics else []),
        *([sign_link] if security.speech_urls else []),
    ]


@asynccontextmanager
async def connect(app: Litestar) -> AsyncIterator[None]:
    """Keep the connection to the engine open, and the heart beating, while the app runs."""
    server: Server = app.state.server
    await asyncio.to_thread(server.voices.tidy)
    if (problem := await asyncio.to_thread(server.voices.problem)) is not None:
        log.warning("voices", problem=problem)
    running = [
        asyncio.create_task(work)
        for work in (app.state.works.run(), server.engine.run(), server.start_decoders(), import_codecs())
    ]
    if app.state.heartbeat_fd is not None:
        running.append(asyncio.create_task(heartbeat.beat(app.state.heartbeat_fd)))
    yield
    for task in running:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await app.state.streams.close()
    await server.references.close()
    if server.aligner is not None:
        await server.aligner.close()
    if server.tracing is not None:
        await asyncio.to_thread(server.tracing.close)


async def import_codecs() -> None:
    """Import FFmpeg once the server listens, so that the first coded answer finds it. Raw samples need none."""
    with suppress(ImportError):  # such an answer then fails, and the log says why
        await asyncio.to_thread(importlib.import_module, "av")


def give_back_freed_memory() -> None:
    """Let glibc map each recording and file on its own. By default it raises its threshold with the first
    ones that are freed, keeps the next in its heap, and gives little of that back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other systems have none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def main() -> None:
    give_back_freed_memory()
    arguments = msgspec.json.decode(sys.argv[1], type=HTTPArguments)
    settings = arguments.settings
    logs.configure("http")
    if arguments.parent_fd is not None:
        exit_with_parent(arguments.parent_fd, arguments.socket)
    api_key = os.environ.get("ZOO_API_KEY") or None
    engine = EngineClient(arguments.socket)
    tracing = None
    if settings.otel:
        from serving.http.tracing import Tracing, exporter

        tracing = Tracing(exporter())
    heartbeat_fd = arguments.heartbeat_fd
    app = create_app(
        engine,
        settings,
        api_key=api_key,
        url_secret=os.environ.get(URL_SECRET),
        tracing=tracing,
        heartbeat_fd=heartbeat_fd,
    )
    Listener(
        tracing.around(app) if tracing else app,
        app.state.server,
        settings.grace_s,
        settings.security.cors_origins,
        settings.security.allowed_hosts,
        settings.limits.stall_s,
    ).run(sockets=[socket.socket(fileno=arguments.fd)])


if __name__ == "__main__":
    main()
