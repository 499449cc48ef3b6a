"""The route GET /: browsers get a page for trying the models, other clients get the addresses of the API."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException

FILES = Path(__file__).parents[1] / "playground"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page may use its own modules, styles and routes, and audio that it made itself. No text becomes a script
# or a tag.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
START = {"name": "speechzoo", "schema": "/schema", "models": "/v1/models", "ready": "/ready"}


class File(NamedTuple):
    content: bytes
    headers: dict[str, str]


@cache
def files() -> dict[str, File]:
    """Return all files of the page, by name."""
    return {path.name: read(path) for path in FILES.iterdir() if path.suffix in TYPES}


def read(path: Path) -> File:
    content = path.read_bytes()
    headers = {
        "content-type": f"{TYPES[path.suffix]}; charset=utf-8",
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        # Browsers keep the file but ask each time, so that the page always matches the server's version.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return File(content, headers)


@get("/", include_in_schema=False)
async def start(request: Request[Any, Any, Any]) -> Response[Any]:
    """Return the page to browsers, and JSON to all other clients. Only browsers ask for HTML."""
    if "text/html" not in request.headers.get("accept", ""):
        return Response(START, headers={"vary": "accept"})
    return answer(request, files()["index.html"], {"vary": "accept"})


@get("/", include_in_schema=False)
async def start_without_page() -> dict[str, str]:
    """Return the addresses of the API to every client."""
    return START


@get("/playground/{name:str}", include_in_schema=False)
async def part(name: str, request: Request[Any, Any, Any]) -> Response[Any]:
    """Return a module, a style sheet or an image of the page."""
    if name not in files():
        raise NotFoundException
    return answer(request, files()[name], {})


def answer(request: Request[Any, Any, Any], file: File, more: dict[str, str]) -> Response[Any]:
    """Return the file, or 304 if the browser has it."""
    headers = file.headers | more
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if headers["etag"] in known or "*" in known:
        return Response(None, status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=headers["content-type"])
