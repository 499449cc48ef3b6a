"""The engine process: loads its models, warms them, runs the engine, and answers the HTTP process.

    python -m serving.engine.engine_process '{"socket": PATH, "models": {NAME: DIR, ...}, ...}'

The supervisor starts it so, with `Options` as JSON.

The engine's loop has the main thread. Connections live on an event loop in a second one, prompts are built in
a small pool beside it, and the three meet only through thread-safe calls: nothing that happens on a
connection can hold up a step.
Exit status 2: a model cannot be loaded as asked; one line on stderr says why, and starting again would not
help.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import structlog
import torch

import zoo
from compile_cache import limits, threads
from serving import logs, protocol
from serving.audio import pcm16
from serving.engine.engine import Audio, Engine, Event, Failed, Finished, Full, Place, Spoken, Text
from serving.engine.memory_plan import SPARE_PART, fit
from serving.engine.prepare_for_host import cached, prepare_for_host
from serving.exit_with_parent import exit_with_parent
from zoo.contract import Family, Spec
from zoo.open_text import OpenText
from zoo.request import AudioClip, Option, Reference, Request, RequestError

REFUSED = 2
# Of a code. 422: the request was understood, and asking for it again would end the same way.
STATUS = {"no_audio": 422, "engine_stopped": 503, "stalled": 408}
PROMPT_THREADS = 2
STATS_S = 1.0
# After which a thread that runs Python gives the interpreter to the loop. Python's own 5 ms are waited for at a turn's
# returns from torch: beside such a thread a turn of 11 ms took 23, and 17 with this (two cores, busy with other work).
SWITCH_S = 2e-4
CPU_SLOTS = 8
CPU_PART = 0.5  # of the host's memory, for a throughput engine whose slots nobody counts

log = structlog.get_logger()


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """What the engine process is started with."""

    socket: str
    models: dict[str, str]  # their directories, by the id that clients know
    device: str | None = None  # the GPU where there is one
    dtype: str | None = None
    max_slots: int | None = (
        None  # on a CPU 8, or for throughput 64; as many as there is memory for, 64 at most, on a GPU
    )
    kv_bytes: int | None = None
    saved_bytes: int | None = None  # of the host, for what paused streams' pages held
    policy: str = "streaming"
    run_async: bool = True  # a GPU's reports are read one launch late
    max_waiting: int = 256  # for each model
    max_ttfa_s: float | None = None  # who would hear nothing for longer is refused
    max_unread_s: float = 30.0  # of audio that a client may leave
    max_stall_s: float = 60.0  # for which a client may leave so much
    reference_bytes: int = 256 << 20  # of recordings that wait to be encoded
    warm: bool = True
    compile: bool = True
    codec: str = "float32"  # a GPU's precision of renders: "tf32" or "float32"
    deterministic: bool = False  # equal requests give equal bytes, whoever else speaks
    parent_fd: int | None = None


class Client:
    """A connection, and which of its requests are still of interest to it."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.open: set[str] = set()
        self.held: list[bytes] | None = None

    def send(self, message: protocol.Message) -> None:
        packed = protocol.pack(message)
        if self.held is None:
            self.writer.write(packed)
        else:
            self.held.append(packed)

    def hold(self) -> None:
        """What is sent until `release` goes in one piece."""
        self.held = []

    def release(self) -> None:
        assert self.held is not None, "released, but not held"
        self.writer.write(b"".join(self.held))
        self.held = None


class Fed:
    """A request whose text arrives while it speaks."""

    def __init__(self, client: Client, message: protocol.Speak, family: Family):
        self.client, self.message, self.family = client, message, family
        self.text = OpenText(family.spec.tags)
        self.is_begun = False  # whether the engine was asked
        self.is_prepared = False  # whether it has the request
        self.waiting: list[tuple[str, bool]] = []  # what came before it had


class Bridge:
    """Between connections and an engine. What begins with _ runs on the event loop's thread; the rest may be
    called from any."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.status = protocol.Status("loading")
        self.models = protocol.Models([])
        self.clients: set[Client] = set()
        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(PROMPT_THREADS, "prompt", threads.use_one_thread)
        # Of their own: a recording, or a text that is normalised, takes a hundred times longer than a plain text, which does not
        # wait for them.
        self.slow_pool = ThreadPoolExecutor(PROMPT_THREADS, "slow-prompt", threads.use_one_thread)
        self.events: list[tuple[Client, str, Event]] = []  # of this turn: the engine's thread alone has them
        self.messages: dict[str, protocol.Speak] = {}  # of those whose prompts are not begun
        self.fed: dict[str, Fed] = {}  # of those whose text is on its way

    def listen(self, path: str) -> None:
        """Raises OSError."""
        threading.Thread(target=self.loop.run_forever, name="connections", daemon=True).start()
        asyncio.run_coroutine_threadsafe(
            asyncio.start_unix_server(self._connection, path), self.loop
        ).result()
        self.loop.call_soon_threadsafe(self._tell_stats)

    def tell(self, status: protocol.Status) -> None:
        self.loop.call_soon_threadsafe(self._tell, status)

    def open(self, engine: Engine, models: list[protocol.ModelInfo]) -> None:
        """From now on requests are taken."""
        engine.after_turn = self.flush
        self.engine = engine
        self.models = protocol.Models(models)
        self.tell(protocol.Status("ready", 1.0))

    def _tell(self, status: protocol.Status) -> None:
        self.status = status
        self._tell_state(self.clients)

    def _tell_state(self, clients: Iterable[Client]) -> None:
        """Who hears that the engine is ready has its numbers already."""
        stats = self._stats()
        for client in clients:
            client.send(self.models)
            if stats is not None:
                client.send(stats)
            client.send(self.status)

    def _tell_stats(self) -> None:
        """Once a second, for as long as the process lives."""
        self.loop.call_later(STATS_S, self._tell_stats)
        stats = self._stats()
        if stats is not None:
            for client in self.clients:
                client.send(stats)

    def _stats(self) -> protocol.Stats | None:
        """None before there is an engine."""
        return None if self.engine is None else msgspec.convert(self.engine.stats(), protocol.Stats)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(writer)
        self.clients.add(client)
        self._tell_state([client])
        try:
            async for message in protocol.read(reader, protocol.to_engine):
                match message:
                    case protocol.Speak() if message.request.get("is_open"):
                        self._open(client, message)
                    case protocol.Speak():
                        self._speak(client, message)
                    case protocol.Feed(id, text, is_last):
                        self._feed(id, text, is_last)
                    case protocol.Cancel(id):
                        self._cancel(client, id)
                    case protocol.Heard(id, frames):
                        self._heard(id, frames)
        except protocol.ProtocolError as error:
            log.error("protocol", error=str(error))
        finally:
            self.clients.discard(client)
            for id in tuple(client.open):
                self._cancel(client, id)
            writer.close()

    def _speak(self, client: Client, message: protocol.Speak) -> None:
        id = message.id
        engine = self.engine
        if engine is None:
            return client.send(
                protocol.Rejected(
                    id, "the engine is not ready", code="engine_not_ready", status=503, retry_after_s=1
                )
            )

        def deliver(event: Event) -> None:
            self.events.append((client, id, event))

        num_bytes = sum(len(reference.clip.samples) for reference in message.references)
        try:
            text_bytes = len(str(message.request.get("text", "")).encode())
            place = engine.accept(
                id,
                deliver,
                message.model,
                message.is_pinned,
                text_bytes,
                num_bytes,
                is_metered=True,
                is_flex=message.is_flex,
                speed=message.speed,
                is_timed=message.is_timed,
            )
        except (Full, ValueError) as error:
            return self._refuse(client, id, error)
        client.open.add(id)
        self.messages[id] = message
        is_slow = bool(message.references or message.request.get("normalize"))
        pool = self.slow_pool if is_slow else self.pool
        future = pool.submit(self.prepare, engine, place)
        future.add_done_callback(
            lambda future: self.loop.call_soon_threadsafe(self._prepared, client, id, future)
        )

    def _open(self, client: Client, message: protocol.Speak) -> None:
        """It is spoken from when some of its text is settled."""
        if self.engine is None:
            return self._speak(client, message)
        try:
            family = self.engine.family(message.model)
        except RequestError as error:
            return self._refuse(client, message.id, error)
        if not family.spec.feeds:
            return self._speak(client, message)  # which is refused
        client.open.add(message.id)
        self.fed[message.id] = Fed(client, message, family)
        self._feed(message.id, message.request.get("text", ""), is_last=False)

    def _feed(self, id: str, text: str, is_last: bool) -> None:
        """Unknown and ended requests are no error."""
        fed = self.fed.get(id)
        if fed is None:
            return
        settled = fed.text.more(text) + (fed.text.rest() if is_last else "")
        if not fed.is_begun and (settled or is_last):
            fed.is_begun = True
            fed.message.request["text"] = settled
            self._speak(fed.client, fed.message)
            settled = ""
        if settled or is_last:
            fed.waiting.append((settled, is_last))
        if fed.is_prepared:
            self._pass_on(id, fed)

    def _pass_on(self, id: str, fed: Fed) -> None:
        """The engine has the request, so it knows whose the text is."""
        assert self.engine is not None, f"{id} is prepared, and there is no engine"
        waiting, fed.waiting = fed.waiting, []
        for text, is_last in waiting:
            self.engine.feed(id, fed.family.tokenize(text), is_last)

    def flush(self) -> None:
        """On the engine's thread, after each turn: the event loop is woken once for all that it gave."""
        if self.events:
            events, self.events = self.events, []
            self.loop.call_soon_threadsafe(self._deliver_all, events)

    def _deliver_all(self, events: list[tuple[Client, str, Event]]) -> None:
        clients = {client for client, _, _ in events}
        for client in clients:
            client.hold()
        for client, id, event in events:
            self._deliver(client, id, event)
        for client in clients:
            client.release()

    def prepare(self, engine: Engine, place: Place) -> None:
        """In a pool. Who has left took the message along."""
        message = self.messages.pop(place.id, None)
        if message is not None:
            engine.prepare(place, lambda: request_of(message))

    def _prepared(self, client: Client, id: str, future: Future[None]) -> None:
        """The engine has the request, or has refused it, or its client has left."""
        error = future.exception()
        if error is not None and id in client.open:
            client.open.discard(id)
            self._refuse(client, id, error)
        elif (fed := self.fed.get(id)) is not None:
            fed.is_prepared = True
            self._pass_on(id, fed)

    def _refuse(self, client: Client, id: str, error: BaseException) -> None:
        if self.fed.pop(id, None) is not None:
            client.open.discard(id)
        match error:
            case Full(retry_after_s=retry_after_s):
                client.send(
                    protocol.Rejected(
                        id, str(error), code="engine_full", status=503, retry_after_s=retry_after_s
                    )
                )
            case RequestError(param=param):
                client.send(protocol.Rejected(id, str(error), param))
            case ValueError():
                client.send(protocol.Rejected(id, str(error)))
            case _:
                log.error("unexpected", id=id, exc_info=error)
                client.send(protocol.Failed(id, "an error in the engine; its log says more"))

    def _cancel(self, client: Client, id: str) -> None:
        client.open.discard(id)
        self.messages.pop(id, None)
        self.fed.pop(id, None)
        if self.engine is not None:
            self.engine.cancel(id)

    def _heard(self, id: str, frames: int) -> None:
        if self.engine is not None:
            self.engine.heard(id, frames)

    def _deliver(self, client: Client, id: str, event: Event) -> None:
        if id not in client.open:
            return
        match event:
            case Audio():
                client.send(protocol.Audio(id, pcm16(event.samples), event.frames))
            case Text():
                client.send(protocol.Text(id, event.text))
            case Spoken(text, start, stop):
                client.send(protocol.Spoken(id, text, start, stop))
            case Finished():
                client.open.discard(id)
                self.fed.pop(id, None)
                client.send(protocol.Finished(id, event.reason, event.frames, event.usage))
            case Failed():
                client.open.discard(id)
                self.fed.pop(id, None)
                client.send(protocol.Failed(id, event.message, STATUS.get(event.code, 500), event.code))


def request_of(message: protocol.Speak) -> Request:
    """Raises RequestError."""
    return Request(**message.request, references=tuple(map(reference_of, message.references)))


def reference_of(reference: protocol.Reference) -> Reference:
    # a copy can be written to, as tensors ask for
    samples = np.frombuffer(reference.clip.samples, "<f4").copy()
    kept_in = None if reference.kept_in is None else Path(reference.kept_in)
    clip = AudioClip(samples, reference.clip.sample_rate_hz, kept_in)
    return Reference(clip, reference.transcript, reference.speaker, reference.name)


def option_info(option: Option) -> protocol.OptionInfo:
    return protocol.OptionInfo(
        option.name,
        option.type.__name__,
        option.help,
        option.possible,
        option.default,
        option.range,
        option.choices,
    )


def describe(name: str, spec: Spec) -> protocol.ModelInfo:
    return protocol.ModelInfo(
        id=name,
        family=spec.family,
        variant=spec.variant,
        sample_rate_hz=spec.sample_rate_hz,
        frame_rate_hz=spec.frame_rate_hz,
        max_audio_s=spec.max_frames / spec.frame_rate_hz,
        voices=list(spec.voices),
        languages=list(spec.languages),
        modes=list(spec.modes),
        reference_s=spec.reference_s,
        max_references=spec.max_references,
        options=[option_info(option) for option in spec.options],
        licence=spec.licence,
        piece_s=spec.piece_s,
        feeds=spec.feeds,
        keeps_voice=spec.keeps_voice,
        mixes=spec.mixes,
    )


def load(
    models: dict[str, str], device: str | None, dtype: str | None, progress: Callable[[float, str], None]
) -> dict[str, Family]:
    """All of them or none: raises ValueError, which says whose directory is to blame where there are
    several."""

    @contextmanager
    def of(name: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"model {name!r}: {error}" if len(models) > 1 else str(error)) from None

    for name, directory in models.items():
        with of(name):
            zoo.find(directory)  # a look at each, before the first takes its minutes
    if device is None and torch.version.cuda is not None and not torch.cuda.is_available():
        log.info(f"torch was built for CUDA {torch.version.cuda} and finds no GPU: the CPU is used")
    families = {}
    for i, (name, directory) in enumerate(models.items()):
        progress(i / len(models), name if len(models) > 1 else "")
        with of(name):
            families[name] = zoo.load(directory, device=device, dtype=dtype)
    return families


def sizes(options: Options) -> tuple[int, int | None]:
    """How many slots a model has, and the bytes of the KV cache. On a GPU, what is not given follows from its free
    memory, before any of it is taken. Raises ValueError where it is too little."""
    device = options.device or "cuda"
    if not device.startswith("cuda") or not torch.cuda.is_available():  # whatever else it is, loading says
        return options.max_slots or cpu_slots(options), options.kv_bytes
    room = int((1 - SPARE_PART) * torch.cuda.mem_get_info(torch.device(device))[0])
    shapes = [zoo.load(path, "meta", options.dtype or "bfloat16") for path in options.models.values()]
    slots, kv_bytes = fit(shapes, room, options.max_slots)
    return slots, kv_bytes if options.kv_bytes is None else options.kv_bytes


def cpu_slots(options: Options) -> int:
    """A step of many costs little more than one of few, which is worth it where nobody listens: where somebody does, all
    must be made as fast as they are heard."""
    if options.policy != "throughput":
        return CPU_SLOTS
    shapes = [zoo.load(path, "meta", options.dtype or "float32") for path in options.models.values()]
    try:
        slots, _ = fit(shapes, int(CPU_PART * limits.memory_bytes()))
    except ValueError:  # not even one: loading says what is possible
        return CPU_SLOTS
    return max(slots, CPU_SLOTS)


def call_on_signal(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Calls `stop` on the loop's thread after SIGTERM, SIGINT or SIGHUP. To be called on the main thread.

    A handler would wait for the main thread, which may wait for a lock or for the device, and is not woken
    where the system interrupts another one. The byte that Python writes to the wake-up socket waits for
    nobody.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def read() -> None:
        reader.recv(16)
        stop()

    loop.call_soon_threadsafe(loop.add_reader, reader, read)
    signal.set_wakeup_fd(writer.detach())  # open for as long as the process lives
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


@contextmanager
def one_line_if_full() -> Iterator[None]:
    """Ends the process if what goes wrong within is a full disk: whatever compiles tells so in an exception of its own."""
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
    """Whether it says so, or what it came of."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):  # what a compiler printed
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=Options)
    logs.configure("engine")
    sys.setswitchinterval(SWITCH_S)
    if options.parent_fd is not None:
        exit_with_parent(options.parent_fd)
    bridge = Bridge()
    bridge.listen(options.socket)

    def tell(state: protocol.State, progress: float, detail: str) -> None:
        bridge.tell(protocol.Status(state, progress, detail))

    try:
        max_slots, kv_bytes = sizes(options)
        families = load(options.models, options.device, options.dtype, partial(tell, "loading"))
        for name, family in families.items():
            if family.spec.licence:
                sys.stderr.write(f"zoo: the weights of {name} are under a licence: {family.spec.licence}\n")
        with one_line_if_full():
            prepare_for_host(*families.values(), compile=options.compile)
        engine = Engine(
            families,
            max_slots=max_slots,
            kv_bytes=kv_bytes,
            saved_bytes=options.saved_bytes,
            policy=options.policy,
            report_lag=None if options.run_async else 0,
            max_waiting=options.max_waiting,
            max_reference_bytes=options.reference_bytes,
            max_ttfa_s=options.max_ttfa_s,
            max_unread_s=options.max_unread_s,
            max_stall_s=options.max_stall_s,
            compile=options.compile,
            is_deterministic=options.deterministic,
            codec=options.codec,
        )
    except ValueError as error:
        sys.stderr.write(f"zoo: {error}\n")
        sys.exit(REFUSED)
    if options.warm:
        with one_line_if_full():
            engine.warm(partial(tell, "warming"), cached)
    call_on_signal(bridge.loop, engine.stop)
    bridge.open(engine, [describe(name, family.spec) for name, family in families.items()])
    engine.run()


if __name__ == "__main__":
    main()
