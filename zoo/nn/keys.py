"""Names of positions, so that equal inputs share pages of the KV cache (`Lane.prefix_keys`)."""

from __future__ import annotations

from hashlib import blake2b


def prefix_key(*parts: object) -> int:
    """A negative int64 that follows from the parts' `repr`: no text id, which is not negative, is ever
    mistaken for it."""
    name = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") | -(1 << 63)
