"""News from other threads for the engine's loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from serving.engine.job import Job, QueuedRequest
from zoo.contract import Prompt


@dataclass
class News:
    """jobs: new requests whose prompts are made. left: requests whose clients left before that. composed:
    prompts of next passes."""

    jobs: deque[Job] = field(default_factory=deque)
    left: deque[QueuedRequest] = field(default_factory=deque)
    cancelled: dict[str, None] = field(default_factory=dict)  # in order
    fed: deque[tuple[str, list[int], bool]] = field(default_factory=deque)
    consumed: deque[tuple[str, int]] = field(default_factory=deque)
    composed: deque[tuple[Job, Future[Prompt | None]]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.left or self.cancelled or self.fed or self.consumed or self.composed)


class Inbox:
    """`lock` guards the news, and the models' queues of requests. The loop takes all news at once, and sleeps
    until there is some."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.news = News()
        self.is_stopping = False

    def take(self) -> News:
        with self.lock:
            news = self.news
            self.news = News()
        return news

    def put(self, leave: Callable[[News], object]) -> None:
        """Change the news, and wake the loop."""
        with self.lock:
            leave(self.news)
            self.lock.notify()

    def feed(self, id: str, tokens: Sequence[int], is_last: bool) -> None:
        self.put(lambda news: news.fed.append((id, list(tokens), is_last)))

    def consume(self, id: str, frames: int) -> None:
        self.put(lambda news: news.consumed.append((id, frames)))

    def compose(self, job: Job, prompt: Future[Prompt | None]) -> None:
        self.put(lambda news: news.composed.append((job, prompt)))

    def stop(self) -> None:
        with self.lock:
            self.is_stopping = True
            self.lock.notify()

    def sleep(self, seconds: float | None) -> None:
        """Wait for news, or to be stopped; at most so long."""
        with self.lock:
            self.lock.wait_for(lambda: bool(self.news) or self.is_stopping, seconds)
