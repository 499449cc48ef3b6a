"""Files of the pages for browsers, each with its headers. A name that ends in .gz is a file that is stored
compressed, and sent so to browsers, all of which can read it."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from litestar import Request, Response

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PACKED = ".gz"


class File(NamedTuple):
    content: bytes
    headers: dict[str, str]
    is_packed: bool = False


def read_all(folder: Path, policy: str) -> dict[str, File]:
    """Return the files of a page by their names in addresses. policy: the Content-Security-Policy."""
    files: dict[str, File] = {}
    for path in folder.iterdir():
        name = path.name.removesuffix(PACKED)
        if Path(name).suffix in TYPES:
            files[name] = _read(path, TYPES[Path(name).suffix], policy)
    return files


def _read(path: Path, kind: str, policy: str) -> File:
    content = path.read_bytes()
    headers = {
        "content-type": f"{kind}; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        # Browsers keep the file but ask each time, so that the page always matches the server's version.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return File(content, headers, path.suffix == PACKED)


def answer(request: Request[Any, Any, Any], file: File, more: dict[str, str]) -> Response[Any]:
    """Return the file, or 304 if the browser has it."""
    headers = file.headers | more
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if headers["etag"] in known or "*" in known:
        return Response(None, status_code=304, headers=headers)
    content = file.content
    if file.is_packed:
        headers["vary"] = "accept-encoding"
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            content = gzip.decompress(content)
    return Response(content, headers=headers, media_type=headers["content-type"])
