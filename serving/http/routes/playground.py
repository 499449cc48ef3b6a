"""The route GET /: browsers get a page for trying the models, other clients get the addresses of the API."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException

from serving.http.static_files import File, answer, read_all

FILES = Path(__file__).parents[1] / "playground"
# The page may use its own modules, styles and routes, and audio that it made itself. No text becomes a script
# or a tag.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
START = {"name": "speechzoo", "docs": "/docs", "schema": "/schema", "models": "/v1/models", "ready": "/ready"}
START_WITHOUT_PAGES = {name: path for name, path in START.items() if name != "docs"}


@cache
def files() -> dict[str, File]:
    """Return all files of the page, by name."""
    return read_all(FILES, POLICY)


@get("/", include_in_schema=False)
async def start(request: Request[Any, Any, Any]) -> Response[Any]:
    """Return the page to browsers, and JSON to all other clients. Only browsers ask for HTML."""
    if "text/html" not in request.headers.get("accept", ""):
        return Response(START, headers={"vary": "accept"})
    return answer(request, files()["index.html"], {"vary": "accept"})


@get("/", include_in_schema=False)
async def start_without_page() -> dict[str, str]:
    """Return the addresses of the API to every client."""
    return START_WITHOUT_PAGES


@get("/playground/{name:str}", include_in_schema=False)
async def part(name: str, request: Request[Any, Any, Any]) -> Response[Any]:
    """Return a module, a style sheet or an image of the page."""
    if name not in files():
        raise NotFoundException
    return answer(request, files()[name], {})
