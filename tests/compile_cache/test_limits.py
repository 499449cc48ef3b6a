"""The limits of control groups are read from the kernel's files."""

from __future__ import annotations

import os

import pytest

from compile_cache import limits, threads

MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1 = "4:memory:{0}\n2:cpu,cpuacct:{0}\n1:name=systemd:/x\n0::/\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")

    def write(own: str, **files: str) -> None:
        """Write /proc/self/cgroup, and files of control groups by their paths."""
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    return write


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory_bytes"),
    [
        ("0::/\n", {}, None, MACHINE_BYTES),
        ("0::/\n", {"cpu.max": "150000 100000", "memory.max": "1000000"}, 1.5, 1000000),
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, None, MACHINE_BYTES),
        # a unit in a slice: the lower limit of both
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "200000 100000", "a/memory.max": "7"}, 0.5, 7),
        ("0::/a:b\n", {"a:b/memory.max": "7"}, None, 7),
        # the group of another controller does not count
        ("4:memory:/m\n2:cpu:/c\n", {"cpu/m/cpu.cfs_quota_us": "5", "cpu/m/cpu.cfs_period_us": "10"}, None, MACHINE_BYTES),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "400000"}, None, MACHINE_BYTES),
        # a container sees its own group as the root, but may read the host's path
        (V1.format("/pod/one"), {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0, MACHINE_BYTES),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, MACHINE_BYTES),
        (V1.format("/pod"), {"memory/pod/memory.limit_in_bytes": "9"}, None, 9),
        (V1.format("/pod"), {"memory/pod/memory.limit_in_bytes": str(2**63 - 4096)}, None, MACHINE_BYTES),
    ],
)  # fmt: skip
def test_the_lowest_limit_of_all_groups_counts(write, own, files, cores, memory_bytes):
    write(own, **files)
    assert (limits.cores(), limits.memory_bytes()) == (cores, memory_bytes)


def test_without_control_groups_there_are_no_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "OWN", tmp_path / "none")
    assert (limits.cores(), limits.memory_bytes()) == (None, MACHINE_BYTES)


@pytest.mark.parametrize(
    ("quota", "given", "threads_of_16"),
    [
        ("max 100000", None, 16),
        ("250000 100000", None, 2),
        ("50000 100000", None, 1),
        ("250000 100000", "8", 16),
    ],
)
def test_a_large_model_has_no_more_threads_than_cores(write, monkeypatch, quota, given, threads_of_16):
    """OMP_NUM_THREADS overrides this."""
    write("0::/\n", **{"cpu.max": quota})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads.threads_of_quota(16) == threads_of_16
