"""Recordings that requests name by a path on the server: only below one directory (`--reference-dir`)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

MAX_PATH_CHARS = 4096
WITHOUT = (
    "this server reads no files (it was started without --reference-dir); send a data URL, base64 or a voice"
)


def is_path(audio: str) -> bool:
    """Whether a recording is given as a path. Base64 has no dots, and the name of a recording has one."""
    return audio[:8].lower().startswith("file://") or (
        "." in audio[:MAX_PATH_CHARS] and audio[:5].lower() != "data:"
    )


def read(audio: str, directory: str | None, max_bytes: int) -> bytes:
    """Return the bytes of a recording below a directory. Raises ValueError, which tells nothing of other
    files."""
    if directory is None:
        raise ValueError(WITHOUT)
    path = Path(unquote(urlsplit(audio).path)) if audio[:8].lower().startswith("file://") else Path(audio)
    root = Path(directory).resolve()
    try:
        found = (root / path).resolve(strict=True)
        if not found.is_relative_to(root) or not found.is_file():
            raise FileNotFoundError
        with open(found, "rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError):  # a name with a zero byte, a circle of links
        raise ValueError("there is no such file in the directory of recordings of this server") from None
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes, the limit of this server")
    return content
