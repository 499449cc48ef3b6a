"""Speak many lines through a server that also serves listeners, who are not delayed.

    python examples/batch.py lines.txt spoken --voice slt

A full server answers 503 with Retry-After, and this client waits that long. On a machine without listeners,
`zoo batch` is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[1]))  # for `python examples/...`
from examples.speaking import Refused, checked, connect, run

PARALLEL = 16
MAX_TRIES = 20


async def speak(client: httpx.AsyncClient, line: str, file: Path, fields: dict[str, Any]) -> None:
    """Speak one line into a file. Try again while the server is full."""
    body = {"input": line, "service_tier": "flex", "stream": False, **fields}
    for _ in range(MAX_TRIES):
        answer = await client.post("/v1/audio/speech", json=body, timeout=None)
        if answer.status_code != 503:
            break
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
    await checked(answer)
    part = file.with_name(f".{file.name}")
    part.write_bytes(answer.content)
    part.rename(file)


async def speak_all(
    lines: list[str], folder: Path, server: str, key: str | None, fields: dict[str, Any]
) -> list[str]:
    """Speak all lines and return the errors, one line each."""
    folder.mkdir(parents=True, exist_ok=True)
    places = asyncio.Semaphore(PARALLEL)
    wrong: list[str] = []

    async def one(number: int, line: str) -> None:
        file = folder / f"{number:04d}.{fields['response_format']}"
        if file.exists():
            return
        async with places:
            try:
                await speak(client, line, file, fields)
            except (Refused, httpx.HTTPError) as error:
                wrong.append(f"line {number}: {error}")

    async with connect(server, key) as client, asyncio.TaskGroup() as speaking:
        for number, line in enumerate(lines, 1):
            if line.strip():
                speaking.create_task(one(number, line.strip()))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path, help="a text file")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--key")
    parser.add_argument("--model")
    parser.add_argument("--voice")
    parser.add_argument("--format", dest="response_format", default="mp3")
    given = parser.parse_args()
    names = ("model", "voice", "response_format")
    fields = {name: value for name in names if (value := getattr(given, name)) is not None}
    lines = given.lines.read_text().splitlines()
    if wrong := run(speak_all(lines, given.folder, given.server, given.key, fields)):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
