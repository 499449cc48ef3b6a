"""Measure the client's cost of reading a stream, by HTTP library. `zoo load` must not be limited by its own
client.

    python benchmarks/clients.py

The server is a separate process. It sends fifty streams at once, each of fifty chunks that are 20 ms apart.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import aiohttp
import httpx
import uvloop

PORT = 8911
URL = f"http://127.0.0.1:{PORT}/v1/audio/speech"
STREAMS, ROUNDS, CHUNKS, CHUNK_BYTES = 50, 4, 50, 3840
BODY = {"input": "Good morning.", "response_format": "pcm"}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(CHUNKS):
                writer.write(b"%x\r\n%b\r\n" % (CHUNK_BYTES, bytes(CHUNK_BYTES)))
                await asyncio.sleep(0.02)
            writer.write(b"0\r\n\r\n")
    except asyncio.IncompleteReadError:
        writer.close()


async def serve() -> None:
    async with await asyncio.start_server(answer, "127.0.0.1", PORT) as server:
        print("ready", flush=True)
        await server.serve_forever()


async def by_httpx() -> float:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as client:

        async def read() -> None:
            async with client.stream("POST", URL, json=BODY) as got:
                async for _ in got.aiter_raw():
                    pass

        return await cost(read)


async def by_aiohttp() -> float:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def read() -> None:
            async with client.post(URL, json=BODY) as got:
                async for _ in got.content.iter_any():
                    pass

        return await cost(read)


async def cost(read) -> float:
    """Return the CPU seconds of this process for a chunk, after one warm-up answer."""
    await read()
    began_s = time.process_time()
    for _ in range(ROUNDS):
        await asyncio.gather(*(read() for _ in range(STREAMS)))
    return (time.process_time() - began_s) / (ROUNDS * STREAMS * CHUNKS)


def main() -> None:
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    try:
        time.sleep(1)
        for turn in range(3):
            for name, client in (("httpx", by_httpx), ("aiohttp", by_aiohttp)):
                print(f"{turn + 1}: {name:8} {1e6 * uvloop.run(client()):5.0f} us a chunk", flush=True)
    finally:
        server.terminate()


if __name__ == "__main__":
    uvloop.run(serve()) if sys.argv[1:] == ["serve"] else main()
