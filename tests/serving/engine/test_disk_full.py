"""An engine process whose disk is full while it compiles."""

from __future__ import annotations

import errno

import pytest

from serving.engine import disk_full

FULL_DISKS = [
    OSError(errno.ENOSPC, "No space left on device", "/x"),
    RuntimeError("g++ failed:\n/usr/bin/ld: final link failed: No space left on device"),
]


@pytest.mark.parametrize("error", FULL_DISKS)
def test_a_full_disk_is_one_line(error, capsys, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE_DIR", "/some/cache")

    def compile_it():
        try:
            raise error
        except (OSError, RuntimeError):
            raise KeyError("inductor")  # noqa: B904

    with pytest.raises(SystemExit) as end, disk_full.one_line_if_full():
        compile_it()
    assert end.value.code == disk_full.REFUSED
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("zoo: no room to compile: the disk of /some/cache or of ")


def test_other_errors_than_a_full_disk_are_raised():
    with pytest.raises(KeyError), disk_full.one_line_if_full():
        raise KeyError("else")
