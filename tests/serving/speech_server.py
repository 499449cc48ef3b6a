"""A small speech server with scripted answers: a test decides about formats and the time of each chunk."""

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from serving.tools.load.client import Target


def refusal(status, message):
    return web.json_response(
        {"error": {"message": message, "type": "x", "param": None, "code": None}}, status=status
    )


async def stream(request, chunks, headers=None):
    answer = web.StreamResponse(headers=headers or {})
    await answer.prepare(request)
    for chunk in chunks:
        await answer.write(chunk)
    await answer.write_eof()
    return answer


@asynccontextmanager
async def speaking(speak, models=("m",)):
    """Run a server whose speech route is `speak(request, body)`, and return it as a target. models None: it lists
    them only for clients with a key."""

    async def route(request):
        return await speak(request, await request.json())

    async def list_models(request):
        if models is None:
            return refusal(401, "the key is missing")
        return web.json_response({"object": "list", "data": [{"id": name} for name in models]})

    app = web.Application()
    app.router.add_post("/v1/audio/speech", route)
    app.router.add_get("/v1/models", list_models)
    server = TestServer(app)
    await server.start_server()
    try:
        yield Target(str(server.make_url("/v1")), timeout_s=20.0)
    finally:
        await server.close()


async def until(fact):
    """Let other tasks run until the fact is true."""
    async with asyncio.timeout(20):
        while not fact():
            await asyncio.sleep(0)
