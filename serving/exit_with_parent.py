"""End a child process with its parent, however the parent ends.

The parent holds the write end of a pipe, and the child waits until the pipe closes.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path


def exit_with_parent(parent_fd: int, socket: str | None = None) -> None:
    """Send this process SIGTERM once the write end of the pipe `parent_fd` is closed.

    socket: of the engine. A parent that is killed cannot remove it and its directory, so this process does.
    """

    def wait() -> None:
        while os.read(parent_fd, 1):
            pass
        if socket is not None:
            with suppress(OSError):  # another child was first, or the directory holds more than sockets
                Path(socket).unlink(missing_ok=True)
                Path(socket).parent.rmdir()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()
