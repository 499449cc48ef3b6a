"""The route GET /docs: Swagger UI for this server's OpenAPI schema. All of its files come from this server."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException

from serving.http.static_files import File, answer, read_all

FILES = Path(__file__).parents[1] / "api_page"
# Swagger UI sets styles of elements, and its icons are data. It asks no other host.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; media-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def files() -> dict[str, File]:
    """Return all files of the page, by name."""
    return read_all(FILES, POLICY)


@get("/docs", include_in_schema=False)
async def start(request: Request[Any, Any, Any]) -> Response[Any]:
    """Return the page."""
    return answer(request, files()["index.html"], {})


@get("/docs/{name:str}", include_in_schema=False)
async def part(name: str, request: Request[Any, Any, Any]) -> Response[Any]:
    """Return a script or a style sheet of the page."""
    if name not in files():
        raise NotFoundException
    return answer(request, files()[name], {})
