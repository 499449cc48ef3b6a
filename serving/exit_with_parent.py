"""A child that ends with its parent, however the parent ends: the parent holds the write end of a pipe, and the child waits for its end."""

from __future__ import annotations

import os
import signal
import threading


def hold(fd: int) -> None:
    """Sends this process SIGTERM once nobody holds the write end of pipe `fd` any more."""

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
