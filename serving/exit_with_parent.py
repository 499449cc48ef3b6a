"""End a child process with its parent, however the parent ends.

The parent holds the write end of a pipe, and the child waits until the pipe closes.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path


def exit_with_parent(parent_fd: int, socket: str | None = None) -> None:
    """Send this process SIGTERM once the write end of the pipe `parent_fd` is closed.

    socket: of the engine. Its directory is the parent's, which cannot remove it if it is killed; it is removed
    here then.
    """

    def wait() -> None:
        while os.read(parent_fd, 1):
            pass
        if socket is not None:
            shutil.rmtree(Path(socket).parent, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()
