"""The HTTP process: Litestar routes over the wire to the engine. It imports neither torch nor zoo: it starts at once and stays responsive.

    python -m serving.http.app '{"socket": PATH, "fd": LISTENING_SOCKET, ...}'     (Options, below; the supervisor does this)
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvicorn
from litestar import Litestar, Request, Response, delete, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.enums import RequestEncodingType
from litestar.handlers import BaseRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.params import Body
from litestar.types import ASGIApp

from serving import logs
from serving.engine_client import Away, EngineClient
from serving.exit_with_parent import hold
from serving.http.decode import decode
from serving.http.errors import answer_error, refusal
from serving.http.metrics import Metrics
from serving.http.references import References, is_own, ways
from serving.http.schemas import (
    TASK_MODE,
    ErrorBody,
    Limits,
    Model,
    ModelList,
    Ready,
    SpeechRequest,
    VoiceDeleted,
    VoiceList,
    VoiceObject,
    VoiceUpload,
)
from serving.http.speech import Speech
from serving.http.voices import StoredVoice, Taken, TooMany, Voices, clean_name, default_directory

MAX_BODY_BYTES = 1 << 20  # of what is neither speech nor an upload
DEFAULT = Limits()


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """What the HTTP process is started with. The API key comes by the environment (ZOO_API_KEY): arguments are for everyone to see."""

    socket: str  # where the engine listens
    fd: int  # a bound socket, which outlives this process: clients wait in it while the process is started again
    limits: Limits = DEFAULT
    voices_dir: str | None = None
    grace_s: int = 5  # how long a shutdown waits for open streams
    lifeline: int | None = None


def create_app(link: EngineClient, *, api_key: str | None = None, limits: Limits = DEFAULT, voices_dir: str | Path | None = None) -> Litestar:
    """Every route. `api_key` guards what is under /v1; voices_dir: where uploaded voices are kept."""
    created = int(time.time())
    voices = Voices(voices_dir or default_directory(), limits.voices)
    references = References(voices, limits)
    metrics = Metrics(link)
    wrong = ResponseSpec(ErrorBody, description="something asked for is wrong: `param` says which field, the message what is possible")
    unknown = ResponseSpec(ErrorBody, description="it is not here; the message says what is")
    too_large = ResponseSpec(ErrorBody, description="the body is too large")
    refusals = {
        401: ResponseSpec(ErrorBody, description="the API key is missing or wrong"),
        503: ResponseSpec(ErrorBody, description="the engine is full, or not ready; Retry-After says when to come again"),
    }

    def check_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        expected = f"Bearer {api_key}".encode()
        if api_key is not None and not secrets.compare_digest(connection.headers.get("authorization", "").encode(), expected):
            raise refusal(401, "the Authorization header must be: Bearer, a space, and the API key of this server", code="invalid_api_key")

    def served() -> list[Model]:
        if link.status.state != "ready":
            raise Away(link.status)
        return [Model.of(info, created, limits) for info in link.models]

    def find(models: list[Model], id: str) -> Model:
        for model in models:
            if model.id == id:
                return model
        message = f"model {id!r} is not served here; there is: {', '.join(model.id for model in models)}"
        raise refusal(404, message, "model", "model_not_found")

    def choose(models: list[Model], id: str | None) -> Model:
        """The model of a request, which need not say it where there is but one."""
        if id is not None:
            return find(models, id)
        if len(models) > 1:
            possible = ", ".join(model.id for model in models)
            raise refusal(400, f"model is missing, and this server has several: {possible}", "model", "missing_field")
        return models[0]

    @post(
        "/v1/audio/speech",
        guards=[check_key],
        status_code=200,
        request_max_body_size=limits.speech_body_bytes,
        responses={
            200: ResponseSpec(
                bytes,
                description="audio in the format that was asked for, sent as it is made; text/event-stream with stream_format sse",
                media_type="audio/*",
                generate_examples=False,
            ),
            400: wrong,
            404: unknown,
            413: too_large,
            **refusals,
        },
    )
    async def speech(data: SpeechRequest, request: Request[Any, Any, Any]) -> ASGIApp:
        """Speak a text."""
        model = choose(served(), data.model)
        request.state.model = model.id  # for the metrics, should it be refused
        if not data.input.strip():
            raise refusal(400, "input is empty: give a text to speak", "input")
        if len(data.input) > limits.text_chars:
            raise refusal(400, f"input has {len(data.input)} characters; this server takes up to {limits.text_chars}", "input")
        if data.stream_format == "sse" and not data.stream:
            raise refusal(400, "stream false is an answer in one piece, which events are not: leave stream or stream_format out", "stream")
        if data.task_type is not None and TASK_MODE[data.task_type] not in model.modes:
            possible = [task for task, mode in TASK_MODE.items() if mode in model.modes]
            raise refusal(400, f"model {model.id!r} is not for task_type {data.task_type!r}; it is for: {', '.join(possible)}", "task_type")
        references.check(data, model)
        return Speech(link, references, metrics, data, model)

    @get("/v1/models", guards=[check_key], responses=refusals)
    async def list_models() -> ModelList:
        """The served models, and what each can do."""
        return ModelList(served())

    @get("/v1/models/{model_id:path}", guards=[check_key], responses={400: wrong, 404: unknown, **refusals})
    async def one_model(model_id: str) -> Model:
        """One served model."""
        return find(served(), model_id.removeprefix("/"))

    def described(voice: StoredVoice, models: list[Model]) -> VoiceObject:
        speakers = [model.id for model in models if model.reference_s is not None]
        return VoiceObject(voice.name, voice.name, voice.created_at, "audio_sample", speakers, voice.duration_s, voice.ref_text)

    @get("/v1/audio/voices", guards=[check_key], responses=refusals)
    async def list_voices() -> VoiceList:
        """The voices of the served models, and the uploaded ones; `models` says which can speak in each."""
        models = served()
        own = dict.fromkeys(name for model in models for name in model.voices)
        presets = [VoiceObject(name, name, created, "preset", [model.id for model in models if name in model.voices]) for name in own]
        return VoiceList([*presets, *(described(voice, models) for voice in await asyncio.to_thread(voices.list))])

    @post(
        "/v1/audio/voices",
        guards=[check_key],
        status_code=200,
        request_max_body_size=limits.upload_body_bytes,
        responses={
            400: wrong,
            409: ResponseSpec(ErrorBody, description="there is a voice of that name"),
            413: too_large,
            **refusals,
        },
    )
    async def add_voice(data: Annotated[VoiceUpload, Body(media_type=RequestEncodingType.MULTI_PART)]) -> VoiceObject:
        """Keep a recording as a voice that requests can name."""
        models = served()
        possible_s = [model.reference_s for model in models if model.reference_s is not None]
        if not possible_s:
            possible = ways(models[0]) if len(models) == 1 else "; ".join(f"{model.id}: {ways(model)}" for model in models)
            raise refusal(400, f"no model here takes reference audio, so an uploaded voice could not be used: {possible}")
        if any(is_own(model.voices, data.name) for model in models):
            raise refusal(409, f"{data.name!r} is a voice of the model; take another name", "name", "voice_exists")
        if len(sample := await data.audio_sample.read()) > limits.reference_bytes:
            message = f"audio_sample has {len(sample)} bytes; this server takes up to {limits.reference_bytes}"
            raise refusal(413, message, "audio_sample", "body_too_large")
        try:
            clean_name(data.name)
        except ValueError as error:
            raise refusal(400, str(error), "name") from None
        try:
            shortest_s, longest_s = min(possible_s)[0], max(longest_s for _, longest_s in possible_s)
            clip = await asyncio.to_thread(decode, sample, longest_s)
            if clip.duration_s < shortest_s:
                raise ValueError(f"it lasts {clip.duration_s:.4g} s; from {shortest_s:g} to {longest_s:g} s are possible")
            voice = await asyncio.to_thread(voices.add, data.name, clip, data.ref_text, data.consent)
        except Taken as error:
            raise refusal(409, str(error), "name", "voice_exists") from None
        except TooMany as error:
            raise refusal(400, str(error), code="too_many_voices") from None
        except ValueError as error:
            raise refusal(400, f"audio_sample cannot be used: {error}", "audio_sample") from None
        return described(voice, models)

    @delete("/v1/audio/voices/{voice_id:str}", guards=[check_key], status_code=200, responses={400: wrong, 404: unknown, **refusals})
    async def remove_voice(voice_id: str) -> VoiceDeleted:
        """Forget an uploaded voice. Requests that speak in it go on."""
        if any(is_own(model.voices, voice_id) for model in link.models):
            raise refusal(400, f"{voice_id!r} is a voice of the model, and stays", "voice")
        if not voices.has(voice_id) or not await asyncio.to_thread(voices.remove, voice_id):
            raise refusal(404, f"there is no uploaded voice {voice_id!r}; GET /v1/audio/voices lists them", "voice", "voice_not_found")
        return VoiceDeleted(clean_name(voice_id))

    @get("/health")
    async def health() -> dict[str, str]:
        """This process is alive, whatever the engine does."""
        return {"status": "alive"}

    @get("/ready", responses={503: ResponseSpec(Ready, description="not yet: `state` and `progress` say how far it is")})
    async def ready() -> Response[Ready]:
        """Loaded and warm, so that the first request is as fast as any."""
        status = link.status
        code = 200 if status.state == "ready" else 503
        return Response(Ready(status.state, status.progress, status.detail), status_code=code)

    @get("/metrics", responses={200: ResponseSpec(str, description="numbers for Prometheus", media_type="text/plain")})
    async def tell_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        """How requests went, and what the engine holds."""
        content, media_type = metrics.expose(request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    @asynccontextmanager
    async def keep_link(_: Litestar) -> AsyncIterator[None]:
        await asyncio.to_thread(voices.tidy)
        task = asyncio.create_task(link.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await references.close()

    return Litestar(
        [speech, list_models, one_model, list_voices, add_voice, remove_voice, health, ready, tell_metrics],
        lifespan=[keep_link],
        exception_handlers={Exception: answer_error},
        request_max_body_size=MAX_BODY_BYTES,
        state=State({"metrics": metrics}),
        openapi_config=OpenAPIConfig(
            title="speechzoo", version="1", path="/schema", render_plugins=[JsonRenderPlugin(), YamlRenderPlugin()]
        ),
        logging_config=None,
    )


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    logs.configure("http")
    if options.lifeline is not None:
        hold(options.lifeline)
    api_key = os.environ.get("ZOO_API_KEY") or None
    app = create_app(EngineClient(options.socket), api_key=api_key, limits=options.limits, voices_dir=options.voices_dir)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=options.grace_s)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.fd)])


if __name__ == "__main__":
    main()
