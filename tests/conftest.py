"""Settings for all tests. They come before the first import of torch: waiting threads must sleep, because on
a busy machine spinning threads turn milliseconds into tens of milliseconds."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Threads split sums. With a single thread, results do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True)
def _plain_operators(monkeypatch):
    """Run each test on the operators as written in torch, unless it builds the kernels itself."""
    from zoo.kernels import cpu

    monkeypatch.setattr(cpu, "_library", None)
