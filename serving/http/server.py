"""What every route works with: the engine's client, the voices, the metrics, and which models are served."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.openapi.datastructures import ResponseSpec

from serving.engine_client import Away, EngineClient
from serving.http.door import Door
from serving.http.errors import cut, refusal
from serving.http.metrics import Metrics
from serving.http.references import References
from serving.http.schemas import ErrorBody, Limits, Model
from serving.http.voices import Voices, default_directory

if TYPE_CHECKING:  # it comes with an extra
    from serving.http.tracing import Tracing

WRONG = ResponseSpec(
    ErrorBody,
    description="something asked for is wrong: `param` says which field, the message what is possible",
)
UNKNOWN = ResponseSpec(ErrorBody, description="it is not here; the message says what is")
TOO_LARGE = ResponseSpec(ErrorBody, description="the body is too large")
REFUSALS = {
    401: ResponseSpec(ErrorBody, description="the API key is missing or wrong"),
    503: ResponseSpec(
        ErrorBody, description="the engine is full, or not ready; Retry-After says when to come again"
    ),
}


class Server:
    """One per app: routes have it as `server`, the rest of Litestar as `app.state.server`."""

    def __init__(
        self,
        engine: EngineClient,
        api_key: str | None,
        limits: Limits,
        voices_dir: str | Path | None,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine, self.api_key, self.limits = engine, api_key, limits
        self.voices = Voices(voices_dir or default_directory(), limits.voices)
        self.bodies = Door(limits.num_reading, "large bodies are being read")
        self.references = References(self.voices, limits)
        self.metrics = Metrics(engine)
        self.tracing = tracing
        self.created = int(time.time())

    @property
    def models(self) -> list[Model]:
        """Raises Away."""
        if self.engine.status.state != "ready":
            raise Away(self.engine.status)
        return [Model.of(info, self.created, self.limits) for info in self.engine.models]

    def model(self, id: str) -> Model:
        """Raises Away, and the refusal."""
        models = {model.id: model for model in self.models}
        if id not in models:
            message = f"model {cut(id)!r} is not served here; there is: {', '.join(models)}"
            raise refusal(404, message, "model", "model_not_found")
        return models[id]

    def chosen_model(self, id: str | None) -> Model:
        """Of a request, which need not name its model where there is but one. Raises Away, and the
        refusal."""
        if id is not None:
            return self.model(id)
        first, *others = self.models
        if others:
            possible = ", ".join(model.id for model in (first, *others))
            message = f"model is missing, and this server has several: {possible}"
            raise refusal(400, message, "model", "missing_field")
        return first


def check_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard. Raises the refusal."""
    api_key = connection.app.state.server.api_key
    given = connection.headers.get("authorization", "").encode()
    if api_key is not None and not secrets.compare_digest(given, f"Bearer {api_key}".encode()):
        message = "the Authorization header must be: Bearer, a space, and the API key of this server"
        raise refusal(401, message, code="invalid_api_key")
