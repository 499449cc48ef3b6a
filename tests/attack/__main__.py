"""Attack a server on this machine, and print what was tried and what failed.

    python -m tests.attack [NAME ...]

Attacks start their own servers on loopback ports, with tiny demo checkpoints. `crowding` asks the engine on a
virtual clock, and `emulating` runs tests that emulate a GPU. Time and memory are bounded.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.attack import (
    answering,
    connecting,
    crowding,
    decoding,
    demanding,
    emulating,
    flooding,
    hanging,
    holding,
    publishing,
    stopping,
    trusting,
)
from tests.attack.report import Row, table

ATTACKS = {
    "stopping": stopping.attack,
    "long-texts": flooding.long_texts,
    "recordings": flooding.recordings,
    "decoding": decoding.attack,
    "holding": holding.attack,
    "hanging": hanging.attack,
    "connecting": connecting.attack,
    "trusting": trusting.attack,
    "answering": answering.attack,
    "publishing": publishing.attack,
    "demanding": demanding.attack,
    "crowding": crowding.attack,
    "emulating": emulating.attack,
}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(ATTACKS):
        print(
            f"unknown attack: {', '.join(sorted(unknown))}; use {', '.join(ATTACKS)}",
            file=sys.stderr,
        )
        return 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="zoo-attack-") as directory:
        try:
            for name in names or ATTACKS:
                began = time.monotonic()
                rows += ATTACKS[name](Path(directory))
                print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        finally:
            print(table(rows) if rows else "nothing was tried")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
