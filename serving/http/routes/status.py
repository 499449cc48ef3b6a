"""The routes for monitoring: /health, /ready and /metrics."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.openapi.datastructures import ResponseSpec

from serving.http.objects import Health, ModelHealth, Ready
from serving.http.server import Server

NOT_READY = ResponseSpec(Ready, description="not ready; `state` and `progress` say how far it is")
NUMBERS = ResponseSpec(str, description="metrics for Prometheus", media_type="text/plain")


@get("/health")
async def health(server: Server) -> Health:
    """Return 200 while the HTTP process is alive, whatever the engine's state. With models on demand it has
    their states, unless the metrics are private."""
    states = {} if server.has_private_metrics else server.engine.states
    models = {id: ModelHealth(state.stage, state.progress, state.problem) for id, state in states.items()}
    return Health("alive", models)


@get("/ready", responses={503: NOT_READY})
async def ready(server: Server) -> Response[Ready]:
    """Return 200 once all models are loaded and warm, so that the first request is as fast as any other. With
    models on demand, return it once the server knows its models."""
    status = server.engine.status
    code = 200 if status.state == "ready" else 503
    return Response(Ready(status.state, status.progress, status.detail), status_code=code)


@get("/metrics", responses={200: NUMBERS})
async def metrics(request: Request[Any, Any, Any], server: Server) -> Response[bytes]:
    """Return metrics of the requests and of the engine."""
    content, media_type = server.metrics.expose(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": media_type})  # Litestar adds a charset to a media type
