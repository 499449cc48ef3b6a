"""The OpenAPI schema: the routes from the code, the bodies as msgspec validates them, and the options of the
served models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from litestar import Request, Response, Router
from litestar.exceptions import NotFoundException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import Components, SecurityRequirement, SecurityScheme

from serving import protocol
from serving.http.elevenlabs import bodies as elevenlabs
from serving.http.errors import SPEECH
from serving.http.objects import (
    BODIES,
    AudioDelta,
    AudioDone,
    AudioError,
    AudioSegment,
    ModelLoading,
    TextDelta,
)
from serving.http.server import Server
from serving.http.word_times import AudioWords
from serving.http.works import schemas as works

EVENTS = (ModelLoading, AudioDelta, TextDelta, AudioSegment, AudioWords, AudioDone, AudioError)
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


async def refuse_unknown(response: Response[Any]) -> Response[Any]:
    """Let an unknown path below /schema be an error like any other; Litestar answers it with a page."""
    if response.status_code == 404:
        raise NotFoundException
    return response


def config() -> OpenAPIConfig:
    """Return the configuration of an app's schema. Its router belongs to that app."""
    router = Router("/schema", route_handlers=[], include_in_schema=False, after_request=refuse_unknown)
    return OpenAPIConfig(
        title="speechzoo",
        version="1",
        openapi_router=router,
        use_handler_docstrings=True,
        render_plugins=[ServedJson(), ServedYaml()],
        components=Components(security_schemes={"key": SecurityScheme(type="http", scheme="bearer")}),
    )


# A key, or none if the server was started without one.
SECURITY: list[SecurityRequirement] = [{"key": []}, {}]


def models_of(request: Request[Any, Any, Any]) -> list[protocol.ModelInfo]:
    """Return the served models; the list is empty until the engine has sent it."""
    server: Server = request.app.state.server
    return server.engine.models


def with_options(schema: bytes, models: Iterable[protocol.ModelInfo]) -> dict[str, Any]:
    """Return Litestar's schema (JSON) with two changes.

    Bodies are as msgspec validates them, because Litestar leaves out the contents of optional fields and the
    lengths of tuples. A speech request also has the models' options, and allows no other fields.
    """
    page = msgspec.json.decode(schema)
    schemas = page["components"]["schemas"]
    schemas |= schemas_of_bodies()
    body = schemas["SpeechRequest"]
    shared = frozenset(body["properties"])
    for model in models:
        for option in model.options:
            if option.name not in shared:
                add(body["properties"], model.id, option)
    for name, field in body["properties"].items():
        if name not in body["required"]:
            allow_null(field)
    body["additionalProperties"] = False
    spoken = page["paths"][SPEECH]["post"]["responses"]["200"]["content"]
    spoken["text/event-stream"] = {"schema": schema_of_events()}
    return page


def schemas_of_bodies() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(
        (*BODIES, *elevenlabs.BODIES, *works.BODIES, *EVENTS),
        schema_hook=schema_of_upload,
        ref_template="#/components/schemas/{name}",
    )
    return msgspec.json.decode(msgspec.json.encode(schemas))  # YAML has no tuples


def schema_of_events() -> dict[str, Any]:
    """Return the schema of a server-sent event as in OpenAPI 3.2: an object whose data is JSON."""
    references = [{"$ref": f"#/components/schemas/{one.__name__}"} for one in EVENTS]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"oneOf": references}}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def schema_of_upload(_: type) -> dict[str, Any]:
    """Return the schema of UploadFile, the only type that msgspec does not know."""
    return {"type": "string", "format": "binary"}


def allow_null(field: dict[str, Any]) -> None:
    """Let the field be null, which means its default."""
    null = {"type": "null"}
    if "anyOf" in field:
        if null not in field["anyOf"]:
            field["anyOf"].append(null)
        return
    said = {name: field.pop(name) for name in ("description", "default") if name in field}
    alone = dict(field)
    field.clear()
    field |= said | {"anyOf": [alone, null]}


def add(properties: dict[str, Any], model_id: str, option: protocol.OptionInfo) -> None:
    """Add a model's option to the fields. If models allow different values, the field lists them all."""
    field = properties.setdefault(option.name, {"description": "", "anyOf": []})
    line = f"model {model_id}: {option.help}; values: {option.possible}"
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
