"""How the engine process ends when the disk is full."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

REFUSED = 2  # the exit status of a process that would not do better if it were started again


@contextmanager
def one_line_if_full() -> Iterator[None]:
    """End the process with one line if the disk is full: each compiler has a different exception for it."""
    try:
        yield
    except BaseException as error:
        if not is_disk_full(error):
            raise
        place = os.environ.get("ZOO_CACHE_DIR") or "~/.cache/speechzoo"
        sys.stderr.write(
            f"zoo: no room to compile: the disk of {place} or of {tempfile.gettempdir()} is full\n"
        )
        sys.exit(REFUSED)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):  # printed by a compiler
            return True
        error = error.__cause__ or error.__context__
    return False
