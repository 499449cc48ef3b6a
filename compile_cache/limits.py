"""What this process may use of its machine. What limits a container, a pod or a unit (`docker run --cpus --memory`) is its
control group, of which neither affinity nor sysconf says anything (Linux: Documentation/admin-guide/cgroup-v2.rst, and
cgroup-v1/)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> float | None:
    """How many cores' time it may take, as in 1.5; None where that is not limited."""
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def memory_bytes() -> int:
    """The machine's, or less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of cgroup v2, and of v1
            text = _text(group / name)
            if text.isdecimal():  # else "max", or nothing
                limits.append(int(text))
    return min(limits)


def _quota(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not period:
        quota, period = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _groups(controller: str) -> Iterator[Path]:
    """Of this process: its group, and those that it lies in, as far as they are seen from here."""
    for line in _text(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = MOUNT / controller if controllers else MOUNT  # of cgroup v1, and of v2
        group = Path(path)
        yield from (root / each.relative_to("/") for each in (group, *group.parents))


def _text(file: Path) -> str:
    """Nothing where there is no such file, or it may not be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
