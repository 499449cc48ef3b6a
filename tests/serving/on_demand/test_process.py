"""The engine process of a model on demand, with a fake engine (fake_engine.py) in its place."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from serving import protocol
from serving.on_demand import process
from serving.on_demand.process import EngineProcess, NotLoaded
from serving.settings import EngineArguments, Settings

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parents[1] / "fake_engine.py"
ENV = {**os.environ, "PYTHONPATH": str(FAKE.parents[2])}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """engine(*how) returns an engine process that is the fake one."""
    reader, writer = os.pipe()

    def engine(*how):
        def command(module, arguments):
            return [sys.executable, str(FAKE), arguments.socket, str(arguments.parent_fd), *how]

        monkeypatch.setattr(process, "command", command)
        return EngineProcess("m", EngineArguments(Settings(), str(tmp_path / "e.sock"), reader), ENV)

    yield engine
    os.close(reader)
    os.close(writer)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_and_its_socket_end_with_its_context(engine, tmp_path):
    async def scene():
        before = len(asyncio.all_tasks())
        told = []
        made = engine()
        async with made.running() as ending:
            await made.ready(ending, told.append)
            pid = made.child.process.pid
            with made.client.speak(protocol.Speak("r", "fake", protocol.Request("frames 2"))) as inbox:
                outcomes = [await asyncio.wait_for(inbox.get(), 10) for _ in range(3)]
            assert isinstance(outcomes[-1], protocol.Finished) and is_alive(pid)
            assert told[-1] == protocol.Status("ready", 1.0)
        assert not is_alive(pid) and ending.done() and not list(tmp_path.iterdir())
        assert len(asyncio.all_tasks()) == before

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("refuse", "this directory holds no model"),
        ("crash", "its engine ended with status 70 before it was ready; the log says more"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(engine, how, why):
    async def scene():
        made = engine(how)
        async with made.running() as ending:
            with pytest.raises(NotLoaded) as error:
                await made.ready(ending, lambda status: None)
        assert str(error.value) == why

    asyncio.run(scene())


def test_a_process_that_is_left_before_it_runs_ends(engine):
    async def scene():
        made = engine()
        async with made.running() as ending:
            pass
        assert ending.done() and not is_alive(made.child.process.pid)

    asyncio.run(scene())


def test_a_process_that_dies_ends_its_task(engine):
    async def scene():
        made = engine()
        async with made.running() as ending:
            await made.ready(ending, lambda status: None)
            made.child.kill()
            assert await asyncio.wait_for(ending, 10) == -signal.SIGKILL

    asyncio.run(scene())
