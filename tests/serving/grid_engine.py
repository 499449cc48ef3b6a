"""An engine of the toy whose windows lie on a grid, and requests to it."""

from __future__ import annotations

import time

import pytest
from models import Clock, family

import zoo
from serving.engine.engine import Engine
from zoo.request import Request

TOY = family("toy_grid")
TEXT = "Once there was a small house near the river."
LAGS = pytest.mark.parametrize("report_lag", [0, 1])


def engine(model: zoo.Family = TOY, **settings) -> Engine:
    return Engine(model, **{"max_slots": 2, "compile": False, "report_lag": 0, "clock": Clock(), **settings})


def asked(**fields) -> Request:
    return Request(**{"text": TEXT, "seed": 3, "max_frames": 30, **fields})


def run(room: Engine) -> None:
    """Until all have ended."""
    for _ in range(3000):
        if not room.num_requests:
            return
        if not room.turn():
            time.sleep(0.001)
    raise AssertionError("the engine does not come to an end")
