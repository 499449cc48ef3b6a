"""The engine process of a replica, with a fake engine (fake_engine.py) in its place."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from serving import protocol, supervisor
from serving.cluster import engine_host
from serving.cluster.engine_host import EngineHost
from serving.cluster.link import Link
from serving.settings import Settings

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parents[1] / "fake_engine.py"


@pytest.fixture
def host(monkeypatch):
    """host(*how) returns a host whose engine process is the fake one. It is stopped afterwards."""
    hosts = []

    def host(*how):
        def command(module, arguments):
            return [sys.executable, str(FAKE), arguments.socket, str(arguments.parent_fd), *how]

        monkeypatch.setattr(engine_host, "command", command)
        monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)
        root = FAKE.parents[2]
        monkeypatch.setenv("PYTHONPATH", f"{root}:{FAKE.parent}")
        hosts.append(EngineHost(Settings(), "127.0.0.1"))
        return hosts[-1]

    yield host
    for each in hosts:
        each.stop()
        assert not each.is_alive


def speak(address, text):
    """Return the outcomes of a request that a gateway sends."""

    async def scene():
        link = Link(address)
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(10):
            while not link.load.is_ready:
                await asyncio.sleep(0.01)
            with link.speak(protocol.Speak("r", "fake", protocol.Request(text))) as inbox:
                outcomes = [await inbox.get()]
                while isinstance(outcomes[-1], protocol.Audio):
                    outcomes.append(await inbox.get())
        running.cancel()
        return outcomes

    return asyncio.run(scene())


def test_an_engine_that_dies_is_started_again_behind_the_same_address(host):
    replica = host()
    address = replica.start()
    assert len(speak(address, "frames 3")) == 4
    [lost] = speak(address, "die")
    assert lost.code == "engine_stopped" and replica.is_alive
    assert len(speak(address, "frames 3")) == 4


@pytest.mark.parametrize("how", ["refuse", "crash"])
def test_an_engine_that_cannot_start_ends_the_replica(host, how):
    replica = host(how)
    with pytest.raises(ValueError, match="before it was ready"):
        replica.start()
    replica.thread.join(10)
    assert not replica.is_alive


def test_a_replica_whose_engine_dies_again_and_again_ends(host, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 1)
    replica = host()
    address = replica.start()
    speak(address, "die")
    speak(address, "die")
    end = time.monotonic() + 10
    while replica.is_alive:
        assert time.monotonic() < end, "the replica does not give up"
        time.sleep(0.01)
