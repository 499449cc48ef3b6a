"""Run the clients of other servers against `zoo serve`, and print a table.

ZOO_VLLM_OMNI=DIR ... python -m tests.clients --output clients
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # the helper `served`

from tests.clients.run import checkout_of, run, servers, table
from tests.clients.suites import SUITES, TEST_SUITES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--output", type=Path, help="where environments and what the programs write are kept")
    parser.add_argument("--only", action="append", help="the name of a project; may be repeated")
    arguments = parser.parse_args()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="clients-"))
    found = {}
    with tempfile.TemporaryDirectory() as directory, servers(Path(directory).resolve()) as running:
        for suite in (*SUITES, *TEST_SUITES):
            code = checkout_of(suite)
            if arguments.only and suite.name not in arguments.only:
                continue
            if code is None:
                print(f"{suite.name} is left out: {suite.variable} names no checkout", file=sys.stderr)
                continue
            found[suite.name] = run(suite, code, output.resolve() / suite.name, running)
    print(table(found))
    return 0 if all(r.is_passed or r.because for results in found.values() for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
