"""The aligner process: takes batches of pieces over a Unix socket, and answers each with their words.

    python -m serving.aligner.process SOCKET_FD DIRECTORY DEVICE

It has lower priority than the engine, and half of the processors.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

import numpy as np

from serving.aligner.messages import Answer, Piece, pack, pieces, read

NICENESS = 10


def main() -> None:
    _, fd, directory, device = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the socket
    os.nice(NICENESS)
    with (
        suppress(ConnectionError),  # the server is gone
        socket.socket(fileno=int(fd)) as connection,
        connection.makefile("rwb") as file,
    ):
        import torch
        import transformers

        from zoo.align.ctc import Segment, load

        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
        transformers.logging.set_verbosity_error()
        try:
            aligner = load(directory, device)
        except ValueError as error:
            file.write(pack(Answer(fault=str(error))))
            return

        def segment(piece: Piece) -> Segment:
            return Segment(np.frombuffer(piece.pcm, "<i2"), piece.sample_rate_hz, piece.text, piece.is_open)

        while (body := read(file)) is not None:
            file.write(pack(Answer(aligner.align([segment(piece) for piece in pieces.decode(body)]))))
            file.flush()


if __name__ == "__main__":
    main()
