"""The file of API keys (`zoo serve --api-keys FILE`): a JSON list with an object for each key.

    [{"name": "anna", "key": "sk-...", "requests_per_minute": 60, "characters_per_day": 200000},
     {"name": "bert", "sha256": "9f86d0...", "audio_s_per_day": 3600}]

`sha256` is the SHA-256 of the key in hexadecimal, so that the file does not have the key itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_KEYS = 1000  # each has its own samples in the metrics
ONLY_NAME = "default"  # of the key that --api-key gives
KEY = re.compile("[!-~]+")

Positive = Annotated[float, Meta(gt=0)]


class ApiKey(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A key or its hash, and the limits of its client. None: no limit."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]  # in metrics and signed URLs
    key: str | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    requests_per_minute: Positive | None = None
    characters_per_day: Positive | None = None
    audio_s_per_day: Positive | None = None

    @property
    def digest(self) -> bytes:
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        assert self.key is not None, f"the key {self.name!r} has neither key nor sha256"
        return digest_of(self.key)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_file(path: str | Path) -> list[ApiKey]:
    """Return the keys in a file. Raises ValueError."""
    try:
        keys = msgspec.json.decode(Path(path).read_bytes(), type=list[ApiKey])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a list of API keys: {error}") from None
    if not 0 < len(keys) <= MAX_KEYS:
        raise ValueError(f"{path} has {len(keys)} API keys; from 1 to {MAX_KEYS} are possible")
    for one in keys:
        if (one.key is None) == (one.sha256 is None):
            raise ValueError(f"{path}: the API key {one.name!r} needs exactly one of key and sha256")
        if one.key is not None and not KEY.fullmatch(one.key):
            raise ValueError(f"{path}: the API key {one.name!r} must be printable ASCII without spaces")
    check_differ(keys, str(path))
    return keys


def check_differ(keys: Iterable[ApiKey], where: str) -> None:
    """Raises ValueError if two keys have the same name, or are the same."""
    names: set[str] = set()
    digests: set[bytes] = set()
    for one in keys:
        if one.name in names or one.digest in digests:
            raise ValueError(f"{where}: the name or the key of {one.name!r} is there twice")
        names.add(one.name)
        digests.add(one.digest)


def all_keys(only: str | None, path: str | Path | None) -> list[ApiKey]:
    """Return the keys of a server: those in the file, and the one of --api-key. Raises ValueError."""
    keys = [] if path is None else read_file(path)
    if only is not None:
        keys.append(ApiKey(ONLY_NAME, key=only))
        check_differ(keys, "--api-key and --api-keys")
    return keys
