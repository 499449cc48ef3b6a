"""Sends requests to replicas. One that a replica refuses, or that is lost before its client has heard
anything, goes to another replica with the same seed, and the client does not notice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field

import structlog

from serving import protocol
from serving.cluster.link import Address, Link
from serving.cluster.routing import Ask, Homes, ask_of, ranked
from serving.engine_client import Away

# Of Ray Serve: the name of the replica that the router chose, which keeps a place for as long as the context
# is open.
Choose = Callable[[Ask], AbstractAsyncContextManager[str]]

CHOOSE_S = 5.0
WAIT_S = 10.0  # for a ready replica: one may be new, or silent for a moment
LOOK_S = 1.0  # how often silent replicas and drained ones are looked for
PAUSE_S = 0.02  # between two offers of a request
RETRY_S = 1.0  # for a client, if no replica is ready
NOT_READY = "engine_not_ready"

log = structlog.get_logger()


@dataclass
class Underway:
    """A request that is being answered. fed: the text that came after it, as long as nothing was heard.
    replicas: those it was offered to."""

    message: protocol.Speak
    send: Callable[[protocol.Outcome], None]
    fed: list[protocol.Feed] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    link: Link | None = None
    is_heard: bool = False
    is_interrupted: bool = False

    def feed(self, more: protocol.Feed) -> None:
        if not self.is_heard:
            self.fed.append(more)
        if self.link is not None:
            self.link.feed(more.id, more.text, more.is_last)

    def pass_on(self, outcome: protocol.Outcome) -> None:
        """Send an outcome to the client. Audio without sound is only acknowledged: with nothing sent, the
        request can still go to another replica."""
        if isinstance(outcome, protocol.Audio) and not outcome.pcm and not self.is_heard:
            assert self.link is not None, f"{outcome.id} has audio and no replica"
            return self.link.heard(outcome.id, outcome.frames)
        if isinstance(outcome, protocol.Finished | protocol.Failed):
            outcome.replicas = self.replicas
        self.is_heard = True
        self.fed.clear()
        self.send(outcome)

    def is_to_be_tried_again(self, outcome: protocol.Outcome) -> bool:
        """Return whether another replica may do better, and the client has heard nothing."""
        if isinstance(outcome, protocol.Rejected):
            return outcome.status == 503
        is_lost = isinstance(outcome, protocol.Failed) and outcome.code == "engine_stopped"
        return is_lost and not self.is_heard


class Dispatcher:
    """All replicas and requests of a gateway. links: by the replica's name."""

    def __init__(self, choose: Choose):
        self.choose = choose
        self.links: dict[str, Link] = {}
        self.running: dict[str, asyncio.Task[None]] = {}  # a link's connection
        self.open: dict[str, Underway] = {}
        self.promised: dict[str, str] = {}  # the replica of each request that is being routed
        self.homes = Homes()
        self.num_resent = 0
        self.num_lost = 0  # engines of replicas that have left

    def route(self, ask: Ask) -> list[str]:
        """Return the replicas that a request may go to, the soonest first. Until it is sent, it counts as an
        open request of the first one: others are routed in the meantime. May be called from any thread."""
        names = self.rank(ask)
        if names:
            self.promised[ask.id] = names[0]
        return names

    def rank(self, ask: Ask) -> list[str]:
        promised = Counter(list(self.promised.values()))
        loads = [(name, link.load) for name, link in list(self.links.items())]
        for name, load in loads:
            load.num_open += promised[name]
        return ranked(ask, loads)

    # replicas

    @property
    def num_restarts(self) -> int:
        """How many engines of replicas were lost."""
        return self.num_lost + sum(link.num_restarts for link in self.links.values())

    def update(self, replicas: Mapping[str, Address]) -> None:
        """Connect to new replicas. One that is gone from the list keeps its open requests."""
        for name, link in self.links.items():
            link.is_draining = name not in replicas
        for name, address in replicas.items():
            if name not in self.links:
                log.info("replica", name=name, address=f"{address.host}:{address.port}")
                self.links[name] = link = Link(address)
                self.running[name] = asyncio.create_task(link.run())

    async def look_after(self) -> None:
        """Drop silent replicas' connections, and forget drained ones. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name, link in list(self.links.items()):
                link.drop_if_silent()
                if link.is_draining and not link.load.num_open:
                    await self._forget(name)

    async def _forget(self, name: str) -> None:
        log.info("replica left", name=name)
        self.num_lost += self.links.pop(name).num_restarts
        task = self.running.pop(name)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def close(self) -> None:
        for name in tuple(self.links):
            await self._forget(name)

    # requests

    def feed(self, more: protocol.Feed) -> None:
        if (request := self.open.get(more.id)) is not None:
            request.feed(more)

    def interrupt(self, id: str) -> None:
        if (request := self.open.get(id)) is not None:
            request.is_interrupted = True  # for a replica that it is still to be sent to
            if request.link is not None:
                request.link.interrupt(id)

    def heard(self, id: str, frames: int) -> None:
        request = self.open.get(id)
        if request is not None and request.link is not None:
            request.link.heard(id, frames)

    async def answer(self, message: protocol.Speak, send: Callable[[protocol.Outcome], None]) -> None:
        """Answer a request. Cancelling this task cancels it at its replica."""
        request = self.open[message.id] = Underway(message, send)
        try:
            await self._answer(request)
        finally:
            del self.open[message.id]

    async def _answer(self, request: Underway) -> None:
        end_s = time.monotonic() + WAIT_S
        while (refusal := await self._offer(request)) is not None:
            is_over = time.monotonic() > end_s
            if is_over or not isinstance(refusal, protocol.Rejected) or refusal.code != NOT_READY:
                return request.send(refusal)
            await asyncio.sleep(PAUSE_S)

    async def _offer(self, request: Underway) -> protocol.Outcome | None:
        """Offer a request to each ready replica in turn. Return a refusal if none of them answered it."""
        avoided: set[str] = set()
        refusals: list[protocol.Outcome] = []
        while self.rank(ask := self.homes.fill(ask_of(request.message, avoided))):
            self.num_resent += bool(avoided)
            refusal = await self._try(request, ask, avoided)
            if refusal is None:
                return None
            refusals.append(refusal)
        return earliest(refusals) or nobody(request.message.id)

    async def _try(self, request: Underway, ask: Ask, avoided: set[str]) -> protocol.Outcome | None:
        """Let a replica answer. Return its refusal if another one should try, and add its name to
        `avoided`."""
        async with AsyncExitStack() as place:
            try:
                async with asyncio.timeout(CHOOSE_S):
                    name = await place.enter_async_context(self.choose(ask))
            except TimeoutError:
                avoided.update(self.links)  # none of them takes it
                return nobody(request.message.id)
            finally:
                self.promised.pop(ask.id, None)
            avoided.add(name)
            link = self.links.get(name)
            if link is None:
                return nobody(request.message.id)
            link.load.learn(ask.voice)
            self.homes.learn(ask.conversation, name)
            request.replicas.append(name)
            return await self._relay(request, link)

    async def _relay(self, request: Underway, link: Link) -> protocol.Outcome | None:
        try:
            with link.speak(request.message) as inbox:
                request.link = link
                for more in request.fed:
                    link.feed(more.id, more.text, more.is_last)
                if request.is_interrupted:
                    link.interrupt(request.message.id)
                while True:
                    outcome = await inbox.get()
                    if request.is_to_be_tried_again(outcome):
                        return outcome
                    request.pass_on(outcome)
                    if isinstance(outcome, protocol.Finished | protocol.Failed | protocol.Rejected):
                        return None
        except Away:
            return nobody(request.message.id)
        finally:
            request.link = None


def nobody(id: str) -> protocol.Rejected:
    return protocol.Rejected(id, "no replica is ready", code=NOT_READY, status=503, retry_after_s=RETRY_S)


def earliest(refusals: list[protocol.Outcome]) -> protocol.Outcome | None:
    """Return the full replica's refusal that lets the client come back soonest, or else the last outcome."""
    full = [each for each in refusals if isinstance(each, protocol.Rejected) and each.code == "engine_full"]
    if full:
        return min(full, key=lambda each: each.retry_after_s or 0.0)
    return refusals[-1] if refusals else None
