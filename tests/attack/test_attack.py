"""A part of the attack: seconds of `python -m tests.attack`."""

import signal

import pytest

from tests.attack import stopping
from tests.attack.report import Row, table


@pytest.mark.slow
def test_nobody_takes_a_cut_answer_for_the_whole(tmp_path, monkeypatch):
    """All processes of a server with 8 open answers are told to stop: none of them can be over by then."""
    monkeypatch.setattr(stopping, "OPEN", 8)
    signals = [(name, signal.SIGTERM) for name in ("engine", "http", "supervisor")]
    row = stopping.stop("SIGTERM to all", signals, tmp_path, whole=["none is"] * 8)
    assert row.failed == 0 and row.tried == 8, row


def test_what_failed_is_in_the_table():
    assert table([Row("one", 3, 1, "503")]).splitlines()[1].split() == ["one", "3", "1", "503"]
