"""Set before anything imports torch: threads that wait must sleep, or a busy machine turns milliseconds into
tens of them."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# sums are cut among threads: with one, the number of cores changes no last bit
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True)
def _plain_operators(monkeypatch):
    """What a test builds is gone after it: the others run on the operators as they are written in torch."""
    from zoo.nn import kernels

    monkeypatch.setattr(kernels, "_library", None)
