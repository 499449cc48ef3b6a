"""Speak a language model's answer while it is being written, sentence by sentence.

    zoo serve
    python examples/live_llm.py "Tell me of the sea." --chat http://127.0.0.1:11434/v1 --llm llama3.2 --voice slt
    any-program-that-writes | python examples/live_llm.py - --voice slt --out told.wav

The first sentence is spoken when the second one begins. While one sentence plays, the next two are generated.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai

sys.path.append(str(Path(__file__).parents[1]))  # for `python examples/...`
from examples.speaking import connect, listener, run, sample_rate_hz, sentences, speak


async def written(chat: str, llm: str, prompt: str) -> AsyncIterator[str]:
    """Yield the answer of an OpenAI-compatible chat server, delta by delta."""
    async with openai.AsyncOpenAI(base_url=chat, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        asked: Any = [{"role": "user", "content": prompt}]
        async with await client.chat.completions.create(model=llm, messages=asked, stream=True) as deltas:
            async for delta in deltas:
                if delta.choices and delta.choices[0].delta.content:
                    yield delta.choices[0].delta.content


async def read() -> AsyncIterator[str]:
    """Yield text from stdin as it arrives."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may arrive in two parts
    while text := await asyncio.to_thread(os.read, sys.stdin.fileno(), 4096):
        yield decoder.decode(text)
    yield decoder.decode(b"", final=True)


async def shown(deltas: AsyncIterator[str]) -> AsyncIterator[str]:
    async for delta in deltas:
        print(delta, end="", flush=True)
        yield delta


async def tell(
    deltas: AsyncIterator[str], server: str, key: str | None, out: Path | None, fields: dict[str, Any]
) -> None:
    async with connect(server, key) as client:
        rate_hz = await sample_rate_hz(client, fields.get("model"))
        async with listener(out, rate_hz) as hear:
            await speak(client, sentences(deltas), hear, **fields)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", help="the question; - speaks the text on stdin")
    parser.add_argument(
        "--chat", help="an OpenAI-compatible chat server", default="http://127.0.0.1:11434/v1"
    )
    parser.add_argument("--llm", help="the model of the chat server", default="llama3.2")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="the speech server")
    parser.add_argument("--key")
    parser.add_argument("--model")
    parser.add_argument("--voice")
    parser.add_argument("--seed", type=int, default=1, help="the seed of all sentences, for one voice")
    parser.add_argument("--out", type=Path, help="a WAV file; by default ffplay plays")
    given = parser.parse_args()
    fields = {
        name: value for name in ("model", "voice", "seed") if (value := getattr(given, name)) is not None
    }
    deltas = read() if given.prompt == "-" else written(given.chat, given.llm, given.prompt)
    run(tell(shown(deltas), given.server, given.key, given.out, fields))


if __name__ == "__main__":
    main()
