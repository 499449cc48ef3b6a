"""What the gateway and Ray add to first audio: a server without Ray and one with a replica, asked in turn.

    python benchmarks/gateway.py [--requests 300] [--json]

Both serve the bundled small voice on this machine's CPU. The client leaves after the first audio. Needs the extras
`ray` and `load`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.served import served

BODY = {"input": "Good morning, everybody who is here today.", "voice": "slt", "response_format": "pcm"}
WARM_UP = 20  # requests to each that do not count
PAUSE_S = 0.05  # between requests, for the cancelled one to end


async def first_audio_s(session: aiohttp.ClientSession, url: str) -> float:
    began_s = time.perf_counter()
    async with session.post(f"{url}/v1/audio/speech", json=BODY) as answer:
        assert answer.status == 200, await answer.text()
        await answer.content.readany()
        return time.perf_counter() - began_s


async def in_turn(urls: list[str], count: int) -> np.ndarray:
    """Return the seconds to first audio [requests, servers]. The order of the servers alternates."""
    found = np.zeros((count, len(urls)))
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        for index in range(count):
            for place in range(len(urls))[:: 1 if index % 2 else -1]:
                found[index, place] = await first_audio_s(session, urls[place])
                await asyncio.sleep(PAUSE_S)
    return found[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with served([]) as alone, served(["--ray-address", "local", "--replicas", "1"]) as clustered:
        times_s = asyncio.run(in_turn([alone, clustered], options.requests + WARM_UP))
    figures = {}
    for quantile in (50, 99):
        alone_ms, clustered_ms = 1e3 * np.percentile(times_s, quantile, axis=0)
        figures |= {f"alone_p{quantile}_ms": alone_ms, f"clustered_p{quantile}_ms": clustered_ms}
    figures["added_p50_ms"] = 1e3 * float(np.median(times_s[:, 1] - times_s[:, 0]))
    rounded = {name: round(float(value), 2) for name, value in figures.items()}
    print(json.dumps(rounded) if options.json else rounded)


if __name__ == "__main__":
    main()
