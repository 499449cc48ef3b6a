"""A decoder process: takes audio files over a Unix socket and sends back their samples, one after the other.

    python -m serving.http.decode_worker SOCKET_FD

Memory and processor time are limited for each file. A file that exceeds either ends the process.
"""

from __future__ import annotations

import resource
import socket
import struct
import sys
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path

from serving.http.decode import MAX_KEPT_HZ, decode

JOB = struct.Struct("<dQ")  # the longest duration in seconds, and the size of the file that follows
# The sample rate in Hz and the size of what follows: samples, or for the rate 0 a message in UTF-8.
ANSWER = struct.Struct("<IQ")
SPARE_BYTES = 128 << 20  # for decoding, in addition to what grows with the file and its samples
COPIES = 4  # of the file and of its samples
MAX_CPU_S = 2  # a minute of audio takes a tenth of a second


def max_clip_bytes(max_s: float) -> int:
    """Return the size of the longest decoded recording, in float32 samples."""
    return 4 * int(max_s * MAX_KEPT_HZ) + 4


def main() -> None:
    import av  # noqa: F401, the first recording finds it, and its libraries count as this process's own

    own_bytes = address_space_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        suppress(ConnectionError),  # the server is gone, perhaps with an answer that it did not read
        socket.socket(fileno=int(sys.argv[1])) as connection,
        connection.makefile("rwb") as file,
    ):
        while head := file.read(JOB.size):
            max_s, num_bytes = JOB.unpack(head)
            limit(own_bytes, num_bytes, max_s)
            if not answer(file, num_bytes, max_s):
                return


def answer(file: BufferedRWPair, num_bytes: int, max_s: float) -> bool:
    """Decode the next file and send the answer. Returns False if there was too little memory."""
    try:
        clip = decode(file.read(num_bytes), max_s)
    except MemoryError:
        return False
    except ValueError as error:
        rate_hz, content = 0, str(error).encode()
    else:
        rate_hz, content = clip.sample_rate_hz, clip.samples
    file.write(ANSWER.pack(rate_hz, len(content)))
    file.write(content)
    file.flush()
    return True


def limit(own_bytes: int | None, file_bytes: int, max_s: float) -> None:
    """Limit this process's memory and processor time for a file of this size."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = int(used.ru_utime + used.ru_stime) + 1 + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
    if own_bytes is not None:
        most_bytes = own_bytes + SPARE_BYTES + COPIES * (file_bytes + max_clip_bytes(max_s))
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.RLIM_INFINITY))


def address_space_bytes() -> int | None:
    """Return the size of this process's address space; None if the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except FileNotFoundError:  # not Linux
        return None
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main()
