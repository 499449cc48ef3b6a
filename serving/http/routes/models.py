"""GET /v1/models."""

from __future__ import annotations

from litestar import get

from serving.http.schemas import Model, ModelList
from serving.http.server import REFUSALS, UNKNOWN, WRONG, Server


@get("/v1/models", responses=REFUSALS)
async def list_models(server: Server) -> ModelList:
    """The served models, and what each can do."""
    return ModelList(server.models)


@get("/v1/models/{model_id:path}", responses={400: WRONG, 404: UNKNOWN, **REFUSALS})
async def one_model(model_id: str, server: Server) -> Model:
    """One served model."""
    return server.model(model_id.removeprefix("/"))
