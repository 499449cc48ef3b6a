"""Signed URLs of speech, for a place that can set no header, such as <audio src>.

    POST /v1/audio/speech/url {"input": ..., "expires_in_s": 3600}  ─  /v1/audio/speech?input=...&expires=...&signature=...

The signature is HMAC-SHA256 over the query, with a secret of the server, so a URL speaks this text in this voice and
nothing else. A page of another site cannot get one: it cannot read the answer of the route that signs.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from serving.http.errors import SPEECH, refusal
from serving.http.objects import Model
from serving.http.schemas import FIELDS

SIGN = f"{SPEECH}/url"
EXPIRES, KEY, SIGNATURE = "expires", "key", "signature"
OWN = (EXPIRES, KEY, SIGNATURE)
MAX_URL_CHARS = 32_000  # half of what a request's head may have
# Fields that are objects, lists or recordings.
NOT_IN_URLS = ("ref_audio", "ref_text", "references", "pronunciations", "timestamp_granularities")

Query = Sequence[tuple[str, str]]


class SignedURL(msgspec.Struct):
    """A URL, as a path on this server, and when it stops working, in seconds since 1970."""

    url: str
    expires_at: int


class Links:
    """Signs queries, and checks signatures."""

    def __init__(self, secret: str, now_s: Callable[[], float] = time.time):
        self._secret, self._now_s = secret.encode(), now_s

    def sign(self, fields: Mapping[str, Any], expires_in_s: int, key: str | None) -> SignedURL:
        """Return the URL of a request. key: the name of the API key that its use counts for. Raises the
        refusal."""
        expires_at = int(self._now_s()) + expires_in_s
        given = {name: value for name, value in fields.items() if value is not None}  # null is the default
        query = [(name, as_text(value)) for name, value in sorted(given.items())]
        query += [(EXPIRES, str(expires_at))] + ([] if key is None else [(KEY, key)])
        url = f"{SPEECH}?{urlencode([*query, (SIGNATURE, self._signature(query))])}"
        if len(url) > MAX_URL_CHARS:
            message = f"the URL would have {len(url)} characters; at most {MAX_URL_CHARS} are possible"
            raise refusal(400, f"input is too long for a URL: {message}", "input")
        return SignedURL(url, expires_at)

    def check(self, query: Query) -> str | None:
        """Return the name of the key in a signed query. Raises the refusal (401, 403)."""
        signed = [(name, value) for name, value in query if name != SIGNATURE]
        given = [value for name, value in query if name == SIGNATURE]
        if not given or not hmac.compare_digest(given[0].encode(), self._signature(signed).encode()):
            message = f"the signature of this URL is missing or wrong; POST {SIGN} makes URLs"
            raise refusal(401, message, SIGNATURE, "invalid_signature")
        facts = dict(signed)
        if self._now_s() > int(facts[EXPIRES]):
            raise refusal(403, "this URL has expired; make another one", EXPIRES, "expired")
        return facts.get(KEY)

    def _signature(self, query: Query) -> str:
        return hmac.new(self._secret, urlencode(sorted(query)).encode(), "sha256").hexdigest()


def as_text(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def fields_of_query(query: Query) -> dict[str, str]:
    """Return the fields of a request in a query. Raises the refusal."""
    fields: dict[str, str] = {}
    for name, value in query:
        if name in NOT_IN_URLS:
            raise not_in_urls(name)
        if name in fields:
            raise refusal(400, f"{name} is given twice", name)
        if name not in OWN:
            fields[name] = value
    return fields


def not_in_urls(name: str) -> Exception:
    message = f"{name} cannot be part of a URL; use POST {SPEECH}, or upload the voice"
    return refusal(400, message, name, "unknown_field")


def options_from_text(fields: Mapping[str, str], model: Model) -> dict[str, Any]:
    """Return the model's options in a query, as values of their types. The engine checks the values."""
    types = {option.name: option.type for option in model.options}
    return {
        name: from_text(value, types.get(name, "str"))
        for name, value in fields.items()
        if name not in FIELDS[SPEECH]
    }


def from_text(value: str, kind: str) -> Any:
    """Return a value of an option's type, or the text itself if it cannot be read as that type."""
    try:
        match kind:
            case "bool":
                return {"true": True, "false": False}.get(value, value)
            case "int":
                return int(value)
            case "float":
                return float(value)
    except ValueError:
        return value
    return value
