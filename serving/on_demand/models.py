"""All models on demand: their states, and the requests that use them or wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from serving import protocol
from serving.engine_client import Away, EngineClient
from serving.on_demand.decide import Look, decide
from serving.on_demand.process import EngineProcess, NotLoaded
from serving.on_demand.survey import SurveyedModel
from serving.protocol import ModelState
from serving.settings import Limits, OnDemand

FAILED_S = 10.0  # after a failure, requests get its error at once for so long
USUAL_RETRY_S = 10.0  # until the model was loaded once

Start = Callable[[SurveyedModel], EngineProcess]

log = structlog.get_logger()


class Refused(Exception):
    """A request cannot be answered; `rejected` tells the client why."""

    def __init__(
        self, id: str, message: str, code: str, retry_after_s: float | None = None, status: int = 503
    ):
        super().__init__(message)
        self.rejected = protocol.Rejected(id, message, None, code, status, retry_after_s)


@dataclass(eq=False)
class Underway:
    """A request that is being answered. fed: the text that came before its model was loaded."""

    message: protocol.Speak
    send: Callable[[protocol.Outcome], None]
    fed: list[protocol.Feed] = field(default_factory=list)
    client: EngineClient | None = None
    is_interrupted: bool = False

    @property
    def recorded_bytes(self) -> int:
        return sum(clip.num_bytes for clip in self.message.recordings)

    def feed(self, more: protocol.Feed) -> None:
        if self.client is None:
            self.fed.append(more)
        else:
            self.client.feed(more.id, more.text, more.is_last)

    async def answer(self, client: EngineClient) -> None:
        """Pass the engine's answer on. Raises Away."""
        with client.speak(self.message) as inbox:
            self.client = client
            self.message.references, self.message.turns = [], []  # the engine has them
            for more in self.fed:
                client.feed(more.id, more.text, more.is_last)
            self.fed.clear()
            while True:
                outcome = await inbox.get()
                self.send(outcome)
                if isinstance(outcome, protocol.Finished | protocol.Failed | protocol.Rejected):
                    return


class Model:
    """A model and its requests. client: of its engine, while it is loaded."""

    def __init__(self, surveyed: SurveyedModel):
        self.surveyed = surveyed
        self.state = ModelState(planned_bytes=surveyed.planned_bytes)
        self.client: EngineClient | None = None
        self.waiting: dict[Underway, float] = {}  # since when
        self.num_open = 0
        self.idle_s: float | None = None  # since when no request uses it
        self.failed_s: float | None = None  # when it could not be loaded
        self.began_s = 0.0  # when the current load began
        self.leaving = asyncio.Event()  # it is to be unloaded
        self.changed = asyncio.Event()

    @property
    def name(self) -> str:
        return self.surveyed.info.id

    @property
    def info(self) -> protocol.ModelInfo:
        return self.surveyed.info

    @property
    def look(self) -> Look:
        asked_s = min(self.waiting.values(), default=None)
        idle_s = None if self.num_open else self.idle_s
        return Look(self.name, self.state.stage, self.state.planned_bytes, asked_s, idle_s)

    def show(self, **changes: object) -> None:
        """Change the state, and wake the requests that wait."""
        before = self.state
        self.state = msgspec.structs.replace(before, **changes)
        if self.state != before:
            self.wake()

    def leave(self) -> None:
        """Take no more requests, and let the engine end."""
        self.client = None
        self.show(stage="unloading", progress=0.0)
        self.leaving.set()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def retry_after_s(self, now_s: float) -> float:
        """Return after how long the model may be loaded: as long as the last time."""
        if not self.state.loads:
            return USUAL_RETRY_S
        usual_s = self.state.load_s / self.state.loads
        is_loading = self.state.stage in ("loading", "warming")
        return max(1.0, usual_s - (now_s - self.began_s if is_loading else 0.0))


class Models:
    """Loads a model when it is asked for, and unloads it when it is idle. After `open`, `keep` does so until
    cancelled, and `answer` waits for it.

    reference_memory_bytes: of the recordings of requests that wait for one model. start: makes the engine
    process of a model.
    """

    def __init__(
        self,
        settings: OnDemand,
        limits: Limits,
        reference_memory_bytes: int,
        start: Start,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.status = protocol.Status("loading")
        self.models: dict[str, Model] = {}
        self.room_bytes = 0  # of all loaded models
        self.settings, self.limits = settings, limits
        self.reference_memory_bytes = reference_memory_bytes
        self.start, self.clock = start, clock
        self.underway: dict[str, Underway] = {}
        self.running: dict[str, asyncio.Task[None]] = {}  # the models that have a process
        self.news = asyncio.Event()  # `keep` is to decide again

    def tell(self, status: protocol.Status) -> None:
        """Note how far the survey of the models is."""
        self.status = status

    def open(self, surveyed: list[SurveyedModel], room_bytes: int) -> None:
        """Accept requests for these models from now on. room_bytes: of the device, unless the settings say."""
        self.models = {each.info.id: Model(each) for each in surveyed}
        self.room_bytes = room_bytes if self.settings.memory_bytes is None else self.settings.memory_bytes
        for model in self.models.values():
            if model.state.planned_bytes > self.room_bytes:
                log.warning("model too large", model=model.name, why=self._too_large(model))
        self.status = protocol.Status("ready", 1.0)

    # loading and unloading

    async def keep(self) -> None:
        """Load and unload models until cancelled."""
        while True:
            self.news.clear()
            looks = [model.look for model in self.models.values()]
            decision = decide(looks, self.room_bytes, self.settings.keep_alive_s, self.clock())
            for name in decision.unload:
                self.models[name].leave()
            if decision.load is not None:
                self._load(self.models[decision.load])
            wait_s = None if decision.next_s is None else max(decision.next_s - self.clock(), 0.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.news.wait()

    def _load(self, model: Model) -> None:
        model.leaving = asyncio.Event()
        model.began_s = self.clock()
        model.show(stage="loading", progress=0.0, problem="")
        log.info("loading", model=model.name, planned_mib=model.state.planned_bytes >> 20)
        task = self.running[model.name] = asyncio.create_task(self._run(model))
        task.add_done_callback(lambda task: self._ended(model, task))

    async def _run(self, model: Model) -> None:
        """Run the engine of a model until it is to be unloaded, or dies."""
        process = self.start(model.surveyed)
        async with process.running() as ending:
            try:
                await process.ready(ending, lambda status: self._progress(model, status))
            except NotLoaded as error:
                log.error("model not loaded", model=model.name, error=str(error))
                model.failed_s = self.clock()
                # Clients need not know where the directory lies.
                problem = str(error).replace(model.surveyed.directory, model.name)
                model.show(stage="unloading", problem=problem, failures=model.state.failures + 1)
                return
            self._loaded(model, process.client)
            ending.add_done_callback(lambda _: model.leaving.set())
            await model.leaving.wait()
            if ending.done():
                log.error("the engine of a model ended", model=model.name, status=ending.result())
            model.leave()

    def _progress(self, model: Model, status: protocol.Status) -> None:
        if status.state in ("loading", "warming"):
            is_step = round(10 * status.progress) != round(10 * model.state.progress)
            if status.state != model.state.stage or is_step:
                percent = round(10 * status.progress) * 10
                log.info(status.state, model=model.name, percent=percent)
            model.show(stage=status.state, progress=status.progress)

    def _loaded(self, model: Model, client: EngineClient) -> None:
        now_s = self.clock()
        took_s = now_s - model.began_s
        log.info("model loaded", model=model.name, took_s=round(took_s, 2))
        model.client = client
        model.idle_s = now_s
        state = model.state
        model.show(stage="loaded", progress=1.0, loads=state.loads + 1, load_s=state.load_s + took_s)
        self.news.set()

    def _ended(self, model: Model, task: asyncio.Task[None]) -> None:
        """The process of a model has ended, and all that it had is free."""
        del self.running[model.name]
        model.client = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected", model=model.name, exc_info=error)
            model.failed_s = self.clock()
            model.show(
                problem="an error in the gateway; its log says more", failures=model.state.failures + 1
            )
        elif not model.state.problem:
            log.info("model unloaded", model=model.name)
        model.show(stage="waiting" if model.waiting else "cold", progress=0.0)
        self.news.set()

    async def close(self) -> None:
        """Unload all models."""
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # requests

    async def answer(self, message: protocol.Speak, send: Callable[[protocol.Outcome], None]) -> None:
        """Answer a request. Cancelling this task cancels it at its engine."""
        id = message.id
        if (model := self.models.get(message.model)) is None:
            why = f"model {message.model!r} is not served"
            return send(protocol.Rejected(id, why, "model", "model_not_found", 404))
        request = self.underway[id] = Underway(message, send)
        model.num_open += 1
        try:
            client = await self._client_for(request, model)
            if client is None:
                return send(protocol.Finished(id, "cancelled", 0))
            await request.answer(client)
        except Refused as error:
            send(error.rejected)
        except Away as error:
            send(protocol.Rejected(id, str(error), None, "engine_not_ready", 503, 1.0))
        finally:
            del self.underway[id]
            model.num_open -= 1
            model.idle_s = self.clock()
            self.news.set()

    async def _client_for(self, request: Underway, model: Model) -> EngineClient | None:
        """Wait until the model is loaded. Returns None if the request is interrupted before. Raises Refused."""
        if model.client is None:
            self._check(request, model)
        model.waiting[request] = self.clock()
        if model.state.stage == "cold":
            model.show(stage="waiting")
        self.news.set()
        failures = model.state.failures
        try:
            async with asyncio.timeout(self.settings.load_wait_s):
                while model.client is None and not request.is_interrupted:
                    if model.state.failures > failures:
                        raise Refused(request.message.id, self._problem(model), "model_not_loaded", FAILED_S)
                    request.send(protocol.Loading(request.message.id, model.state))
                    await model.changed.wait()
        except TimeoutError:
            raise Refused(
                request.message.id,
                f"model {model.name!r} is not loaded yet ({model.state}); try again later",
                "model_loading",
                model.retry_after_s(self.clock()),
            ) from None
        finally:
            del model.waiting[request]
            if not model.waiting and model.state.stage == "waiting":
                model.show(stage="cold")
        return None if request.is_interrupted else model.client

    def _check(self, request: Underway, model: Model) -> None:
        """Raise Refused if it makes no sense to wait."""
        id = request.message.id
        if model.state.planned_bytes > self.room_bytes:
            raise Refused(id, f"model {model.name!r} {self._too_large(model)}", "model_too_large")
        if model.failed_s is not None and (left_s := model.failed_s + FAILED_S - self.clock()) > 0:
            raise Refused(id, self._problem(model), "model_not_loaded", left_s)
        if len(model.waiting) >= self.limits.waiting:
            why = f"{len(model.waiting)} requests wait for model {model.name!r} already"
            raise Refused(id, why, "engine_full", model.retry_after_s(self.clock()))
        recorded_bytes = sum(each.recorded_bytes for each in model.waiting)
        if recorded_bytes and recorded_bytes + request.recorded_bytes > self.reference_memory_bytes:
            why = "too many recordings wait to be encoded"
            raise Refused(id, why, "engine_full", model.retry_after_s(self.clock()))

    def _too_large(self, model: Model) -> str:
        needed, room = mebibytes(model.state.planned_bytes), mebibytes(self.room_bytes)
        return f"needs {needed}, and this server has {room} for its models"

    def _problem(self, model: Model) -> str:
        return f"model {model.name!r} could not be loaded: {model.state.problem}"

    def feed(self, more: protocol.Feed) -> None:
        if (request := self.underway.get(more.id)) is not None:
            request.feed(more)

    def interrupt(self, id: str) -> None:
        request = self.underway.get(id)
        if request is None:
            return
        if request.client is not None:
            return request.client.interrupt(id)
        request.is_interrupted = True
        self.models[request.message.model].wake()

    def heard(self, id: str, frames: int) -> None:
        request = self.underway.get(id)
        if request is not None and request.client is not None:
            request.client.heard(id, frames)


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
