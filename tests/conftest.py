"""Settings for all tests. They come before the first import of torch: waiting threads must sleep, because on
a busy machine spinning threads turn milliseconds into tens of milliseconds."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Threads split sums. With a single thread, results do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        default="all",
        metavar="all|none|K/N",
        help="which of the tests marked slow run; K/N is part K of N parts, counted from 0",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.slow == "all":
        return
    part, parts = (0, 0) if config.option.slow == "none" else map(int, config.option.slow.split("/"))

    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow") is None:
            return True
        return parts > 0 and crc32(item.nodeid.encode()) % parts == part

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


@pytest.fixture(autouse=True)
def _plain_operators(monkeypatch):
    """Run each test on the operators as written in torch, unless it builds the kernels itself."""
    from zoo.kernels import cpu

    monkeypatch.setattr(cpu, "_library", None)
