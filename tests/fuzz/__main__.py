"""Send thousands of generated requests to a server on this machine, and print the outcomes.

    python -m tests.fuzz [schema] [recordings] [documents] [conversations] [texts] [--examples 2000] [--seed 0]

    schema      valid and invalid requests by the OpenAPI schema, route by route (schemathesis)
    recordings  audio files of every kind, cut, flipped and spliced, as ref_audio and as uploaded voices (hypothesis)
    documents   EPUB, Markdown and text, cut, flipped and spliced, as works (hypothesis)
    conversations   sequences of events in realtime sessions, valid and not (hypothesis)
    texts       messages of sessions that take text while they speak, valid and not (hypothesis)

The server is a complete `zoo serve` with tiny demo checkpoints. Every answer must be in the schema and none
may be a 500. No process may end, the log may hold no error, and afterwards the server must speak as before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import conversations, documents, recordings, schema, texts
from tests.fuzz.target import fuzzed

PARTS = {
    "schema": schema.fuzz,
    "recordings": recordings.fuzz,
    "documents": documents.fuzz,
    "conversations": conversations.fuzz,
    "texts": texts.fuzz,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--examples", type=int, default=2000, help="requests of each part")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-fuzz-") as directory:
        for name in given.parts or PARTS:
            began = time.monotonic()
            with fuzzed(Path(directory)) as target:
                counts = PARTS[name](target, given.examples, given.seed)
            print(f"{name}: {sum(counts.values())} requests in {time.monotonic() - began:.0f} s, none failed")
            for what, num in sorted(counts.items()):
                print(f"  {num:6}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
