"""The route POST /dev/ssml, as Kokoro-FastAPI has it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import post
from msgspec import Meta

from serving.http.errors import FIELDS, refusal
from serving.http.schemas import fields_of
from serving.http.server import REFUSALS, WRONG
from serving.http.ssml import is_ssml, text_of


class Document(msgspec.Struct):
    """The body of POST /dev/ssml. `voice`, which Kokoro-FastAPI's clients send, has no effect."""

    text: Annotated[str, Meta(description="an SSML document; other text is returned as it is")]
    voice: Annotated[str | None, Meta(description="accepted and ignored")] = None


class Translated(msgspec.Struct):
    text: str


FIELDS["/dev/ssml"] = fields_of(Document)


@post("/dev/ssml", status_code=200, responses={400: WRONG, **REFUSALS}, include_in_schema=False)
async def translate(data: Document) -> Translated:
    """Return SSML as the text for a speech request with `allow_voice_tags`."""
    if not is_ssml(data.text):
        return Translated(data.text)
    try:
        return Translated(text_of(data.text))
    except ValueError as error:
        raise refusal(400, f"text is SSML that cannot be used: {error}", "text") from None
