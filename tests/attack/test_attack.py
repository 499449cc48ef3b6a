"""A part of the attack: the seconds of `python -m tests.attack` that fit into the test suite."""

import signal

import pytest

from tests.attack import stopping
from tests.attack.report import Row, table


@pytest.mark.slow
def test_a_cut_answer_never_looks_complete(tmp_path, monkeypatch):
    """Stop all processes of a server with 8 open answers, none of which can be complete by then."""
    monkeypatch.setattr(stopping, "OPEN", 8)
    signals = [(name, signal.SIGTERM) for name in ("engine", "http", "supervisor")]
    row = stopping.stop("SIGTERM to all", signals, tmp_path, whole=["none is"] * 8)
    assert row.failed == 0 and row.tried == 8, row


def test_the_table_shows_failures():
    assert table([Row("one", 3, 1, "503")]).splitlines()[1].split() == ["one", "3", "1", "503"]
