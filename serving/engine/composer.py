"""Next passes of an answer: their prompts are built on another thread than the engine's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from compile_cache import threads
from serving.engine.device.streams import AsyncCopy, Stream
from serving.engine.inbox import Inbox
from serving.engine.job import Job, Worker
from zoo.contract import Prompt, following


class Composer:
    """stream: for prompts. check_room: raises RequestError for a prompt that never has room."""

    def __init__(self, inbox: Inbox, stream: Stream, check_room: Callable[[Worker, Prompt], None]):
        self.inbox = inbox
        self.stream = stream
        self.check_room = check_room
        self.executor: Executor = ThreadPoolExecutor(1, "compose", threads.use_one_thread)

    def compose(self, job: Job, tape: AsyncCopy) -> None:
        """Begin the prompt that follows a pass of these frames [F, *frame]; it arrives in the inbox. Only
        that thread waits until the device has copied them."""
        job.is_composing = True
        future = self.executor.submit(self._next_prompt, job, tape)
        future.add_done_callback(partial(self.inbox.compose, job))

    def _next_prompt(self, job: Job, tape: AsyncCopy) -> Prompt | None:
        """Raises RequestError."""
        [frames] = tape.tensors()
        with self.stream.here():
            prompt = following(job.passes, frames)
        if prompt is None:
            return None
        if prompt.is_final:
            job.passes.close()  # as in the intake
        self.check_room(job.model, prompt)
        self.stream.finish()  # as in the intake
        return prompt

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
