"""Keys of positions, by which equal inputs share pages of the KV cache (`Lane.prefix_keys`)."""

from __future__ import annotations

from hashlib import blake2b


def prefix_key(*parts: object) -> int:
    """Return a negative int64: a hash of the parts' `repr`. It never equals a text id, because those are not
    negative."""
    name = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") | -(1 << 63)
