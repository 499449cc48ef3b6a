"""Run a soak: record the first answers, warm up, load, kill. The results are in `Run` also if it is
interrupted.

first answers ─> warm-up ─> idle ─> load, 0.1 to 5 times the capacity ─> idle ─> kills under load ─> idle
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

from serving.tools.load.plan import poisson
from tests.soak.answers import BROKEN, READY_S, UNAVAILABLE, Refused, Wrong
from tests.soak.cases import KEPT
from tests.soak.clients import WITHIN_S, Client, Material
from tests.soak.plan import ROUND_S, Plan
from tests.soak.server import Sample, Soaked, sample
from tests.soak.strikes import STRIKE

MAX_IN_FLIGHT = 150
NUM_WARMUP = 16  # requests at once, one after the other
MAX_SAMPLES = 3600
IDLE_S = 30.0  # a server that gets no requests must be idle within this time
IDLE_SAMPLES = 3  # in a row
PAUSED_S = 2.0  # between SIGSTOP and SIGCONT
BEFORE_S = 2.0  # between two strikes, at least

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """A request as its client saw it. wrong: why it counts as a failure of the server, or empty."""

    kind: str
    index: int
    part: str
    level: float
    at_s: float
    how: str
    wrong: str = ""
    ttfa_s: float | None = None


@dataclass(frozen=True)
class Strike:
    """A signal to a process. back_s: until the server was ready again; None: it was not."""

    name: str
    at_s: float
    back_s: float | None


@dataclass
class Run:
    """What a soak has seen so far."""

    plan: Plan
    capacity: float = 0.0  # requests a second
    ended: list[Ended] = field(default_factory=list)
    num_unsent: int = 0  # requests that had to be left out, because too many were in flight
    samples: list[Sample] = field(default_factory=list)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)  # begin and end
    idle: dict[str, Sample | None] = field(default_factory=dict)  # after each part
    files: dict[str, list[str]] = field(default_factory=dict)  # on disk after each part
    strikes: list[Strike] = field(default_factory=list)
    num_errors: dict[str, int] = field(default_factory=dict)  # lines of the log, by part
    is_complete: bool = False


class Soak:
    def __init__(self, server: Soaked, client: Client, run: Run, say: Say):
        self.server, self.client, self.run, self.say = server, client, run, say
        self.plan = run.plan
        self.began_s = time.monotonic()
        self.part, self.level = "", 0.0
        self.indexes = itertools.count()
        self.open: set[asyncio.Task[None]] = set()
        self.crashes: list[BaseException] = []

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    async def all_of_it(self) -> None:
        watching = asyncio.create_task(self.watch())
        try:
            for name, part in (("warm-up", self.warm_up), ("load", self.load), ("kills", self.kill)):
                with self.in_part(name):
                    await part()
                    await self.drain()
                    await self.delete_left()
                self.run.idle[name] = await self.settle(self.run.idle.get("warm-up"))
                self.run.files[name] = sorted(self.server.disk_files())
            self.run.is_complete = True
        finally:
            watching.cancel()
            for task in self.open:
                task.cancel()
            await asyncio.gather(watching, *self.open, return_exceptions=True)

    @contextmanager
    def in_part(self, name: str) -> Iterator[None]:
        self.part, began_s, num_before = name, self.now_s, self.server.num_errors
        self.say(f"{name}: from {began_s:.0f} s")
        try:
            yield
        finally:
            self.run.parts[name] = began_s, self.now_s
            self.run.num_errors[name] = self.server.num_errors - num_before

    # --- the parts ---

    async def warm_up(self) -> None:
        """Keep requests of all kinds in flight, one after the other, and measure the capacity."""
        end_s = self.now_s + self.plan.warmup_s
        self.level = 1.0

        async def follow() -> None:
            while self.now_s < end_s:
                await self.request(next(self.indexes))

        await asyncio.gather(*(follow() for _ in range(NUM_WARMUP)))
        served = [one for one in self.run.ended if one.at_s <= end_s and one.how != "busy"]
        self.run.capacity = len(served) / self.plan.warmup_s
        self.say(f"capacity: {self.run.capacity:.1f} requests/s")

    async def load(self) -> None:
        for number, (level, duration_s) in enumerate(self.plan.rungs):
            await self.offer(level, duration_s, number)

    async def kill(self) -> None:
        """Send signals to the server's processes under load, as often as there is time for."""

        async def load() -> None:
            for number in itertools.count(len(self.plan.rungs)):
                await self.offer(1.0, BEFORE_S, number)

        loading = asyncio.create_task(load())
        kills_s = self.plan.kills_s(self.now_s)
        num_rounds = max(1, int(kills_s // ROUND_S))
        begin_s, strikes = self.now_s, self.plan.strikes * num_rounds
        try:
            for index, (name, number) in enumerate(strikes):
                await asyncio.sleep(max(BEFORE_S, begin_s + index * kills_s / len(strikes) - self.now_s))
                await self.strike(name, number)
            await asyncio.sleep(max(BEFORE_S, begin_s + kills_s - self.now_s))
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def strike(self, name: str, number: signal.Signals) -> None:
        at_s = self.now_s
        if name in STRIKE:
            is_back = await STRIKE[name](self, number)
        else:
            is_back = await self.strike_child(name, number)
        back_s = self.now_s - at_s if is_back else None
        self.run.strikes.append(Strike(f"{number.name} to {name}", at_s, back_s))
        self.say(
            f"{number.name} to {name}: " + ("not back" if back_s is None else f"back after {back_s:.1f} s")
        )

    async def strike_child(self, name: str, number: signal.Signals) -> bool:
        """Send a signal to a child of the supervisor. Return whether the server is ready again."""
        self.server.find_children()
        pid = self.server.pids[name]
        os.kill(pid, number)
        if number is signal.SIGSTOP:
            await asyncio.sleep(PAUSED_S)
            os.kill(pid, signal.SIGCONT)
        is_back = await self.until(lambda: number is signal.SIGSTOP or self.is_replaced(name, pid), READY_S)
        return is_back and await self.wait_ready()

    def is_replaced(self, name: str, pid: int) -> bool:
        return self.server.processes().get(name, pid) != pid

    async def wait_ready(self) -> bool:
        end_s = self.now_s + READY_S
        while self.now_s < end_s:
            try:
                await self.client.called("GET", "/ready")
                return True
            except UNAVAILABLE:
                await asyncio.sleep(0.1)
        return False

    async def until(self, fact: Callable[[], bool], seconds: float) -> bool:
        end_s = self.now_s + seconds
        while not fact():
            if self.now_s > end_s:
                return False
            await asyncio.sleep(0.05)
        return True

    # --- requests ---

    async def offer(self, level: float, duration_s: float, number: int) -> None:
        """Send requests at a multiple of the capacity, whether the server answers or not."""
        self.level, began_s = level, self.now_s
        rate = level * max(self.run.capacity, 0.1)
        for at_s in poisson(rate, 1000 * self.plan.seed + number, 0, duration_s, None):
            await asyncio.sleep(began_s + at_s - self.now_s)
            index = next(self.indexes)
            if len(self.open) >= MAX_IN_FLIGHT:
                self.run.num_unsent += 1
                continue
            task = asyncio.create_task(self.request(index))
            self.open.add(task)
            task.add_done_callback(self.close)
        await asyncio.sleep(began_s + duration_s - self.now_s)

    def close(self, task: asyncio.Task[None]) -> None:
        self.open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashes.append(error)

    async def request(self, index: int) -> None:
        """Send request number `index`, and note how it ended."""
        name, kind, chance = self.plan.request(index)
        part, level = self.part, self.level
        how, wrong, ttfa_s = "", "", None
        may_fail = part == "kills"
        try:
            async with asyncio.timeout(WITHIN_S):
                heard = await kind.act(self.client, chance, index)
            how, ttfa_s = heard.how, heard.ttfa_s
        except Refused as refused:
            how = "busy" if refused.is_busy else f"error {refused.status} {refused.code}"
            is_right = may_fail and (refused.is_stopped or refused.code in kind.in_kills)
            wrong = "" if refused.is_busy or is_right else str(refused)
        except aiohttp.WSServerHandshakeError as error:
            how, wrong = "busy", "" if error.status == 503 else f"handshake: {error.status}"
        except BROKEN as error:
            how, wrong = "broken", "" if may_fail else f"{type(error).__name__}: {error}"
        except TimeoutError:
            how, wrong = "no end", f"no end within {WITHIN_S:g} s"
        except (Wrong, ValueError, KeyError, TypeError) as error:
            how, wrong = "wrong", f"{type(error).__name__}: {error}"
        self.run.ended.append(Ended(name, index, part, level, self.now_s, how, wrong, ttfa_s))

    async def drain(self) -> None:
        """Wait for all requests in flight. Each of them has its own limit. Raises a client's own error."""
        self.level = 0.0
        while self.open:
            await asyncio.wait(self.open)
        if self.crashes:
            raise self.crashes[0]

    async def delete_left(self) -> None:
        """Delete the voices and the works that interrupted clients have left."""
        await self.wait_ready()
        if self.client.material.volume is not None:
            await self.client.library.delete_all()
        for name in await self.voices():
            if name not in KEPT:
                await self.client.called("DELETE", f"/v1/audio/voices/{name}")

    async def voices(self) -> list[str]:
        async with self.client.session.get(self.client.url + "/v1/audio/voices") as answer:
            listed = await answer.json()
        return [voice["name"] for voice in listed["data"] if is_uploaded(voice)]

    # --- the server's state ---

    async def watch(self) -> None:
        every_s = max(1.0, self.plan.duration_s / MAX_SAMPLES)
        while True:
            await asyncio.sleep(every_s)
            if (found := await self.look()) is not None:
                self.run.samples.append(found)

    async def look(self) -> Sample | None:
        """Return the server's state, or None while it cannot say."""
        try:
            metrics = (await self.client.called("GET", "/metrics")).decode()
        except UNAVAILABLE:
            return None
        return sample(self.server, metrics, self.now_s, self.level)

    async def settle(self, expected: Sample | None) -> Sample | None:
        """Return the state of the idle server. It waits until the server holds no more than expected,
        and no more from sample to sample. Returns the last one if that takes too long."""
        end_s = self.now_s + IDLE_S
        last, num_alike = None, 0
        while self.now_s < end_s:
            await asyncio.sleep(1.0)
            found = await self.look()
            is_alike = found is not None and found.is_idle and not (last and exceeding(last, found))
            num_alike = num_alike + 1 if is_alike else 0
            last = found
            if num_alike >= IDLE_SAMPLES and not (expected and exceeding(expected, found)):
                break
        return last


def is_uploaded(voice: dict[str, str]) -> bool:
    """Return whether a voice in the server's list was uploaded."""
    return voice["type"] == "audio_sample"


def exceeding(before: Sample, after: Sample | None) -> list[str]:
    """Return what the server holds more of than before. A process that has just started may hold less."""
    was, now = counts(before), counts(after) if after else {}
    return [
        f"{name} {was.get(name, 0):g}, then {held:g}" for name, held in now.items() if held > was.get(name, 0)
    ]


def counts(found: Sample) -> dict[str, float]:
    """Return what an idle server must hold no more of than before, by name."""
    held = {
        f"{process}: {name}": float(getattr(of, name))
        for process, of in found.processes.items()
        for name in ("descriptors", "sockets")
    }
    requests = {f"requests {state}": number for state, number in found.requests.items()}
    more = {"sessions": found.sessions, "pages": found.pages, "works": found.works}
    more |= {"models on demand": float(found.models_on_demand), "files": float(found.files)}
    return {**held, **requests, **more}


def soaked(server: Soaked, material: Material, run: Run, say: Say) -> None:
    """Fill `run`. It stays incomplete if the server is lost, or if a KeyboardInterrupt is raised."""

    async def all_of_it() -> None:
        async with Client(server.url, material) as client:
            await Soak(server, client, run, say).all_of_it()

    try:
        asyncio.run(all_of_it())
    except UNAVAILABLE as error:
        say(f"the server is lost: {error!r}")
