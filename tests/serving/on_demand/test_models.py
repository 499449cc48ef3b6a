"""Models on demand whose engines are fake ones (fake_engine.py) on the event loop of the test."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from fake_engine import FEEDER, MODEL, FakeEngine, frame

from serving import protocol
from serving.engine_client import EngineClient
from serving.on_demand.gateway import OnDemandGateway
from serving.on_demand.models import FAILED_S, Models
from serving.on_demand.process import NotLoaded
from serving.on_demand.survey import SurveyedModel
from serving.settings import Limits, OnDemand

FRAMES = frame(0) + frame(1) + frame(2)


class Process:
    """An engine in the place of a process. While `may_load` or `may_end` is cleared, it is not ready, or does
    not end. problem: why it cannot load the model."""

    problem = None

    def __init__(self, model, path):
        self.path = path
        self.engine = FakeEngine((model.info,))
        self.client = EngineClient(path)
        self.may_load, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.may_end.set()
        self.died = asyncio.Event()

    @asynccontextmanager
    async def running(self):
        await self.engine.listen(self.path)
        connecting = asyncio.create_task(self.client.run())
        ending = asyncio.create_task(self.end())
        try:
            yield ending
        finally:
            await self.may_end.wait()
            for task in (connecting, ending):
                task.cancel()
            await asyncio.gather(connecting, ending, return_exceptions=True)
            self.engine.away()

    async def end(self):
        await self.died.wait()
        self.engine.away()
        return -9

    async def ready(self, ending, told):
        told(protocol.Status("loading", 0.0))
        told(protocol.Status("warming", 0.4))
        await self.may_load.wait()
        await until(lambda: self.client.is_ready)
        if self.problem is not None:
            raise NotLoaded(self.problem)


class Zoo:
    """The models, a clock that the test moves, and the processes of each model in order."""

    def __init__(self, directory, names, sizes, room_bytes, prepare, **settings):
        self.now_s = 1000.0
        self.directory, self.prepare = directory, prepare
        self.processes = {name: [] for name in names}
        limits = Limits(waiting=3)
        self.models = Models(OnDemand(**settings), limits, 1000, self.start, lambda: self.now_s)
        infos = [msgspec.structs.replace(FEEDER if name == "feeder" else MODEL, id=name) for name in names]
        self.models.open(
            [SurveyedModel(info, f"/models/{info.id}", 8, 0, sizes[info.id]) for info in infos], room_bytes
        )

    def start(self, model):
        made = self.processes[model.info.id]
        process = Process(model, str(self.directory / f"{model.info.id}.{len(made)}"))
        made.append(process)
        self.prepare(process)
        return process

    def stage(self, name):
        return self.models.models[name].state.stage

    def state(self, name):
        return self.models.models[name].state

    def later(self, seconds):
        self.now_s += seconds
        self.models.news.set()

    def speak(self, name, text="frames 3", id="r", **fields):
        """Begin a request. Returns its task and its outcomes so far."""
        outcomes = []
        message = protocol.Speak(id, name, protocol.Request(text, **fields))
        return asyncio.create_task(self.models.answer(message, outcomes.append)), outcomes

    async def spoken(self, name, text="frames 3", id="r"):
        task, outcomes = self.speak(name, text, id)
        await asyncio.wait_for(task, 10)
        return outcomes


def in_zoo(directory, scene, *names, sizes=None, room_bytes=100, prepare=lambda process: None, **settings):
    """Run a scene with models a, b, ... Afterwards nothing is left."""

    async def run():
        before = len(asyncio.all_tasks())
        all_names = names or ("a", "b")
        zoo = Zoo(
            directory, all_names, sizes or dict.fromkeys(all_names, 40), room_bytes, prepare, **settings
        )
        keeping = asyncio.create_task(zoo.models.keep())
        async with asyncio.timeout(20):
            await scene(zoo)
        keeping.cancel()
        await zoo.models.close()
        await until(lambda: len(asyncio.all_tasks()) == before)
        assert zoo.models.underway == {} and zoo.models.running == {}
        assert all(model.num_open == 0 and not model.waiting for model in zoo.models.models.values())

    asyncio.run(run())


async def until(fact):
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0.002)


def pcm_of(outcomes):
    return b"".join(each.pcm for each in outcomes if isinstance(each, protocol.Audio))


def stages_of(outcomes):
    return [each.state.stage for each in outcomes if isinstance(each, protocol.Loading)]


def test_a_request_loads_its_model_and_hears_how_far_it_is(tmp_path):
    async def scene(zoo):
        outcomes = await zoo.spoken("a")
        assert stages_of(outcomes)[0] == "waiting" and "warming" in stages_of(outcomes)
        assert pcm_of(outcomes) == FRAMES and isinstance(outcomes[-1], protocol.Finished)
        assert zoo.stage("a") == "loaded" and zoo.stage("b") == "cold"
        again = await zoo.spoken("a")
        assert stages_of(again) == [] and pcm_of(again) == FRAMES
        assert len(zoo.processes["a"]) == 1 and zoo.state("a").loads == 1

    in_zoo(tmp_path, scene)


def test_requests_for_a_cold_model_load_it_once(tmp_path):
    async def scene(zoo):
        answers = await asyncio.gather(*(zoo.spoken("a", id=str(i)) for i in range(3)))
        assert [pcm_of(each) for each in answers] == [FRAMES] * 3
        assert len(zoo.processes["a"]) == 1

    in_zoo(tmp_path, scene)


def test_an_idle_model_is_unloaded_and_the_next_request_loads_it_again(tmp_path):
    async def scene(zoo):
        await zoo.spoken("a")
        zoo.later(299)
        await asyncio.sleep(0)
        assert zoo.stage("a") == "loaded"
        zoo.later(2)
        await until(lambda: zoo.stage("a") == "cold")
        assert pcm_of(await zoo.spoken("a")) == FRAMES
        assert len(zoo.processes["a"]) == 2 and zoo.state("a").loads == 2

    in_zoo(tmp_path, scene)


def test_a_model_that_speaks_is_not_idle(tmp_path):
    async def scene(zoo):
        task, outcomes = zoo.speak("a", "hold 1")
        await until(lambda: pcm_of(outcomes))
        zoo.later(1000)
        await asyncio.sleep(0.01)
        assert zoo.stage("a") == "loaded"
        task.cancel()
        await until(lambda: zoo.processes["a"][0].engine.cancelled == ["r"])

    in_zoo(tmp_path, scene)


def test_without_a_keep_alive_a_model_is_unloaded_after_its_request(tmp_path):
    async def scene(zoo):
        await zoo.spoken("a")
        await until(lambda: zoo.stage("a") == "cold")

    in_zoo(tmp_path, scene, keep_alive_s=0.0)


def test_a_model_can_stay_loaded_for_ever(tmp_path):
    async def scene(zoo):
        await zoo.spoken("a")
        zoo.later(1e9)
        await asyncio.sleep(0.01)
        assert zoo.stage("a") == "loaded"

    in_zoo(tmp_path, scene, keep_alive_s=None)


def test_a_request_that_comes_while_its_model_is_unloaded_waits_and_loads_it(tmp_path):
    async def scene(zoo):
        await zoo.spoken("a")
        zoo.processes["a"][0].may_end.clear()
        zoo.later(301)
        await until(lambda: zoo.stage("a") == "unloading")
        task, outcomes = zoo.speak("a")
        await until(lambda: stages_of(outcomes) == ["unloading"])
        assert len(zoo.processes["a"]) == 1
        zoo.processes["a"][0].may_end.set()
        await asyncio.wait_for(task, 10)
        assert pcm_of(outcomes) == FRAMES and len(zoo.processes["a"]) == 2

    in_zoo(tmp_path, scene)


def test_a_request_that_comes_right_after_the_decision_to_unload_is_not_lost(tmp_path):
    async def scene(zoo):
        await zoo.spoken("a")
        zoo.later(301)
        while zoo.stage("a") == "loaded":
            await asyncio.sleep(0)
        outcomes = []
        await zoo.models.answer(protocol.Speak("r", "a", protocol.Request("frames 3")), outcomes.append)
        assert pcm_of(outcomes) == FRAMES and len(zoo.processes["a"]) == 2

    in_zoo(tmp_path, scene)


def test_an_idle_model_makes_room_and_one_that_speaks_does_not(tmp_path):
    async def scene(zoo):
        await zoo.spoken("a")
        zoo.later(1)
        holding, heard = zoo.speak("b", "hold 1")
        await until(lambda: pcm_of(heard))
        assert pcm_of(await zoo.spoken("c", id="c")) == FRAMES
        assert (zoo.stage("a"), zoo.stage("b"), zoo.stage("c")) == ("cold", "loaded", "loaded")
        speaking, more = zoo.speak("c", "hold 1", "c2")
        waiting, outcomes = zoo.speak("a", id="a2")
        await until(lambda: pcm_of(more) and outcomes)
        await asyncio.sleep(0.01)
        assert stages_of(outcomes) == ["waiting"]  # all others speak
        holding.cancel()
        await asyncio.wait_for(waiting, 10)
        assert pcm_of(outcomes) == FRAMES and zoo.stage("b") == "cold" and not speaking.done()
        speaking.cancel()

    in_zoo(tmp_path, scene, "a", "b", "c")


def test_a_model_that_never_fits_is_refused_at_once(tmp_path):
    async def scene(zoo):
        [refused] = await zoo.spoken("b")
        assert (refused.status, refused.code) == (503, "model_too_large") and refused.retry_after_s is None
        assert refused.message.startswith("model 'b' needs 200 MiB, and this server has 100 MiB")
        assert pcm_of(await zoo.spoken("a")) == FRAMES and not zoo.processes["b"]

    in_zoo(tmp_path, scene, sizes={"a": 40 << 20, "b": 200 << 20}, room_bytes=100 << 20)


def test_a_model_that_cannot_be_loaded_is_one_clear_error_and_the_others_go_on(tmp_path):
    def prepare(process):
        if "/b." in process.path:
            process.problem = "/models/b/model.safetensors is damaged"

    async def scene(zoo):
        (first, *_), (second, *_) = await asyncio.gather(*(last_of(zoo, "b", id) for id in ("1", "2")))
        for refused in (first, second):
            assert (refused.status, refused.code) == (503, "model_not_loaded")
            assert refused.message == "model 'b' could not be loaded: b/model.safetensors is damaged"
        assert pcm_of(await zoo.spoken("a")) == FRAMES
        await until(lambda: zoo.stage("b") == "cold")
        assert zoo.state("b").failures == 1 and zoo.state("b").problem
        [again] = await zoo.spoken("b")  # it is not loaded again and again
        assert again.message == first.message and 0 < again.retry_after_s <= FAILED_S
        assert len(zoo.processes["b"]) == 1
        zoo.later(FAILED_S)
        await zoo.spoken("b")
        assert len(zoo.processes["b"]) == 2

    in_zoo(tmp_path, scene, prepare=prepare)


async def last_of(zoo, name, id):
    return [each for each in await zoo.spoken(name, id=id) if not isinstance(each, protocol.Loading)]


def test_a_request_waits_no_longer_than_allowed(tmp_path):
    async def scene(zoo):
        [refused] = await last_of(zoo, "a", "r")
        assert (refused.status, refused.code) == (503, "model_loading")
        assert refused.message == "model 'a' is not loaded yet (warming 40 %); try again later"
        assert refused.retry_after_s > 0
        zoo.processes["a"][0].may_load.set()  # the load goes on, for the next request
        await until(lambda: zoo.stage("a") == "loaded")
        assert pcm_of(await zoo.spoken("a")) == FRAMES and len(zoo.processes["a"]) == 1

    in_zoo(tmp_path, scene, prepare=lambda process: process.may_load.clear(), load_wait_s=0.05)


def test_no_more_requests_wait_than_a_model_queues(tmp_path):
    async def scene(zoo):
        tasks = [zoo.speak("a", id=str(i))[0] for i in range(3)]
        await until(lambda: zoo.stage("a") == "warming")
        [refused] = await zoo.spoken("a", id="4")
        assert (refused.status, refused.code) == (503, "engine_full")
        zoo.processes["a"][0].may_load.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    in_zoo(tmp_path, scene, prepare=lambda process: process.may_load.clear())


def test_recordings_of_waiting_requests_are_bounded(tmp_path):
    def message(id, num_bytes):
        reference = protocol.Reference(protocol.AudioClip(bytes(num_bytes), 24000))
        return protocol.Speak(id, "a", protocol.Request("frames 3"), [reference])

    async def scene(zoo):
        first = asyncio.create_task(zoo.models.answer(message("1", 4000), lambda outcome: None))
        await until(lambda: zoo.stage("a") == "warming")
        outcomes = []
        await zoo.models.answer(message("2", 4), outcomes.append)
        assert [each.code for each in outcomes] == ["engine_full"]
        zoo.processes["a"][0].may_load.set()
        await asyncio.wait_for(first, 10)

    in_zoo(tmp_path, scene, prepare=lambda process: process.may_load.clear())


def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing_behind(tmp_path):
    async def scene(zoo):
        task, _ = zoo.speak("a")
        await until(lambda: zoo.stage("a") == "warming")
        task.cancel()
        zoo.processes["a"][0].may_load.set()
        await until(lambda: zoo.stage("a") == "loaded")
        assert zoo.processes["a"][0].engine.asked == {}
        zoo.later(301)
        await until(lambda: zoo.stage("a") == "cold")

    in_zoo(tmp_path, scene, prepare=lambda process: process.may_load.clear())


def test_an_engine_that_dies_costs_its_requests_and_the_next_one_loads_the_model(tmp_path):
    async def scene(zoo):
        task, outcomes = zoo.speak("a", "hold 1")
        await until(lambda: pcm_of(outcomes))
        zoo.processes["a"][0].died.set()
        await asyncio.wait_for(task, 10)
        assert (outcomes[-1].status, outcomes[-1].code) == (503, "engine_stopped")
        await until(lambda: zoo.stage("a") == "cold")
        assert pcm_of(await zoo.spoken("a")) == FRAMES

    in_zoo(tmp_path, scene)


def test_text_that_arrives_while_the_model_is_loaded_is_spoken_in_order(tmp_path):
    async def scene(zoo):
        task, outcomes = zoo.speak("feeder", "one ", is_open=True)
        await until(lambda: zoo.stage("feeder") == "warming")
        for text, is_last in (("two ", False), ("three", True)):
            zoo.models.feed(protocol.Feed("r", text, is_last))
        zoo.processes["feeder"][0].may_load.set()
        await asyncio.wait_for(task, 10)
        assert zoo.processes["feeder"][0].engine.fed["r"] == ["one ", "two ", "three"]
        assert pcm_of(outcomes) == FRAMES

    in_zoo(tmp_path, scene, "feeder", prepare=lambda process: process.may_load.clear())


def test_an_interrupt_ends_a_request_that_waits_for_its_model(tmp_path):
    async def scene(zoo):
        task, outcomes = zoo.speak("a")
        await until(lambda: zoo.stage("a") == "warming")
        zoo.models.interrupt("r")
        await asyncio.wait_for(task, 10)
        assert (outcomes[-1].reason, outcomes[-1].frames) == ("cancelled", 0)
        zoo.processes["a"][0].may_load.set()

    in_zoo(tmp_path, scene, prepare=lambda process: process.may_load.clear())


@pytest.mark.parametrize("keep_alive_s", [0.0, 300.0])
def test_hundreds_of_requests_leave_nothing_behind(tmp_path, keep_alive_s):
    """There is room for one of three models. Some clients leave: while it is loaded, and while it speaks."""

    async def scene(zoo):
        async def client(index):
            task, outcomes = zoo.speak("abc"[index % 3], "tone 1" if index % 2 else "frames 3", str(index))
            if index % 5 == 0:
                await asyncio.sleep(0.003 * (index % 7))
                task.cancel()
                return await asyncio.gather(task, return_exceptions=True)
            await task
            return isinstance(outcomes[-1], protocol.Finished)

        for start in range(0, 240, 8):
            results = await asyncio.gather(*(client(index) for index in range(start, start + 8)))
            assert all(results)
        zoo.later(301)
        await until(lambda: all(zoo.stage(name) == "cold" for name in "abc"))

    in_zoo(tmp_path, scene, "a", "b", "c", room_bytes=50, keep_alive_s=keep_alive_s)


def test_all_models_are_one_engine_to_the_http_process(tmp_path):
    async def scene(zoo):
        gateway = OnDemandGateway(zoo.models)
        path = str(tmp_path / "gateway.sock")
        await gateway.listen(path)
        client = EngineClient(path)
        running = [asyncio.create_task(gateway.tell_state()), asyncio.create_task(client.run())]
        await until(lambda: client.status.state == "ready" and client.stats is not None)
        assert [model.id for model in client.models] == ["a", "b"] and client.stats.models == {}
        assert [state.stage for state in client.states.values()] == ["cold", "cold"]
        with client.speak(protocol.Speak("r", "b", protocol.Request("frames 3"))) as inbox:
            outcomes = [await inbox.get()]
            while not isinstance(outcomes[-1], protocol.Finished):
                outcomes.append(await asyncio.wait_for(inbox.get(), 10))
        assert stages_of(outcomes) and pcm_of(outcomes) == FRAMES
        await until(lambda: client.states["b"].stage == "loaded" and client.stats.pages > 0)
        assert client.stats.replicas == {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await gateway.close()

    in_zoo(tmp_path, scene)


def test_counters_of_all_models_go_on_when_a_model_is_unloaded(tmp_path):
    async def scene(zoo):
        gateway = OnDemandGateway(zoo.models)

        def figures():
            [stats] = gateway.figures()
            return stats

        for loads in (1, 2):
            await zoo.spoken("a")
            await until(lambda: figures().pages > 0)
            assert (figures().pauses, figures().pages) == (4 * loads, 100)
            zoo.later(301)
            await until(lambda: zoo.stage("a") == "cold")
            assert (figures().pauses, figures().pages) == (4 * loads, 0)
            assert figures().turns == 4 * loads

    in_zoo(tmp_path, scene)
