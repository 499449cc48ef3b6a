"""The processor of this machine: its name, and the instructions that compilers use."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

FACTS = Path("/proc/cpuinfo")
# Compilers use these without being asked (-march=native). Other flags of an x86 processor change with the
# kernel.
COMPILED_FOR = re.compile("sse|ssse|avx|amx|apx|fma|f16c|bmi|abm|popcnt|movbe|gfni|vaes|vpclmul|xop|tbm")


def model() -> str:
    """Return the processor's name as the system gives it, or else its architecture."""
    return facts().get("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that compiled code may use. Only Linux tells them."""
    of_x86 = [name for name in facts().get("flags", "").split() if COMPILED_FOR.match(name)]
    return sorted(of_x86 or facts().get("Features", "").split())


@cache
def facts() -> dict[str, str]:
    """Return the facts that the system lists of the first processor, by name."""
    lines = FACTS.read_text().partition("\n\n")[0].splitlines() if FACTS.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
