"""The gateway process of models on demand: takes the engine's place, and starts an engine process for each
model that is asked for.

    python -m serving.on_demand.gateway_process '{"settings": {...}, "socket": PATH, ...}'

The supervisor starts it with `EngineArguments` as JSON. Exit status 2: there is no model to serve; one line
on stderr says so.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from serving import logs, protocol
from serving.exit_with_parent import exit_with_parent
from serving.on_demand.gateway import OnDemandGateway
from serving.on_demand.models import Models
from serving.on_demand.process import EngineProcess
from serving.on_demand.survey import Survey, SurveyedModel, decoder
from serving.settings import EngineArguments, Settings
from serving.supervisor import command, pipe, socket_directory


def settings_of(settings: Settings, model: SurveyedModel) -> Settings:
    """Return the settings of one model's engine. Slots and KV memory are those of its memory plan."""
    memory = msgspec.structs.replace(
        settings.memory, max_slots=model.max_slots, kv_memory_bytes=model.kv_memory_bytes
    )
    return msgspec.structs.replace(
        settings, models={model.info.id: model.directory}, memory=memory, on_demand=None
    )


def environment() -> dict[str, str]:
    """Return the environment of the engines. Their stderr is a pipe, but the gateway relays it to its own."""
    colors = {"FORCE_COLOR": "1"} if logs.has_colors() else {}
    return {**os.environ, logs.VARIABLE: logs.form(), **colors}


def starter(settings: Settings, folder: Path, parent_fd: int) -> Callable[[SurveyedModel], EngineProcess]:
    """Return the function that makes the engine process of a model. Each has its own socket in `folder`. The
    engines end with this process, because it holds the other end of the pipe `parent_fd`."""
    counter = itertools.count()

    def start(model: SurveyedModel) -> EngineProcess:
        socket = str(folder / f"{next(counter)}.sock")
        arguments = EngineArguments(settings_of(settings, model), socket, parent_fd)
        return EngineProcess(model.info.id, arguments, environment())

    return start


class SurveyFailed(Exception):
    """The survey failed, and its process has said why. status: its exit status."""

    def __init__(self, status: int):
        super().__init__(f"the survey of the models ended with status {status}")
        self.status = status


async def surveyed(arguments: EngineArguments, tell: Callable[[protocol.Status], None]) -> Survey:
    """Return the models of the directory. Raises SurveyFailed."""
    process = await asyncio.create_subprocess_exec(
        *command("serving.engine.survey", arguments),
        pass_fds=[] if arguments.parent_fd is None else [arguments.parent_fd],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None, "its stdout is a pipe"
    found = None
    try:
        async for message in protocol.read(process.stdout, decoder):
            if isinstance(message, Survey):
                found = message
            else:
                tell(message)
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if found is None:
        raise SurveyFailed(status or 1)
    return found


async def run(arguments: EngineArguments) -> None:
    """Serve until a signal arrives. Raises SurveyFailed."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    with socket_directory() as folder, pipe() as (parent_fd, _):
        models = models_of(arguments.settings, starter(arguments.settings, Path(folder), parent_fd))
        gateway = OnDemandGateway(models)
        await gateway.listen(arguments.socket)
        telling = asyncio.create_task(gateway.tell_state())
        serving = asyncio.create_task(serve(arguments, models))
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait((serving, waiting, telling), return_when=asyncio.FIRST_COMPLETED)
        for task in (telling, serving, waiting):
            task.cancel()
        await gateway.close()
        await models.close()
        for done in await asyncio.gather(serving, telling, return_exceptions=True):
            if done is not None and not isinstance(done, asyncio.CancelledError):
                raise done


def models_of(settings: Settings, start: Callable[[SurveyedModel], EngineProcess]) -> Models:
    assert settings.on_demand is not None, "a gateway of models on demand has their settings"
    return Models(settings.on_demand, settings.limits, settings.memory.reference_memory_bytes, start)


async def serve(arguments: EngineArguments, models: Models) -> None:
    """Survey the directory, then load and unload its models until cancelled."""
    survey = await surveyed(arguments, models.tell)
    models.open(survey.models, survey.room_bytes)
    await models.keep()


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[1], type=EngineArguments)
    logs.configure("gateway")
    if arguments.parent_fd is not None:
        exit_with_parent(arguments.parent_fd, arguments.socket)
    try:
        asyncio.run(run(arguments))
    except SurveyFailed as error:
        sys.exit(error.status)


if __name__ == "__main__":
    main()
