"""The answer of every zoo/FAMILY/reference.py to an order of serving/tools/reference.py.

These scripts run in separate environments, so this module imports nothing that they may lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def answer(
    order: dict[str, Any],
    name: str,
    speak: Callable[[Any], Any],
    measure: Callable[[Any, int, int], dict[str, Any]],
) -> dict[str, Any]:
    """Carry out an order for parity (`requests`, whose samples go to the file `out`) or for a benchmark.

    name: of the reference implementation. speak: request -> samples [N], a text, or both. measure: request,
    streams, rounds -> the facts of one run.
    """
    if "requests" in order:
        spoken: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for key, request in order["requests"].items():
            made = speak(request)
            for part in made if isinstance(made, tuple) else (made,):
                (texts if isinstance(part, str) else spoken)[key] = part
        np.savez(order["out"], **spoken)
        return {"name": name, "texts": texts}
    runs = [measure(order["request"], streams, order["rounds"]) for streams in order["streams"]]
    return {"name": name, "torch": torch.__version__, "threads": torch.get_num_threads(), "runs": runs}


def speed(streams: int, wall_s: float, audio_s: float) -> dict[str, float]:
    """Return the facts of one run that made audio_s of audio in wall_s, in `streams` requests at a time."""
    rates = {"rtf": wall_s * streams / audio_s, "audio_s_per_s": audio_s / wall_s}
    return {"streams": streams, "audio_s": audio_s, "wall_s": wall_s} | rates
