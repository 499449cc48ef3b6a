"""A request on its way through the engine: first queued, then a job with a prompt, pages and a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from serving.engine.device.streams import AsyncCopy
from serving.engine.events import Audio, Event, Failed, Finished, Spoken, Text
from serving.protocol import Answer, Listener
from zoo.contract import Family, Prompt, Spec
from zoo.text.pieces import odd_length
from zoo.text.stops import Writing

NO_AUDIO = (
    "the model ended before its first frame, so there is no audio: another text, voice or seed may give some"
)


class Worker(Protocol):
    """The methods of a request's model that the engine calls (model_worker.py)."""

    family: Family[Any]
    queue: Any
    round: Any
    counters: Any
    forecaster: Any

    def num_pages(self, prompt: Prompt) -> int: ...
    def num_ready(self, slot: int) -> int: ...
    def is_done(self, slot: int) -> bool: ...
    def admit(self, job: Job) -> bool: ...
    def begin_pass(self, job: Job) -> bool: ...
    def release(self, job: Job) -> None: ...
    def feed(self, job: Job, tokens: Sequence[int], is_last: bool) -> None: ...
    def consume(self, job: Job, frames: int) -> None: ...
    def may_step(self, job: Job, is_flexible_time: bool | None = None) -> bool: ...
    def needed_to_resume(self, job: Job) -> list[int]: ...
    def needed_to_admit(self, job: Job) -> list[int]: ...
    def buffered_s(self, job: Job) -> float: ...
    def needs_pages(self, job: Job, is_flexible_time: bool | None = None) -> bool: ...
    def has_use_for_pages(self, job: Job) -> bool: ...
    def grow(self, job: Job) -> bool: ...
    def pause(self, job: Job) -> None: ...
    def resume(self, job: Job) -> bool: ...
    def record_pass(self, job: Job) -> None: ...
    def publish_turn(self, job: Job) -> None: ...
    def keep_answer(self, job: Job) -> None: ...
    def copy_tape(self, job: Job) -> AsyncCopy: ...


@dataclass(eq=False)
class QueuedRequest:
    """A request from when it is accepted. It stands in its model's queue until it has a slot, or its client
    has left."""

    id: str
    model: Worker
    deliver: Callable[[Event], None]
    listener: Listener = Listener()  # noqa: RUF009, it is frozen
    text_bytes: int = 0  # of all passes
    reference_bytes: int = 0
    accepted_s: float = 0.0
    predicted_s: float | None = None  # from then to its first audio, as far as it was known
    must_encode: bool = False  # a recording must be encoded for it
    is_preparing: bool = False  # its prompt is begun
    is_made: bool = False  # its prompt is built
    has_left: bool = False


@dataclass
class HeldPages:
    """The pages of a job in a slot. lanes: of each lane; past: of the renderer's past. saved, saved_past: the
    contents of a paused job's pages. num_past: how many pages of the past hold something already: before the
    job begins those that it shares, and while it is paused those that were saved. committed: the most pages
    that its pass can need. num_skips: smaller requests that were admitted while it lacked pages; too_few: a
    number of free pages that was not enough for it."""

    lanes: list[list[int]] = field(default_factory=list)
    past: list[int] = field(default_factory=list)
    saved: Sequence[AsyncCopy] | None = None
    saved_past: Sequence[AsyncCopy] | None = None
    num_past: int = 0
    committed: int = 0
    num_skips: int = 0
    too_few: int = -1

    @property
    def num_held(self) -> int:
        return sum(map(len, self.lanes)) + len(self.past)

    def drop(self) -> None:
        self.lanes = []
        self.past = []
        self.saved = self.saved_past = None
        self.num_past = 0
        self.too_few = -1


@dataclass
class Past:
    """Results of earlier passes that the next one continues. num_reported: of the delivered samples, those of
    passes that are over."""

    frames: int = 0
    was_cut: bool = False  # whether a pass ended at its cap
    usage: Counter[str] = field(default_factory=Counter)  # of their prompts
    num_samples: int = 0
    num_reported: int = 0
    is_heard: bool = False  # whether audio was delivered


@dataclass(eq=False)
class Job:
    """`prompt` is the pass under way; `passes` gives the next one once it is sent what this one spoke."""

    request: QueuedRequest
    prompt: Prompt
    passes: Generator[Prompt, Tensor, None]
    arrival: int = -1  # in the order in which all models' requests came
    queued_s: float = 0.0  # when it began to wait for a slot
    slot: int = -1
    pages: HeldPages = field(default_factory=HeldPages)
    past: Past = field(default_factory=Past)
    is_composing: bool = False  # this pass is over, and the next one's prompt is being made
    text_tokens: int = 0  # that the model wrote
    unfed: list[tuple[list[int], bool]] = field(default_factory=list)  # text that came while it had no slot
    writing: Writing = field(default_factory=Writing)
    written: list[tuple[int, int]] = field(default_factory=list)  # text tokens, and the frames before each
    # positions behind which its second lane is to open, while it has no pages for it
    opens_lane_at: int | None = None
    num_cached: int = 0  # positions of all prompts that were in the KV cache
    answer: Answer = field(default_factory=Answer)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def model(self) -> Worker:
        return self.request.model

    @property
    def listener(self) -> Listener:
        return self.request.listener

    def deliver(self, event: Event) -> None:
        self.request.deliver(event)

    @property
    def rank(self) -> tuple[bool, int]:
        """The order of admission: flexible requests last, else first come, first served."""
        return self.listener.is_flexible, self.arrival

    @property
    def pass_frames(self) -> int:
        """Frames of the pass under way."""
        return self.model.num_ready(self.slot) if self.slot >= 0 else 0

    @property
    def num_frames(self) -> int:
        return self.past.frames + self.pass_frames

    @property
    def usage(self) -> dict[str, int]:
        usage = self.past.usage.copy()
        usage.update(self.prompt.usage)
        if self.text_tokens:
            usage["text_tokens"] = self.text_tokens
        if self.num_cached and self.model.family.spec.answers:
            usage["cached_tokens"] = self.num_cached
        return dict(usage)

    def ending(self) -> Finished | Failed:
        """Return the last event of a job that was not cut off. An answer may be text alone, and a transcript
        empty."""
        is_written = self.prompt.is_text or (self.text_tokens > 0 and self.model.family.spec.answers)
        if self.num_frames == 0 and not is_written:
            return Failed(NO_AUDIO, code="no_audio")
        is_cut = self.past.was_cut and not self.writing.is_stopped
        return Finished("length" if is_cut else "stop", self.num_frames, self.usage, self.answer)

    def cancelled(self) -> Finished:
        return Finished("cancelled", self.num_frames, self.usage, self.answer)

    def keep_answer(self, tape: Tensor) -> None:
        """Note the tokens of an answer. tape [F, *frame] on the CPU."""
        steps: list[int] = []
        ends: list[int] = []
        for token, num_ready in [*self.written, (-1, len(tape))]:
            for _ in range(num_ready - len(ends)):
                steps.append(-1)
                ends.append(len(steps))
            if token >= 0:
                steps.append(token)
        self.answer = Answer(list(self.model.family.answer_tokens(tape, steps)), ends)

    def report_pass(self) -> None:
        """Tell the client which samples this pass took: it is over, and all of its audio was delivered."""
        past = self.past
        if self.listener.wants_timestamps and self.prompt.text and past.num_samples > past.num_reported:
            self.deliver(Spoken(self.prompt.text, past.num_reported, past.num_samples))
        past.num_reported = past.num_samples

    def pause(self, num_samples: int) -> None:
        """Deliver silence before or behind a pass. It belongs to no frame and to no piece of the text."""
        self.deliver(Audio(np.zeros(num_samples, np.float32), 0))
        self.past.num_samples += num_samples
        self.past.num_reported = self.past.num_samples

    def end_pass(self, spec: Spec) -> Literal["short", "long"] | None:
        """Note whether a pass that is over was cut. Return whether its speech is far too short or long."""
        is_cut = self.pass_frames >= self.prompt.max_frames
        if spec.answers or self.prompt.is_text:  # one token a step, of text or audio
            is_cut |= self.pass_frames + self.text_tokens >= self.prompt.max_steps
        self.past.was_cut |= is_cut
        if not self.prompt.expected_s:
            return None
        odd = odd_length(self.pass_frames / spec.frame_rate_hz, self.prompt.expected_s)
        return None if is_cut and odd == "short" else odd

    def next_pass(self, prompt: Prompt) -> None:
        """Go on with the next pass: this one is spoken."""
        self.past.usage.update(self.prompt.usage)
        self.prompt = prompt
        self.written = []
        self.opens_lane_at = None
        self.is_composing = False

    def write(self, token: int, num_ready: int, is_done: bool) -> None:
        """Record a text token that the model wrote (-1: none), and the frames before it.

        A character is delivered once all its bytes are here, or no more come in this pass.
        """
        if token >= 0:
            self.text_tokens += 1
            self.written.append((token, num_ready))
        text = self.writing.more(self.model.family.detokenize(token) if token >= 0 else b"", is_done)
        if text:
            self.deliver(Text(text))
