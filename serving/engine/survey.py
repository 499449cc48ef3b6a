"""Surveys a directory of models: their abilities, and the memory that each will take. No weight is read.

    python -m serving.engine.survey '{"settings": {...}, ...}'

The gateway of models on demand starts this process with `EngineArguments` as JSON. It writes messages of the
protocol to stdout: the progress, then one Survey. Exit status 2: there is no model; one line on stderr says
so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
import torch

import zoo
from compile_cache import limits
from serving import logs, protocol
from serving.engine.device.runner import narrow_codec
from serving.engine.disk_full import REFUSED
from serving.engine.loading import CPU_SLOTS
from serving.engine.memory.memory_plan import SPARE_PART, plan
from serving.engine.wire import describe
from serving.exit_with_parent import exit_with_parent
from serving.on_demand.survey import Survey, SurveyedModel
from serving.settings import EngineArguments, Settings

# A process takes this in addition to its plan: torch and its libraries; on a GPU, the context and graphs.
PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 1 << 30}
MEMORY_FACTS = Path("/proc/meminfo")

log = structlog.get_logger()


def survey(settings: Settings, progress: Callable[[float, str], None]) -> Survey:
    """Survey the directories that a family recognises. The others get a line on stderr. Raises ValueError
    if there is no model."""
    device = torch.device(settings.model.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    models = []
    for i, (name, directory) in enumerate(settings.models.items()):
        progress(i / len(settings.models), f"looking at {name}")
        try:
            models.append(surveyed(name, directory, settings, device))
        except (ValueError, OSError) as error:
            sys.stderr.write(f"zoo: {name} is not served: {error}\n")
        except Exception as error:  # of one directory, which must not take the others away
            log.error("unexpected", model=name, exc_info=error)
            sys.stderr.write(f"zoo: {name} is not served: an error in reading it; the log says more\n")
    if not models:
        raise ValueError("the directory of --model-dir has no model")
    return Survey(models, room_bytes(device))


def surveyed(name: str, directory: str, settings: Settings, device: torch.device) -> SurveyedModel:
    """Raises ValueError, OSError."""
    is_cpu = device.type == "cpu"
    dtype = settings.model.dtype or ("float32" if is_cpu else "bfloat16")
    family = zoo.load(directory, "meta", dtype, keeps_bf16=is_cpu, chunked=settings.model.chunked)
    narrow_codec(family, settings.model.codec)
    slots = settings.memory.max_slots or CPU_SLOTS
    made = plan(family, slots, settings.memory.kv_memory_bytes, is_for_cpu=is_cpu)
    planned_bytes = made.total + PROCESS_BYTES.get(device.type, 0)
    return SurveyedModel(describe(name, family.spec), directory, slots, made.kv_cache, planned_bytes)


def room_bytes(device: torch.device) -> int:
    """Return most of the memory that is free now."""
    if device.type == "cuda":
        return int((1 - SPARE_PART) * torch.cuda.mem_get_info(device)[0])
    return int((1 - SPARE_PART) * min(limits.memory_bytes(), available_bytes()))


def available_bytes() -> int:
    """Return the memory that the host can give to new processes."""
    if not MEMORY_FACTS.exists():  # another system than Linux
        return limits.memory_bytes()
    facts = dict(line.split(":", 1) for line in MEMORY_FACTS.read_text().splitlines())
    return 1024 * int(facts["MemAvailable"].split()[0])


def private_stdout() -> BinaryIO:
    """Return the stdout for messages. Output of libraries goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[1], type=EngineArguments)
    logs.configure("survey")
    out = private_stdout()
    if arguments.parent_fd is not None:
        exit_with_parent(arguments.parent_fd)

    def tell(message: protocol.Message) -> None:
        out.write(protocol.pack(message))
        out.flush()

    try:
        found = survey(
            arguments.settings, lambda fraction, name: tell(protocol.Status("loading", fraction, name))
        )
    except ValueError as error:
        sys.stderr.write(f"zoo: {error}\n")
        sys.exit(REFUSED)
    tell(found)


if __name__ == "__main__":
    main()
