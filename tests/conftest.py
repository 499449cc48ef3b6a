"""Settings for all tests. They come before the first import of torch: waiting threads must sleep, because on
a busy machine spinning threads turn milliseconds into tens of milliseconds."""

import os
import re

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
        help="which of the tests marked slow or compile run; K/N is part K of N parts, counted from 0",
    )


def part_of(slow: str) -> tuple[int, int]:
    if slow == "none":
        return 0, 0
    found = re.fullmatch(r"(\d+)/(\d+)", slow)
    if found is None or int(found[1]) >= int(found[2]):
        raise pytest.UsageError(
            f"--slow {slow}: possible are all, none, and K/N with K from 0 to N - 1, like 2/5"
        )
    return int(found[1]), int(found[2])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.slow == "all":
        return
    part, parts = part_of(config.option.slow)

    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("slow") is None and item.get_closest_marker("compile") is None:
            return True
        return parts > 0 and crc32(item.nodeid.encode()) % parts == part

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


@pytest.fixture(autouse=True)
def _plain_operators(monkeypatch):
    """Run each test on the operators as written in torch, unless it builds the kernels itself."""
    from zoo.kernels import cpu

    monkeypatch.setattr(cpu, "_library", None)
