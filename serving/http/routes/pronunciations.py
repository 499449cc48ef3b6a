"""The route of uploaded pronunciations."""

from __future__ import annotations

import asyncio

import msgspec
from litestar import Response, get, put
from litestar.openapi.datastructures import ResponseSpec

from serving.http.held_body import held_body
from serving.http.objects import ErrorBody
from serving.http.schemas import PronunciationList
from serving.http.server import REFUSALS, TOO_LARGE, WRONG, Server
from serving.http.uploads import refusals

NO_ROOM = ResponseSpec(ErrorBody, description="the server's disk is full")


@get("/v1/audio/pronunciations", responses=REFUSALS)
async def list_pronunciations(server: Server) -> Response[PronunciationList]:
    """List the pronunciations that were uploaded, but not those of the server's own file."""
    return listed(PronunciationList(server.dictionary.uploaded), server)


@put("/v1/audio/pronunciations", responses={400: WRONG, 413: TOO_LARGE, 507: NO_ROOM, **REFUSALS})
async def replace_pronunciations(data: PronunciationList, server: Server) -> Response[PronunciationList]:
    """Replace the uploaded pronunciations. They hold for all requests that begin from now on, and stay when the
    server is started again. An empty list removes them."""
    answer = listed(data, server)  # first, because it may be refused
    with refusals():
        await asyncio.to_thread(server.dictionary.replace, data.pronunciations)
    return answer


def listed(entries: PronunciationList, server: Server) -> Response[PronunciationList]:
    """Return a list, which may have megabytes, as an answer. Raises the refusal."""
    return held_body(msgspec.json.encode(entries), "application/json", server.memory)
