"""Requests on two replicas, without Ray: fake engines behind relays, and the dispatcher's own ranking."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from fake_engine import STATS, FakeEngine, frame

from serving import engine_client, protocol
from serving.cluster import dispatch, link
from serving.cluster.dispatch import Dispatcher
from serving.cluster.gateway import ClusterGateway
from serving.cluster.link import Address
from serving.cluster.relay import Relay
from serving.engine_client import EngineClient


class Full(FakeEngine):
    """An engine that refuses every request. retry_after_s: what it tells clients."""

    retry_after_s = 7.0

    async def speak(self, writer, id, words):
        refusal = protocol.Rejected(id, "full", None, "engine_full", 503, self.retry_after_s)
        writer.write(protocol.pack(refusal))


class Dying(FakeEngine):
    """An engine that is killed by any request, after as many frames as its text asks for."""

    async def speak(self, writer, id, words):
        for index in range(int(words[1])):
            writer.write(protocol.pack(protocol.Audio(id, frame(index), 1)))
        await writer.drain()
        await asyncio.sleep(0.05)
        self.away()


class Silent(Dying):
    """An engine that is killed after audio without sound."""

    async def speak(self, writer, id, words):
        writer.write(protocol.pack(protocol.Audio(id, b"", 3)))
        await super().speak(writer, id, ["frames", "0"])


class DyingWhenFed(FakeEngine):
    """An engine that is killed by the second text of a request."""

    def feed(self, writer, id, text, is_last):
        self.fed.setdefault(id, []).append(text)
        if len(self.fed[id]) == 2:
            self.away()


@asynccontextmanager
async def cluster(directory, *engines):
    """Run a dispatcher with a replica for each engine: a, b, ... in the order of their names if all are
    free."""

    @asynccontextmanager
    async def choose(ask):
        [name, *_] = dispatcher.route(ask)
        await asyncio.sleep(0.01)  # as long as Ray Serve asks the replica for a place
        yield name

    dispatcher = Dispatcher(choose)
    addresses, relays = {}, []
    for name, engine in zip("abcd", engines, strict=False):
        path = str(directory / f"{name}.sock")
        await engine.listen(path)
        relays.append(relay := Relay(path))
        addresses[name] = Address("127.0.0.1", await relay.listen("127.0.0.1"), relay.token)
    dispatcher.update(addresses)
    looking = asyncio.create_task(dispatcher.look_after())
    await until(lambda: all(each.load.is_ready for each in dispatcher.links.values()))
    try:
        yield dispatcher
    finally:
        looking.cancel()
        await dispatcher.close()
        for relay in relays:
            await relay.connections.close()


async def until(fact):
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0.005)


def speak(text, id="r", **fields):
    return protocol.Speak(id, "fake", protocol.Request(text, seed=5, **fields))


async def answered(dispatcher, message):
    outcomes = []
    await asyncio.wait_for(dispatcher.answer(message, outcomes.append), 10)
    return outcomes


def pcm_of(outcomes):
    return b"".join(outcome.pcm for outcome in outcomes if isinstance(outcome, protocol.Audio))


FRAMES = b"".join(map(frame, range(3)))


def test_a_request_that_a_replica_refuses_goes_to_another(tmp_path):
    async def scene():
        async with cluster(tmp_path, Full(), other := FakeEngine()) as dispatcher:
            outcomes = await answered(dispatcher, speak("frames 3"))
            assert pcm_of(outcomes) == FRAMES and isinstance(outcomes[-1], protocol.Finished)
            assert list(other.asked) == ["r"] and dispatcher.num_resent == 1

    asyncio.run(scene())


def test_a_client_of_full_replicas_hears_when_the_first_has_room(tmp_path):
    async def scene():
        later, sooner = Full(), Full()
        sooner.retry_after_s = 2.0
        async with cluster(tmp_path, later, sooner) as dispatcher:
            [refusal] = await answered(dispatcher, speak("frames 3"))
            assert (refusal.status, refusal.code, refusal.retry_after_s) == (503, "engine_full", 2.0)

    asyncio.run(scene())


def test_a_mistake_of_the_client_is_not_tried_elsewhere(tmp_path):
    async def scene():
        async with cluster(tmp_path, FakeEngine(), other := FakeEngine()) as dispatcher:
            [refusal] = await answered(dispatcher, speak("reject voice"))
            assert refusal.param == "voice" and other.asked == {}

    asyncio.run(scene())


@pytest.mark.parametrize("engine", [Dying, Silent])
def test_an_unheard_request_of_a_lost_replica_is_answered_by_another(tmp_path, engine):
    async def scene():
        text = "frames 0" if engine is Dying else "frames 3"
        async with cluster(tmp_path, lost := engine(), other := FakeEngine()) as dispatcher:
            outcomes = await answered(dispatcher, speak(text))
            assert isinstance(outcomes[-1], protocol.Finished)
            assert pcm_of(outcomes) == (b"" if engine is Dying else FRAMES)
            assert lost.asked == other.asked and other.asked["r"]["seed"] == 5

    asyncio.run(scene())


def test_a_lost_replica_ends_its_streams_and_no_others(tmp_path):
    async def scene():
        async with cluster(tmp_path, Dying(), other := FakeEngine()) as dispatcher:
            other.go.clear()
            avoids = speak("frames 3", "there")
            dispatcher.links["a"]._load.num_open = 9
            dispatcher.links["a"].is_draining = True
            stream = asyncio.create_task(answered(dispatcher, avoids))
            await until(lambda: "there" in other.asked)
            dispatcher.links["a"].is_draining = False
            dispatcher.links["b"].is_draining = True
            outcomes = await answered(dispatcher, speak("frames 2"))
            assert pcm_of(outcomes) == FRAMES[:400]
            assert (outcomes[-1].status, outcomes[-1].code) == (503, "engine_stopped")
            other.go.set()
            assert pcm_of(await stream) == FRAMES

    asyncio.run(scene())


def test_without_a_replica_the_client_is_told_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "WAIT_S", 0.1)

    async def scene():
        async with cluster(tmp_path, Dying()) as dispatcher:
            [outcome] = await answered(dispatcher, speak("frames 0"))
            assert (outcome.status, outcome.code) == (503, "engine_stopped")
            [refusal] = await answered(dispatcher, speak("frames 3"))
            assert (refusal.status, refusal.code) == (503, "engine_not_ready")

    asyncio.run(scene())


def test_a_request_that_no_replica_takes_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "CHOOSE_S", 0.05)
    monkeypatch.setattr(dispatch, "WAIT_S", 0.1)

    @asynccontextmanager
    async def never(ask):
        await asyncio.sleep(60)
        yield "a"

    async def scene():
        async with cluster(tmp_path, FakeEngine()) as dispatcher:
            dispatcher.choose = never
            [refusal] = await answered(dispatcher, speak("frames 3"))
            assert (refusal.status, refusal.code) == (503, "engine_not_ready")

    asyncio.run(scene())


def test_text_that_was_fed_is_fed_again(tmp_path):
    async def scene():
        async with cluster(tmp_path, DyingWhenFed(), other := FakeEngine()) as dispatcher:
            answer = asyncio.create_task(answered(dispatcher, speak("one ", is_open=True)))
            await until(lambda: dispatcher.open and dispatcher.open["r"].link is not None)
            dispatcher.feed(protocol.Feed("r", "two "))
            await until(lambda: other.fed)
            dispatcher.feed(protocol.Feed("r", "three", is_last=True))
            assert pcm_of(await answer) == FRAMES
            assert "".join(other.fed["r"]) == "one two three"

    asyncio.run(scene())


def test_a_cancelled_request_ends_at_its_replica(tmp_path):
    async def scene():
        async with cluster(tmp_path, engine := FakeEngine()) as dispatcher:
            outcomes = []
            answer = asyncio.create_task(dispatcher.answer(speak("hold 3"), outcomes.append))
            await until(lambda: len(outcomes) == 3)
            dispatcher.heard("r", 2)
            await until(lambda: engine.heard == {"r": 2})
            answer.cancel()
            await until(lambda: engine.cancelled == ["r"])
            assert dispatcher.open == {}

    asyncio.run(scene())


def test_a_draining_replica_ends_its_streams_and_takes_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "LOOK_S", 0.01)

    async def scene():
        async with cluster(tmp_path, leaving := FakeEngine(), other := FakeEngine()) as dispatcher:
            leaving.go.clear()
            stream = asyncio.create_task(answered(dispatcher, speak("frames 3", "old")))
            await until(lambda: leaving.asked)
            dispatcher.update({"b": dispatcher.links["b"].address})
            await answered(dispatcher, speak("frames 3", "new"))
            assert list(leaving.asked) == ["old"] and list(other.asked) == ["new"]
            assert set(dispatcher.links) == {"a", "b"}
            leaving.go.set()
            assert pcm_of(await stream) == FRAMES
            await until(lambda: set(dispatcher.links) == {"b"})

    asyncio.run(scene())


def test_a_request_waits_for_the_connection_to_a_new_replica(tmp_path):
    """In an update the last old replica may leave the list as soon as a new one is on it."""

    async def scene():
        async with cluster(tmp_path, FakeEngine(), new := FakeEngine()) as dispatcher:
            address = dispatcher.links["b"].address
            await dispatcher._forget("b")
            dispatcher.update({"c": address})
            outcomes = await answered(dispatcher, speak("frames 3"))
            assert pcm_of(outcomes) == FRAMES and list(new.asked) == ["r"]

    asyncio.run(scene())


def test_a_conversation_goes_on_where_it_is_remembered(tmp_path):
    """Another replica takes it only if that one is lost."""

    async def scene():
        async with cluster(tmp_path, a := FakeEngine(), b := FakeEngine()) as dispatcher:
            for index in range(3):
                await answered(dispatcher, speak("frames 1", f"r{index}", conversation="chat"))
            home, other = (a, b) if a.asked else (b, a)
            assert len(home.asked) == 3 and not other.asked
            dispatcher.links["a" if home is a else "b"].is_draining = True
            await answered(dispatcher, speak("frames 1", "later", conversation="chat"))
            assert list(other.asked) == ["later"]

    asyncio.run(scene())


def test_a_conversation_does_not_begin_anew_because_its_replica_is_full(tmp_path):
    async def scene():
        async with cluster(tmp_path, Full(), FakeEngine()) as dispatcher:
            dispatcher.homes.learn("chat", "a")
            [refusal] = await answered(dispatcher, speak("frames 1", conversation="chat"))
            assert refusal.code == "engine_full"

    asyncio.run(scene())


def test_the_answer_says_which_replicas_were_asked(tmp_path):
    async def scene():
        async with cluster(tmp_path, Dying(), FakeEngine()) as dispatcher:
            *_, finished = await answered(dispatcher, speak("frames 0"))
            assert finished.replicas == ["a", "b"]

    asyncio.run(scene())


def test_a_request_waits_for_a_replica_that_is_silent_for_a_moment(tmp_path, monkeypatch):
    async def scene():
        async with cluster(tmp_path, FakeEngine()) as dispatcher:
            with monkeypatch.context() as patch:
                patch.setattr(engine_client, "SILENT_S", -1.0)
                answer = asyncio.create_task(answered(dispatcher, speak("frames 3")))
                await asyncio.sleep(0.1)
                assert not answer.done()
            assert pcm_of(await answer) == FRAMES

    asyncio.run(scene())


def test_a_replica_that_falls_silent_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "LOOK_S", 0.01)
    monkeypatch.setattr(link, "LOST_S", 0.5)

    async def scene():
        async with cluster(tmp_path, silent := FakeEngine(), FakeEngine()) as dispatcher:
            answer = asyncio.create_task(answered(dispatcher, speak("queued", "first")))
            await until(lambda: silent.asked)
            silent.is_awake = False
            silent.messages["first"].request.text = "frames 3"
            dispatcher.open["first"].message.request.text = "frames 3"
            assert pcm_of(await answer) == FRAMES

    asyncio.run(scene())


@pytest.mark.parametrize("token", ["00" * 32, "00" * 5])
def test_a_relay_lets_nobody_in_without_its_token(tmp_path, monkeypatch, token):
    monkeypatch.setattr("serving.cluster.relay.TOKEN_S", 0.1)

    async def scene():
        async with cluster(tmp_path, engine := FakeEngine()) as dispatcher:
            port = dispatcher.links["a"].address.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bytes.fromhex(token))
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
            assert len(engine.writers) == 1  # the dispatcher's

    asyncio.run(scene())


def test_lost_engines_are_counted_and_replicas_that_were_to_end_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "LOOK_S", 0.01)
    monkeypatch.setattr(engine_client, "RETRY_S", 0.01)

    async def scene():
        async with cluster(tmp_path, lost := FakeEngine(), ended := FakeEngine(), FakeEngine()) as dispatcher:
            gateway = ClusterGateway(dispatcher, 3)
            await until(lambda: all(link.stats is not None for link in dispatcher.links.values()))
            assert gateway.figures()[0].engine_restarts == 0
            lost.away()
            await until(lambda: dispatcher.links["a"].status.state == "away")
            await asyncio.sleep(0.1)  # the relay takes several connections meanwhile
            dispatcher.links["b"].is_draining = True
            ended.away()
            await until(lambda: set(dispatcher.links) == {"a", "c"})
            assert gateway.figures()[0].engine_restarts == 1
            dispatcher.update({"c": dispatcher.links["c"].address})
            await until(lambda: set(dispatcher.links) == {"c"})
            assert gateway.figures()[0].engine_restarts == 1

    asyncio.run(scene())


def test_replicas_are_one_engine_to_the_http_process(tmp_path):
    async def scene():
        async with cluster(tmp_path, first := FakeEngine(), second := FakeEngine()) as dispatcher:
            gateway = ClusterGateway(dispatcher, 2)
            path = str(tmp_path / "gateway.sock")
            await gateway.listen(path)
            client = EngineClient(path)
            running = [asyncio.create_task(gateway.tell_state()), asyncio.create_task(client.run())]
            await until(lambda: client.stats is not None and client.status.state == "ready")
            assert [model.id for model in client.models] == ["fake"]
            assert client.stats.turns == 2 * STATS.turns and set(client.stats.replicas) == {"a", "b"}
            with client.speak(speak("frames 3")) as inbox:
                outcomes = [await asyncio.wait_for(inbox.get(), 5) for _ in range(4)]
            assert pcm_of(outcomes) == FRAMES and isinstance(outcomes[-1], protocol.Finished)
            with client.speak(speak("hold 3", "left")) as inbox:
                await asyncio.wait_for(inbox.get(), 5)
            await until(lambda: [*first.cancelled, *second.cancelled] == ["left"])
            first.away()
            second.away()
            await until(lambda: client.status.state == "loading")
            for task in running:
                task.cancel()
            await gateway.close()

    asyncio.run(scene())


def test_a_thousand_requests_leave_nothing_behind(tmp_path):
    """A fifth of the clients leave: before, while and after they hear something."""

    async def scene():
        async with cluster(tmp_path, FakeEngine(), FakeEngine()) as dispatcher:
            before = len(asyncio.all_tasks())

            async def client(index):
                answer = asyncio.create_task(answered(dispatcher, speak("tone 3", str(index))))
                if index % 5:
                    return isinstance((await answer)[-1], protocol.Finished)
                await asyncio.sleep(0.01 * (index % 8))
                answer.cancel()
                return await asyncio.gather(answer, return_exceptions=True)

            results = await asyncio.gather(*map(client, range(1000)))
            assert results.count(True) == 800
            assert dispatcher.open == {}
            assert [each.load.num_open for each in dispatcher.links.values()] == [0, 0]
            await until(lambda: len(asyncio.all_tasks()) == before)

    asyncio.run(scene())


def test_an_error_of_the_gateway_is_told_to_the_client(tmp_path):
    async def scene():
        async with cluster(tmp_path, FakeEngine()) as dispatcher:

            def broken(ask):
                raise KeyError("a mistake")

            dispatcher.choose = broken
            gateway = ClusterGateway(dispatcher, 1)
            path = str(tmp_path / "gateway.sock")
            await gateway.listen(path)
            client = EngineClient(path)
            running = asyncio.create_task(client.run())
            await until(lambda: client.status.state == "ready")
            with client.speak(speak("frames 3")) as inbox:
                failed = await asyncio.wait_for(inbox.get(), 5)
            assert isinstance(failed, protocol.Failed) and failed.status == 500
            running.cancel()
            await gateway.close()

    asyncio.run(scene())


def test_requests_are_spread_before_anything_is_known(tmp_path):
    async def scene():
        async with cluster(tmp_path, first := FakeEngine(), second := FakeEngine()) as dispatcher:
            tasks = [
                asyncio.create_task(answered(dispatcher, msgspec.structs.replace(speak("queued"), id=str(i))))
                for i in range(8)
            ]
            await until(lambda: len(first.asked) + len(second.asked) == 8)
            assert len(first.asked) == len(second.asked) == 4
            for task in tasks:
                task.cancel()

    asyncio.run(scene())
