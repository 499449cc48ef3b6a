"""A request on its way through the engine, and what its listener is told."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from zoo.contract import Prompt

if TYPE_CHECKING:
    from serving.engine.model_worker import ModelWorker
    from serving.engine.streams import AsyncCopy

NO_AUDIO = (
    "the model ended before its first frame, so there is no audio: another text, voice or seed may give some"
)


@dataclass(frozen=True)
class Audio:
    """samples [N] float32; `frames` frames of the tape."""

    samples: np.ndarray
    frames: int


@dataclass(frozen=True)
class Text:
    """What the model wrote, from where the last such event ended: whole characters."""

    text: str


@dataclass(frozen=True)
class Spoken:
    """A piece of the text, all of whose audio was delivered: the answer's samples start .. stop."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Finished:
    """reason: "stop" (the model ended), "length" (a pass reached its cap) or "cancelled"; usage: the prompt's, and
    `text_tokens` that the model wrote, if any. No event follows."""

    reason: str
    frames: int
    usage: dict[str, int]


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on with this request. No event follows."""

    message: str
    code: str = "engine_failed"


Event = Audio | Text | Spoken | Finished | Failed


@dataclass(eq=False)
class Place:
    """Of a request in its model's line: from when it is accepted until it has a slot, or has left."""

    id: str
    model: ModelWorker
    deliver: Callable[[Event], None]
    is_pinned: bool
    text_bytes: int
    reference_bytes: int
    accepted_s: float
    predicted_s: float | None  # from then to its first audio, as far as it was known
    is_metered: bool = False  # whether its listener says what it takes
    is_flex: bool = False  # whether it is served while nobody else is in need
    speed: float = 1.0  # at which its listener plays
    is_timed: bool = False  # whether its listener is told which samples a piece of its text took
    is_preparing: bool = False  # whether its prompt is begun
    is_made: bool = False  # whether that is there
    has_left: bool = False


@dataclass(eq=False)
class Job:
    """`prompt` is the pass under way; `passes` gives the next one once it is sent what this one spoke."""

    id: str
    model: ModelWorker
    prompt: Prompt
    passes: Generator[Prompt, Tensor, None]
    deliver: Callable[[Event], None]
    # whether windows are cut by frame number, so that equal requests give equal bytes
    is_pinned: bool = False
    is_made: torch.cuda.Event | None = None  # when the device has the prompt
    text_bytes: int = 0  # of all passes
    accepted_s: float = 0.0
    predicted_s: float | None = None  # from then to its first audio
    # delivered by earlier passes and not taken; None: its listener does not say
    unread_frames: int | None = None
    is_flex: bool = False
    speed: float = 1.0
    is_timed: bool = False
    is_heard: bool = False  # whether audio of it was delivered
    arrival: int = -1  # its place in the order in which all models' requests came
    queued_s: float = 0.0  # when it, or its pass, began to wait for a slot
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)  # of each lane
    saved: AsyncCopy | None = None  # of a paused one, what its pages held
    committed: int = 0  # pages that its pass can ever need
    num_passed: int = 0  # by smaller ones, while it lacked pages
    lacked: int = -1  # the free pages that were too few for it
    is_composing: bool = False  # this pass is over, and the next one's prompt is being made
    text_tokens: int = 0
    past_frames: int = 0  # of the passes before this one
    num_samples: int = 0  # that were delivered
    num_told: int = 0  # of them, those of passes that are over
    was_cut: bool = False  # whether a pass so far ended at its cap
    past_usage: dict[str, int] = field(default_factory=dict)  # likewise
    plays_until_s: float = -np.inf  # of a listener who has heard an earlier pass
    # text that came while the job had no slot
    unfed: list[tuple[list[int], bool]] = field(default_factory=list)
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    @property
    def rank(self) -> tuple[bool, int]:
        """Who goes before whom."""
        return self.is_flex, self.arrival

    @classmethod
    def of(
        cls,
        place: Place,
        prompt: Prompt,
        passes: Generator[Prompt, Tensor, None],
        is_made: torch.cuda.Event | None,
    ) -> Job:
        return cls(
            place.id,
            place.model,
            prompt,
            passes,
            place.deliver,
            place.is_pinned,
            is_made,
            place.text_bytes,
            place.accepted_s,
            place.predicted_s,
            is_flex=place.is_flex,
            speed=place.speed,
            is_timed=place.is_timed,
            unread_frames=0 if place.is_metered else None,
        )

    @property
    def pass_frames(self) -> int:
        """Of the pass under way."""
        return int(self.model.scheduler.num_ready[self.slot]) if self.slot >= 0 else 0

    @property
    def num_frames(self) -> int:
        return self.past_frames + self.pass_frames

    def spoken(self) -> Finished | Failed:
        """The end of one that was not cut off."""
        if self.num_frames == 0:
            return Failed(NO_AUDIO, code="no_audio")
        return Finished("length" if self.was_cut else "stop", self.num_frames, self.usage)

    def cancelled(self) -> Finished:
        return Finished("cancelled", self.num_frames, self.usage)

    @property
    def usage(self) -> dict[str, int]:
        counts = [self.past_usage, self.prompt.usage]
        if self.text_tokens:
            counts.append({"text_tokens": self.text_tokens})
        return {
            name: sum(count.get(name, 0) for count in counts)
            for name in dict.fromkeys(k for c in counts for k in c)
        }

    def tell_spoken(self) -> None:
        """This pass is over, and all of its audio was delivered."""
        if self.is_timed and self.prompt.text and self.num_samples > self.num_told:
            self.deliver(Spoken(self.prompt.text, self.num_told, self.num_samples))
        self.num_told = self.num_samples

    def next_pass(self, prompt: Prompt) -> None:
        """This pass is spoken, and its slot was given back."""
        self.past_usage = {name: value for name, value in self.usage.items() if name != "text_tokens"}
        self.prompt, self.is_composing = prompt, False

    def write(self, token: int, is_done: bool) -> None:
        """The model wrote a text token (-1: none). A character is delivered once all its bytes are here, or
        no more come."""
        self.text_tokens += token >= 0
        is_end = is_done and self.prompt.is_final
        text = self.characters.decode(self.model.family.detokenize(token) if token >= 0 else b"", is_end)
        if text:
            self.deliver(Text(text))
