"""End a child process with its parent, however the parent ends.

The parent holds the write end of a pipe, and the child waits until the pipe closes.
"""

from __future__ import annotations

import os
import signal
import threading


def exit_with_parent(parent_fd: int) -> None:
    """Send this process SIGTERM once the write end of the pipe `parent_fd` is closed."""

    def wait() -> None:
        while os.read(parent_fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()
