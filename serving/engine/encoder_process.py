"""Recordings are encoded in a process of its own, where models are on a CPU: encoders take seconds, and threads of them share the
interpreter's lock and the cores with the engine's loop, so that a preset voice was heard half as late again beside clones.

    Encoders.encode(message) ─ directory ─> worker: makes the prompt, whose encoder leaves a file (zoo/encoded_files.py)
             <──────────────── how it went ──┘  └─ fork ── keeper ── "died"

`Encoders` forks the keeper when models are loaded and nothing computes yet; the keeper, which does nothing else, forks the worker, and
another one when that dies: whatever goes wrong there is the affair of one request. Both share the models' memory. Recordings are
encoded one after the other, since encoders are wide, at the lowest priority that is worth anything.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog

from compile_cache import threads
from serving import protocol
from zoo.contract import Family
from zoo.references import hold_nothing
from zoo.request import Request, RequestError

NICE = 15
LOOK_S = 0.05  # how often who waits for a recording asks whether its client has left
REQUEST, REFUSED = "request", "refused"  # files in a recording's directory
DONE, IS_REFUSED, HAS_FAILED = 0, 3, 4

log = structlog.get_logger()


class Ended(Exception):
    """Nobody is there any more who would: recordings are to be encoded in this process."""


class Refused(msgspec.Struct):
    param: str | None  # None: of a plain ValueError
    message: str


class Encoders:
    """As the process sees them that forked them. request_of: a message's request. `encode` may be called from several
    threads."""

    def __init__(self, families: Mapping[str, Family[Any]], request_of: Callable[[protocol.Speak], Request]):
        self.place = Path(tempfile.mkdtemp(prefix="zoo-recordings-"))
        self.lock, self.is_over, self.received = threading.Lock(), False, b""
        self.worker: int | None = None  # its process, while it encodes
        self.socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            keep(theirs, self.place, dict(families), request_of)
        theirs.close()

    def encode(self, message: protocol.Speak, has_left: Callable[[], bool] = lambda: False) -> Path:
        """-> a directory with what the encoders made of recordings that are nowhere kept; what is kept lies where it is kept. The
        caller removes it. has_left: whether nobody wants it any more. Raises ValueError, RuntimeError for a child that crashed,
        Ended."""
        directory = Path(tempfile.mkdtemp(dir=self.place))
        try:
            (directory / REQUEST).write_bytes(msgspec.msgpack.encode(kept_in(message, directory)))
            with self.lock:
                status = DONE if has_left() else self._ask(directory, has_left)
            if status == IS_REFUSED:
                refused = msgspec.msgpack.decode((directory / REFUSED).read_bytes(), type=Refused)
                if refused.param is None:
                    raise ValueError(refused.message)
                raise RequestError(refused.param, refused.message)
            if status != DONE and not has_left():
                how = f"it died of signal {-status}" if status < 0 else "its line on stderr says why"
                raise RuntimeError(f"the process that encodes recordings failed on one: {how}")
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory

    def _ask(self, directory: Path, has_left: Callable[[], bool]) -> int:
        """-> DONE, another status, or below 0 the signal that ended the worker. Raises Ended."""
        self._send(f"{directory}\n")
        is_ended = False
        while True:
            line = self._line()
            if line is not None:
                what, number = line.split()
                if what == "begun":
                    self.worker = int(number)
                elif what == "died" or not is_ended:  # who was ended may have been done, and died
                    self.worker = None
                    return int(number)
            elif self.worker is not None and not is_ended and has_left():
                is_ended = True
                self._end_worker()

    def _send(self, line: str) -> None:
        """Raises Ended."""
        try:
            self.socket.sendall(line.encode())
        except OSError:
            self._is_gone()

    def _line(self) -> str | None:
        """None: nothing came for a while. Raises Ended."""
        try:
            if b"\n" not in self.received:
                if not select.select([self.socket], [], [], LOOK_S)[0]:
                    return None
                more = self.socket.recv(256)
                if not more:
                    self._is_gone()
                self.received += more
                return None
        except OSError:
            self._is_gone()
        line, _, self.received = self.received.partition(b"\n")
        return line.decode()

    def _is_gone(self) -> NoReturn:
        if not self.is_over:
            log.warning("the process that encodes recordings has ended: they are encoded in the engine's own from now on")
        self.is_over = True
        raise Ended

    def _end_worker(self) -> None:
        if self.worker is not None:
            with suppress(ProcessLookupError):  # it has died
                os.kill(self.worker, signal.SIGKILL)

    def close(self) -> None:
        """Keeper and worker end; who waits for them gets Ended."""
        self.is_over = True
        with suppress(OSError):  # they have ended before
            self.socket.shutdown(socket.SHUT_RDWR)
        self._end_worker()
        os.waitpid(self.pid, 0)
        with self.lock:
            self.socket.close()
        shutil.rmtree(self.place, ignore_errors=True)  # of a keeper that was killed


def kept_in(message: protocol.Speak, directory: Path) -> protocol.Speak:
    """Recordings that are nowhere kept are, there."""
    references = [
        msgspec.structs.replace(each, kept_in=str(directory)) if each.kept_in is None else each
        for each in message.references
    ]
    return msgspec.structs.replace(message, references=references)


# the keeper, and the worker


def keep(
    asked: socket.socket,
    place: Path,
    families: Mapping[str, Family[Any]],
    request_of: Callable[[protocol.Speak], Request],
) -> NoReturn:
    """Fork a worker, and another one when that died, until nobody asks any more; then all that lies in `place` goes."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends with who forked it, however that ends
        signal.set_wakeup_fd(-1)
        # Connections and listeners that it holds would be open for as long as it lives.
        for descriptor in map(int, os.listdir("/dev/fd")):
            if descriptor > 2 and descriptor != asked.fileno():
                with suppress(OSError):  # the listing's own
                    os.close(descriptor)
        os.nice(NICE)
        while True:
            pid = os.fork()
            if pid == 0:
                work(asked, families, request_of)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status == DONE:
                break
            asked.sendall(f"died {status}\n".encode())
    except OSError:  # nobody asks any more
        pass
    finally:  # nothing of the process that it was forked from may run in it
        shutil.rmtree(place, ignore_errors=True)
        os._exit(0)


def work(
    asked: socket.socket, families: Mapping[str, Family[Any]], request_of: Callable[[protocol.Speak], Request]
) -> NoReturn:
    """Encode what lies in each directory that is named, and hold none of it, until nobody asks any more."""
    status = HAS_FAILED
    try:
        threads.use_one_thread()
        hold_nothing()
        with asked.makefile("r") as lines:
            for line in lines:
                asked.sendall(f"begun {os.getpid()}\n".encode())
                asked.sendall(f"done {encoded(Path(line.rstrip()), families, request_of)}\n".encode())
        status = DONE
    except OSError:
        status = DONE
    finally:
        os._exit(status)


def encoded(directory: Path, families: Mapping[str, Family[Any]], request_of: Callable[[protocol.Speak], Request]) -> int:
    """Make the prompt, for what its encoder leaves behind. -> how it went."""
    try:
        message = msgspec.msgpack.decode((directory / REQUEST).read_bytes(), type=protocol.Speak)
        next(families[message.model].passes(request_of(message)))
    except ValueError as error:
        param = error.param if isinstance(error, RequestError) else None
        (directory / REFUSED).write_bytes(msgspec.msgpack.encode(Refused(param, str(error))))
        return IS_REFUSED
    except Exception as error:  # whatever it is, it is this request's alone
        os.write(2, f"zoo: a recording could not be encoded: {error!r}\n".encode())
        return HAS_FAILED
    return DONE
