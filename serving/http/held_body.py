"""Whole answers that the memory quota counts until the client has read them."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from typing import Any

from litestar import Response
from litestar.response import Stream

from serving.http.quota import Quota, Share

CHUNK_BYTES = 1 << 16  # the server waits for the client after each


def held_body(body: bytes, media_type: str, memory: Quota) -> Response[Any]:
    """Return an answer that holds its share of the quota until it is sent, or its client has left. Raises the
    refusal."""
    chunks = Chunks(body, memory.take(len(body)))
    return Stream(chunks, media_type=media_type, headers={"content-length": str(len(body))})


class Chunks:
    """The chunks of a body. A client may leave before the first, so its share is also released with this object."""

    def __init__(self, body: bytes, share: Share):
        self._body, self._share = body, share
        weakref.finalize(self, share.release).atexit = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._share:
            for at in range(0, len(self._body), CHUNK_BYTES):
                yield self._body[at : at + CHUNK_BYTES]
