"""Connections between the HTTP process and the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import structlog
import torch

from compile_cache import threads
from serving import protocol
from serving.audio.pcm import pcm16
from serving.engine.engine import Engine
from serving.engine.events import Audio, Event, Failed, Finished, Spoken, Text
from serving.engine.intake import Full
from serving.engine.job import QueuedRequest
from serving.engine.lifecycle import OUT_OF_MEMORY
from serving.engine.wire import NotEncoded, is_quick, request_of
from zoo.contract import Family
from zoo.request import RequestError
from zoo.text.open_text import OpenText

# By a failure's code. 422: the request was understood, and asking for it again would end the same way.
STATUS = {
    "cannot_continue": 400,
    "no_audio": 422,
    "engine_stopped": 503,
    "engine_full": 503,
    "out_of_memory": 503,
    "stalled": 408,
}
PROMPT_THREADS = 2
STATS_S = 1.0  # from one report of figures to the next

log = structlog.get_logger()


class Client:
    """A connection, and which of its requests it still wants to hear of."""

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
        """Collect messages until `release` sends them in one piece."""
        self.held = []

    def release(self) -> None:
        assert self.held is not None, "released, but not held"
        self.writer.write(b"".join(self.held))
        self.held = None


class OpenRequest:
    """A request whose text arrives while the model speaks. message: until the engine is asked; its recordings
    take megabytes. waiting: text that came before the engine had the request."""

    def __init__(self, client: Client, message: protocol.Speak, family: Family):
        self.client = client
        self.message: protocol.Speak | None = message
        self.family = family
        self.text = OpenText(family.spec.tags)
        self.is_prepared = False  # whether it has the request
        self.waiting: list[tuple[str, bool]] = []


class Bridge:
    """Between connections and an engine. Methods that begin with _ run on the event loop's thread; any thread
    may call the others."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.status = protocol.Status("loading")
        self.models = protocol.Models([])
        self.clients: set[Client] = set()
        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(PROMPT_THREADS, "prompt", threads.use_one_thread)
        # A recording, or a text that is normalised, takes a hundred times longer than a plain text, which
        # must not wait for it.
        self.slow_pool = ThreadPoolExecutor(PROMPT_THREADS, "slow-prompt", threads.work_in_background)
        self.events: list[tuple[Client, str, Event]] = []  # of this iteration, on the engine's thread
        self.messages: dict[str, protocol.Speak] = {}  # of requests whose prompts are not begun
        self.fed: dict[str, OpenRequest] = {}

    def listen(self, path: str) -> None:
        """Raises OSError."""
        threading.Thread(target=self.loop.run_forever, name="connections", daemon=True).start()
        server = asyncio.start_unix_server(self._connection, path)
        asyncio.run_coroutine_threadsafe(server, self.loop).result()
        self.loop.call_soon_threadsafe(self._tell_stats)

    def tell(self, status: protocol.Status) -> None:
        self.loop.call_soon_threadsafe(self._tell, status)

    def open(self, engine: Engine, models: list[protocol.ModelInfo]) -> None:
        """Accept requests from now on."""
        engine.after_turn = self.flush
        self.engine = engine
        self.models = protocol.Models(models)
        self.tell(protocol.Status("ready", 1.0))

    # the engine's state

    def _tell(self, status: protocol.Status) -> None:
        self.status = status
        self._tell_state(self.clients)

    def _tell_state(self, clients: Iterable[Client]) -> None:
        """The status comes last, so a client that hears of a ready engine has its figures already."""
        stats = self._stats()
        for client in clients:
            client.send(self.models)
            if stats is not None:
                client.send(stats)
            client.send(self.status)

    def _tell_stats(self) -> None:
        """Send the figures, and again in a second, for as long as the process lives."""
        self.loop.call_later(STATS_S, self._tell_stats)
        stats = self._stats()
        if stats is not None:
            for client in self.clients:
                client.send(stats)

    def _stats(self) -> protocol.Stats | None:
        """Return the figures; None before there is an engine."""
        return None if self.engine is None else msgspec.convert(self.engine.stats(), protocol.Stats)

    # messages

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(writer)
        self.clients.add(client)
        self._tell_state([client])
        try:
            async for message in protocol.read(reader, protocol.to_engine):
                match message:
                    case protocol.Speak() if message.request.is_open:
                        self._open(client, message)
                    case protocol.Speak():
                        self._speak(client, message)
                    case protocol.Feed(id, text, is_last):
                        self._feed(id, text, is_last)
                    case protocol.Cancel(id):
                        self._cancel(client, id)
                    case protocol.Interrupt(id):
                        self._interrupt(id)
                    case protocol.Heard(id, frames):
                        self._consume(id, frames)
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
            why = "the engine is not ready"
            return client.send(
                protocol.Rejected(id, why, code="engine_not_ready", status=503, retry_after_s=1)
            )

        def deliver(event: Event) -> None:
            self.events.append((client, id, event))

        text_bytes = len(message.request.text.encode())
        # Stored recordings are read by the threads that encode them, so at most PROMPT_THREADS at a time.
        reference_bytes = sum(clip.num_bytes for clip in message.recordings)
        try:
            queued = engine.accept(id, deliver, message.model, message.listener, text_bytes, reference_bytes)
        except (Full, ValueError) as error:
            return self._refuse(client, id, error)
        client.open.add(id)
        is_slow = bool(reference_bytes or message.request.normalize)
        self._prepare(client, queued, message, is_slow)

    def _prepare(self, client: Client, queued: QueuedRequest, message: protocol.Speak, is_slow: bool) -> None:
        """Have a prompt built. A stored voice is assumed to be encoded; otherwise its request moves to the
        slow pool."""
        assert self.engine is not None, f"{queued.id} was accepted, and there is no engine"
        self.messages[queued.id] = message
        again = None if is_slow else message
        pool = self.slow_pool if is_slow else self.pool
        future = pool.submit(self.prepare, self.engine, queued, is_slow)
        future.add_done_callback(
            lambda future: self.loop.call_soon_threadsafe(self._prepared, client, queued, future, again)
        )

    def _open(self, client: Client, message: protocol.Speak) -> None:
        """Begin a request whose text arrives later. It is spoken once some of its text is settled."""
        if self.engine is None:
            return self._speak(client, message)
        try:
            family = self.engine.family(message.model)
        except RequestError as error:
            return self._refuse(client, message.id, error)
        if not family.spec.feeds:
            return self._speak(client, message)  # which is refused
        client.open.add(message.id)
        self.fed[message.id] = OpenRequest(client, message, family)
        self._feed(message.id, message.request.text, is_last=False)

    def _feed(self, id: str, text: str, is_last: bool) -> None:
        """Unknown and ended requests are no error."""
        fed = self.fed.get(id)
        if fed is None:
            return
        settled = fed.text.more(text) + (fed.text.rest() if is_last else "")
        if fed.message is not None and (settled or is_last):
            fed.message.request.text = settled
            self._speak(fed.client, fed.message)
            fed.message = None
            settled = ""
        if settled or is_last:
            fed.waiting.append((settled, is_last))
        if fed.is_prepared:
            self._pass_on(id, fed)

    def _pass_on(self, id: str, fed: OpenRequest) -> None:
        """Give the engine the text that waits: it has the request by now."""
        assert self.engine is not None, f"{id} is prepared, and there is no engine"
        waiting = fed.waiting
        fed.waiting = []
        for text, is_last in waiting:
            self.engine.feed(id, fed.family.tokenize(text), is_last)

    def prepare(self, engine: Engine, queued: QueuedRequest, is_slow: bool) -> None:
        """Build a prompt, in a pool. If the client has left, its message is gone. Raises RequestError, and
        NotEncoded unless `is_slow`."""
        message = self.messages.pop(queued.id, None)
        if message is None:
            return
        token = is_quick.set(not is_slow)
        try:
            engine.prepare(queued, lambda: request_of(message))
        finally:
            is_quick.reset(token)

    def _prepared(
        self, client: Client, queued: QueuedRequest, future: Future[None], again: protocol.Speak | None
    ) -> None:
        """The engine has the request, or has refused it, or its client has left, or its voice must be encoded
        first, and `again` is the request."""
        id = queued.id
        error = future.exception()
        if again is not None and isinstance(error, NotEncoded):
            if id in client.open:
                self._prepare(client, queued, again, is_slow=True)
            return
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
            case Full(retry_after_s=retry_s):
                client.send(
                    protocol.Rejected(id, str(error), code="engine_full", status=503, retry_after_s=retry_s)
                )
            case torch.OutOfMemoryError():
                log.error("out_of_memory", id=id, doing="prompt")
                client.send(
                    protocol.Rejected(id, OUT_OF_MEMORY, code="out_of_memory", status=503, retry_after_s=1)
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

    def _interrupt(self, id: str) -> None:
        """Unlike `_cancel`, the client still wants the request's last message."""
        self.messages.pop(id, None)
        if self.engine is not None:
            self.engine.cancel(id)

    def _consume(self, id: str, frames: int) -> None:
        if self.engine is not None:
            self.engine.consume(id, frames)

    # events

    def flush(self) -> None:
        """On the engine's thread, after each iteration: wake the event loop once for all events of it."""
        if self.events:
            events = self.events
            self.events = []
            self.loop.call_soon_threadsafe(self._deliver_all, events)

    def _deliver_all(self, events: list[tuple[Client, str, Event]]) -> None:
        clients = {client for client, _, _ in events}
        for client in clients:
            client.hold()
        for client, id, event in events:
            self._deliver(client, id, event)
        for client in clients:
            client.release()

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
                self._end(client, id)
                client.send(
                    protocol.Finished(id, event.reason, event.frames, event.usage, answer=event.answer)
                )
            case Failed(message, code, retry_after_s):
                self._end(client, id)
                client.send(protocol.Failed(id, message, STATUS.get(code, 500), code, retry_after_s))

    def _end(self, client: Client, id: str) -> None:
        client.open.discard(id)
        self.fed.pop(id, None)
