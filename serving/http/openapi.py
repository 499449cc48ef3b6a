"""The OpenAPI page: what the code says of the routes, and what the served models say of their options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from litestar import Request
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin

from serving import protocol
from serving.http.server import Server

JSON_TYPE = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}


class ServedJson(JsonRenderPlugin):
    """/schema/openapi.json"""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(
            request, with_options(self.render_json(request, openapi_schema), models_of(request))
        )


class ServedYaml(YamlRenderPlugin):
    """/schema/openapi.yaml"""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(
            request, with_options(self.render_json(request, openapi_schema), models_of(request))
        )


CONFIG = OpenAPIConfig(
    title="speechzoo", version="1", path="/schema", render_plugins=[ServedJson(), ServedYaml()]
)


def models_of(request: Request[Any, Any, Any]) -> list[protocol.ModelInfo]:
    """None while the engine has told of none."""
    server: Server = request.app.state.server
    return server.engine.models


def with_options(schema: bytes, models: Iterable[protocol.ModelInfo]) -> dict[str, Any]:
    """The page, which came as JSON, with the models' options among the fields of a speech request, and no
    other."""
    page = msgspec.json.decode(schema)
    body = page["components"]["schemas"]["SpeechRequest"]
    shared = frozenset(body["properties"])
    for model in models:
        for option in model.options:
            if option.name not in shared:
                add(body["properties"], model.id, option)
    body["additionalProperties"] = False
    return page


def add(properties: dict[str, Any], model_id: str, option: protocol.OptionInfo) -> None:
    """One more model has the option: where models differ in what is possible, each says its own."""
    field = properties.setdefault(option.name, {"description": "", "anyOf": []})
    line = f"of model {model_id}: {option.help}; possible: {option.possible}"
    field["description"] = "\n".join(filter(None, (field["description"], line)))
    if (schema := schema_of(option)) not in field["anyOf"]:
        field["anyOf"].append(schema)


def schema_of(option: protocol.OptionInfo) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": JSON_TYPE[option.type]}
    if option.default is not None:
        schema["default"] = option.default
    if option.range is not None:
        schema["minimum"], schema["maximum"] = option.range
    if option.choices:
        schema["enum"] = list(option.choices)
    return schema
