"""A file that a client may read in parts, so that a listener can seek in it (RFC 9110, section 14)."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from litestar import Request, Response
from litestar.datastructures import ETag
from litestar.response import File, Stream

from serving.http.errors import refusal

CHUNK_BYTES = 1 << 20
ONE_RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*")


def answer(file: Path, name: str, media_type: str, asked: Request[Any, Any, Any]) -> Response[Any]:
    """Return the file, or the part of it that the client asks for. name: of the file once it is downloaded.
    Raises the refusal, OSError."""
    found = file.stat()
    tag = f"{found.st_mtime_ns:x}-{found.st_size:x}"
    part = part_in(asked.headers, f'"{tag}"', found.st_size)
    headers = {"accept-ranges": "bytes"}
    if part is None:
        return File(
            file,
            filename=name,
            media_type=media_type,
            etag=ETag(value=tag),
            stat_result=found,
            headers=headers,
        )
    headers["etag"] = f'"{tag}"'
    headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{found.st_size}"
    headers["content-length"] = str(len(part))
    return Stream(read(file, part), status_code=206, media_type=media_type, headers=headers)


def part_in(headers: Any, tag: str, num_bytes: int) -> range | None:
    """Return the bytes that a request asks for; None for the whole file. The whole file also answers several
    ranges, other units, and a range of an older file. Raises the refusal for a range behind the end."""
    found = ONE_RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", tag) != tag or not any(found.groups()):
        return None
    first, last = found.groups()
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, num_bytes - int(last))
    stop = min(num_bytes, int(last) + 1) if first and last else num_bytes
    if start >= num_bytes:
        error = refusal(416, f"the file has {num_bytes} bytes", code="range_not_satisfiable")
        error.headers = {"content-range": f"bytes */{num_bytes}"}
        raise error
    return range(start, stop)


async def read(file: Path, part: range) -> AsyncIterator[bytes]:
    """Yield a part of a file. It is shorter than promised if the file is."""
    with await asyncio.to_thread(file.open, "rb", buffering=0) as opened:
        at = part.start
        while at < part.stop:
            num_bytes = min(CHUNK_BYTES, part.stop - at)
            data = await asyncio.to_thread(os.pread, opened.fileno(), num_bytes, at)
            if not data:
                return
            at += len(data)
            yield data
