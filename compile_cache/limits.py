"""The CPU time and memory that this process may use.

Control groups limit containers, pods and systemd units (`docker run --cpus --memory`). Neither affinity nor
sysconf shows these limits. Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> float | None:
    """Return the number of cores whose time the process may use, such as 1.5, or None without a limit."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def memory_bytes() -> int:
    """Return the memory that the process may use: the machine's, or less in a limited control group."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, cgroup v1
            text = _text(group / name)
            if text.isdecimal():  # "max" or an empty text means no limit
                limits.append(int(text))
    return min(limits)


def _quota(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not period:
        quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and the groups above it."""
    for line in _text(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # cgroup v1 has a mount for each controller, v2 has one for all.
        root = MOUNT / controller if controllers else MOUNT
        group = Path(path)
        yield from (root / each.relative_to("/") for each in (group, *group.parents))


def _text(file: Path) -> str:
    """Return a file's text, or "" if it does not exist or cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
