"""Check which users can write to a path. Compiled code is run, so only its user and root may write it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PRIVATE = 0o700


def make_levels(directory: Path) -> None:
    """Make a directory and its missing parents, each for the owner alone. Raises OSError."""
    missing = [level for level in (directory, *directory.parents) if not level.exists()]
    for level in reversed(missing):
        level.mkdir(mode=PRIVATE, exist_ok=True)
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")


def seal(directory: Path) -> None:
    """Take a directory, and all in it, from everyone but the owner."""
    for path in (directory, *walked(directory)):
        with suppress(FileNotFoundError):  # a compiler's temporary file
            if not path.is_symlink():
                path.chmod(PRIVATE if path.is_dir() else 0o600)


def walked(directory: Path) -> Iterator[Path]:
    """Yield all that is below a directory. Other processes may remove some of it meanwhile: `Path.rglob` would
    raise FileNotFoundError."""
    for level, directories, files in os.walk(directory):
        yield from (Path(level, name) for name in (*directories, *files))


def stranger_above(directory: Path) -> str | None:
    """Return why other users could replace the contents of a directory, or None. Like ssh for its keys, it
    checks all levels up to the root. In a sticky directory such as /tmp, users can replace only their own
    files."""
    real = directory.resolve()
    for level in (real, *real.parents):
        status = level.stat()
        if (why := stranger(level, status)) is not None and not _is_shared_safely(status):
            return why
    return None


def stranger(path: Path, status: os.stat_result | None = None) -> str | None:
    """Return why other users could have written a file or directory, or None."""
    status = status or path.lstat()
    if status.st_uid not in (0, os.getuid()):
        return f"{path} belongs to another user ({status.st_uid})"
    if stat.S_ISLNK(status.st_mode):
        return None  # its mode means nothing
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
        return f"others may write to {path}; run chmod go-w"
    return None


def _is_shared_safely(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_ISVTX) and status.st_uid in (0, os.getuid())


def _is_own_group(gid: int) -> bool:
    """Return whether this user is the only member of a group, as on systems with a group per user."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
