"""The rules that all sessions share (serving/http/socket.py)."""

import asyncio

import pytest

from serving.http.socket import Socket, ended

TEXT = {"type": "websocket.receive", "text": "{}"}


@pytest.mark.parametrize("num_turns", range(6))
def test_a_message_that_comes_with_a_cancellation_does_not_undo_it(num_turns):
    """asyncio.wait_for of Python 3.11 does: if its work is done when the cancellation comes, it returns the result."""

    async def run():
        messages = asyncio.Queue()
        socket = Socket(messages.get, None, 60.0, lambda: False, lambda: None)

        async def listen():
            while True:
                await socket.next()

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0.01)
        messages.put_nowait(TEXT)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await ended(listening)
        assert listening.cancelled()

    asyncio.run(run())
