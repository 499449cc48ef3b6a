"""A child that ends with its parent, however the parent ends: the parent holds the write end of a pipe, and
the child waits for its end."""

from __future__ import annotations

import os
import signal
import threading


def exit_with_parent(parent_fd: int) -> None:
    """Sends this process SIGTERM once nobody holds the write end of the pipe that `parent_fd` reads."""

    def wait() -> None:
        while os.read(parent_fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()
