"""The flags of `zoo serve` for models on demand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from serving import settings
from serving.cli.common import ON_DEMAND, num_bytes
from serving.settings import Replicas

KEEP_ALIVE, LOAD_WAIT_S = "5m", 300.0
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
POSSIBLE = "use 30s, 5m, 1h30m or a number of seconds; 0 unloads at once, and -1 or always keeps"


@dataclass(frozen=True)
class OnDemand:
    """Flags for models that are loaded when a request asks for them. None: not given."""

    model_dir: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="The server serves the model in each sub-directory of DIR, and loads a model when a request asks for it.",
            rich_help_panel=ON_DEMAND,
        ),
    ] = None
    keep_alive: Annotated[
        str | None,
        Option(
            metavar="DURATION",
            help="An idle model is unloaded after this time (30s, 5m, 1h). 0 unloads it at once, and -1 or always "
            f"keeps it. Default: {KEEP_ALIVE}.",
            rich_help_panel=ON_DEMAND,
        ),
    ] = None
    load_wait: Annotated[
        float | None,
        Option(
            min=1,
            help="A request waits at most this many seconds for its model, and then gets 503. Default: "
            f"{LOAD_WAIT_S:g}.",
            rich_help_panel=ON_DEMAND,
        ),
    ] = None
    model_memory: Annotated[
        str | None,
        Option(
            help="All loaded models together take at most this much memory of the device (40GiB or bytes). Idle models are "
            "unloaded to make room. Default: nine tenths of what is free at the start.",
            rich_help_panel=ON_DEMAND,
        ),
    ] = None

    def settings(self) -> settings.OnDemand | None:
        """Return None without --model-dir. Raises ValueError."""
        if self.model_dir is None:
            if self != OnDemand():
                raise ValueError("--keep-alive, --load-wait and --model-memory need --model-dir")
            return None
        memory_bytes = None if self.model_memory is None else num_bytes(self.model_memory)
        keep_alive_s = seconds_of(KEEP_ALIVE if self.keep_alive is None else self.keep_alive)
        load_wait_s = LOAD_WAIT_S if self.load_wait is None else self.load_wait
        if not math.isfinite(load_wait_s):
            raise ValueError("--load-wait must be a finite number of seconds")
        return settings.OnDemand(keep_alive_s, load_wait_s, memory_bytes)

    def check(self, models: Sequence[str], device_map: str | None, replicas: Replicas) -> None:
        """Raise ValueError for flags that do not go together with --model-dir."""
        if self.model_dir is None:
            return
        if models:
            raise ValueError(f"--model-dir serves the models in {self.model_dir}; leave out {models[0]}")
        if replicas.are_on_ray:
            raise ValueError("--model-dir is for one machine; leave out --replicas and --ray-address")
        if device_map is not None:
            raise ValueError("--device-map is for one model; leave out --model-dir, or --device-map")

    def directories(self) -> dict[str, str]:
        """Return the directories in --model-dir by name. Whether a family recognises them is known once the server
        has looked at them. Raises ValueError."""
        assert self.model_dir is not None, "there is no --model-dir"
        try:
            found = sorted(path for path in self.model_dir.iterdir() if path.is_dir() and path.name[0] != ".")
        except OSError as error:
            raise ValueError(f"{self.model_dir} cannot be read: {error.strerror}") from None
        if not found:
            raise ValueError(f"{self.model_dir} has no directories; each model is a directory in it")
        return {path.name: str(path.resolve()) for path in found}


def seconds_of(text: str) -> float | None:
    """Return a duration in seconds; None for always. Raises ValueError."""
    if text == "always":
        return None
    if re.fullmatch(r"-?\d+(?:\.\d+)?", text):
        return None if text.startswith("-") else float(text)
    if text.startswith("-") and DURATION.fullmatch(text[1:]):
        return None
    if DURATION.fullmatch(text) is None:
        raise ValueError(f"--keep-alive {text[:40]!r} is not a duration; {POSSIBLE}")
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    return sum(float(number) * UNITS_S[unit] for number, unit in parts)
