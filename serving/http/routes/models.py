"""The routes of models: /v1/models and /v1/audio/models."""

from __future__ import annotations

from litestar import get

from serving.http.objects import Choices, Entry, Model, ModelList
from serving.http.server import REFUSALS, UNKNOWN, WRONG, Server


@get("/v1/models", responses=REFUSALS)
async def list_models(server: Server) -> ModelList:
    """List the served models and their abilities."""
    return ModelList(server.models)


@get("/v1/audio/models", responses=REFUSALS)
async def list_choices(server: Server) -> Choices:
    """List the served models for clients that only want speech models. Each alias is an entry, too."""
    models = server.models
    names = [name for model in models for name in (model.id, *model.aliases)]
    return Choices([Entry(name, name) for name in names], models)


@get("/v1/models/{model_id:path}", responses={400: WRONG, 404: UNKNOWN, **REFUSALS})
async def one_model(model_id: str, server: Server) -> Model:
    """Return one served model."""
    return server.model(model_id.removeprefix("/"))
