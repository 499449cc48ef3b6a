"""A voice agent that can be interrupted: recordings or lines of text in, speech out.

    python examples/voice_agent.py --voice slt                       type; a new line interrupts the answer
    python examples/voice_agent.py --voice slt --stt http://127.0.0.1:9000/v1     a line may be the path of a recording

It uses three services, each behind OpenAI's API: speech to text (--stt), chat (--chat), and this project's
server for speech. An interrupted answer is cancelled in all of them, so its slots are freed immediately. The
agent remembers only the part of the answer that was spoken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai

sys.path.append(str(Path(__file__).parents[1]))  # for `python examples/...`
from examples.speaking import Hear, connect, listener, run, sample_rate_hz, sentences, speak

SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".m4a", ".webm")


class Agent:
    """An agent that answers each turn aloud, until the next turn interrupts it."""

    def __init__(
        self,
        chat: openai.AsyncOpenAI,
        llm: str,
        stt: openai.AsyncOpenAI | None,
        voice: httpx.AsyncClient,
        hear: Hear,
        fields: dict[str, Any],
    ) -> None:
        self.chat = chat
        self.llm = llm
        self.stt = stt
        self.voice = voice
        self.hear = hear
        self.fields = fields
        self.history: list[Any] = [
            {"role": "system", "content": "You are spoken with: answer in a few plain sentences."}
        ]
        self.answering: asyncio.Task[None] | None = None

    async def turn(self, said: str) -> None:
        """Begin to answer a turn: a text, or the path of a recording."""
        await self.stop()
        if said.lower().endswith(SOUNDS) and self.stt is not None:
            heard = await self.stt.audio.transcriptions.create(model="whisper-1", file=Path(said))
            said = heard.text
        self.history.append({"role": "user", "content": said})
        self.answering = asyncio.create_task(self.answer())

    async def stop(self) -> None:
        """Stop the answer that is being spoken."""
        if self.answering is not None:
            self.answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.answering

    async def finish(self) -> None:
        if self.answering is not None:
            await self.answering

    async def answer(self) -> None:
        answer = {"role": "assistant", "content": ""}
        asked = list(self.history)
        self.history.append(answer)

        def heard(sentence: str) -> None:
            answer["content"] += sentence
            print(sentence, end="", flush=True)

        await speak(self.voice, sentences(self.written(asked)), self.hear, heard, **self.fields)
        print()

    async def written(self, asked: list[Any]) -> AsyncIterator[str]:
        async with await self.chat.chat.completions.create(
            model=self.llm, messages=asked, stream=True
        ) as deltas:
            async for delta in deltas:
                if delta.choices and delta.choices[0].delta.content:
                    yield delta.choices[0].delta.content


async def lines() -> AsyncIterator[str]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip():
            yield line.strip()


async def converse(turns: AsyncIterator[str], given: argparse.Namespace) -> Agent:
    """Answer all turns, the last one to its end."""
    fields = {
        name: value for name in ("model", "voice", "seed") if (value := getattr(given, name)) is not None
    }
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with contextlib.AsyncExitStack() as open_ones:
        chat = await open_ones.enter_async_context(openai.AsyncOpenAI(base_url=given.chat, api_key=key))
        stt = None
        if given.stt:
            stt = await open_ones.enter_async_context(openai.AsyncOpenAI(base_url=given.stt, api_key=key))
        voice = await open_ones.enter_async_context(connect(given.server, given.key))
        rate_hz = await sample_rate_hz(voice, given.model)
        hear = await open_ones.enter_async_context(listener(given.out, rate_hz))
        agent = Agent(chat, given.llm, stt, voice, hear, fields)
        async for said in turns:
            await agent.turn(said)
        await agent.finish()
    return agent


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--stt", help="an OpenAI-compatible transcription server")
    made.add_argument("--chat", help="an OpenAI-compatible chat server", default="http://127.0.0.1:11434/v1")
    made.add_argument("--llm", help="the model of the chat server", default="llama3.2")
    made.add_argument("--server", default="http://127.0.0.1:8000", help="the speech server")
    made.add_argument("--key")
    made.add_argument("--model")
    made.add_argument("--voice")
    made.add_argument("--seed", type=int, default=1, help="the seed of all sentences, for one voice")
    made.add_argument("--out", type=Path, help="a WAV file; by default ffplay plays")
    return made


if __name__ == "__main__":
    run(converse(lines(), parser().parse_args()))
