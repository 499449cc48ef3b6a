"""The start of a request: what the lanes of a slot read before the first frame."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zoo.contract.spec import Spec
from zoo.request import Request, RequestError


@dataclass(frozen=True, eq=False)
class Lane:
    """The inputs that one lane reads before the first frame. Prefill reads all but the last one; the first
    step reads the last one.

    `prefix_keys` name the positions: two lanes whose keys are equal from the start have equal inputs, so they
    can share pages, whichever slots they belong to.
    """

    inputs: Tensor  # [T, D], the model's dtype and device
    prefix_keys: tuple[int, ...]  # T values of 64 bits
    is_audio: Tensor | None = None  # [T] bool, which inputs are rows of audio; None: no input is

    @property
    def audio_mask(self) -> Tensor:
        """[T] bool, on the inputs' device."""
        if self.is_audio is not None:
            return self.is_audio
        return torch.zeros(len(self.inputs), dtype=torch.bool, device=self.inputs.device)


@dataclass
class Prompt:
    """The start of one pass of a request. `inputs`, `prefix_keys` and `is_audio` belong to its first lane
    (see Lane), which for most families is the only one.

    Guidance is a second lane of the same slot. It reads the same frames after an unconditional prompt, which
    has another length, and `emit` merges the outputs of both lanes. A request without guidance has both lanes
    too, because all requests share one launch.
    """

    inputs: Tensor  # [T, D]
    prefix_keys: tuple[int, ...]
    max_frames: int
    # values of the slot's rows in the state, by name; rows that are not named get their default
    slot: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    null: Lane | None = None  # the second lane, if spec.lanes is 2; with spec.opens_late, once it is open
    opens_lane: bool = False  # whether the model may open the second lane, with spec.opens_late
    max_steps: int = 0  # the most steps that the pass can take; 0: one per frame
    # the steps that usually come before the first frame, of a model that writes before it speaks; 0: all steps
    # that are not one per frame may
    lead_steps: int = 0
    is_audio: Tensor | None = None
    grid_offset: int = 0  # frames before the first point of the window's grid
    past_frames: int = 0  # frames of the renderer's past before the first frame, with spec.past
    # names the whole chunks of these frames that the prompt brings along, one each: equal keys, equal chunks
    past_keys: tuple[int, ...] = ()
    # the number of steps that the text so far allows; None if the text is complete
    num_fed_steps: int | None = None
    conversation: str | None = None  # the request's `conversation`
    is_text: bool = False  # whether the pass gives text and no frame, in at most `max_steps` steps
    is_final: bool = True  # whether this is certainly the last pass of the answer
    expected_s: float = 0.0  # roughly how long its speech is; 0: unknown
    text: str = ""  # the text of the pass, if known
    silence_before: int = 0  # samples of silence before the first pass of an answer
    silence_after: int = 0  # samples of silence behind the speech of this pass

    @property
    def lanes(self) -> tuple[Lane, ...]:
        first = Lane(self.inputs, self.prefix_keys, self.is_audio)
        return (first,) if self.null is None else (first, self.null)

    @property
    def max_positions(self) -> tuple[int, ...]:
        """Return the most positions that each lane can hold: its prompt, and one for each step."""
        steps = self.max_steps or self.max_frames
        if self.opens_lane:  # the second lane is as long as the first one
            return (len(self.inputs) + steps,) * 2
        return tuple(len(lane.inputs) + steps for lane in self.lanes)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the prompt, on any device."""
        lanes = [(lane.inputs, lane.is_audio) for lane in self.lanes]
        values = [*chain(*lanes), *self.slot.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def check_room(self, spec: Spec) -> None:
        """Raise RequestError if the pass needs more positions than the model has."""
        longest = max(self.max_positions)
        if longest > spec.max_positions:
            takes = f"the prompt and {self.max_frames} frames take {longest} positions"
            raise RequestError("text", f"{takes}; the model has {spec.max_positions}")


def following(passes: Generator[Prompt, Tensor, None], frames: Tensor) -> Prompt | None:
    """Send a pass its `frames` and return the next pass, or None at the end of the answer."""
    try:
        return passes.send(frames)
    except StopIteration:
        return None


def frame_cap(
    spec: Spec,
    request: Request,
    num_positions: int,
    expected: int,
    extra_steps: int = 0,
    steps_per_frame: int | Fraction = 1,
    num_text: int | None = None,
) -> int:
    """Return the most frames that a request may make when its prompt takes `num_positions`.

    That is the request's `max_frames`, or else as many of `expected` frames as fit; never more than
    `spec.max_frames`.
    extra_steps: positions that the model takes in addition to those of its frames. num_text: the positions of the
    text to speak; None: all. Raises RequestError if the frames do not fit, for the field that takes most of the
    positions.
    """
    room = (spec.max_positions - num_positions - extra_steps) // steps_per_frame
    wanted = min(expected, room) if request.max_frames is None else request.max_frames
    cap = min(spec.max_frames, wanted)
    if 1 <= cap <= room:
        return cap
    others = num_positions - (num_positions if num_text is None else num_text)
    is_recorded = bool(request.references) and 2 * others > num_positions
    param = "max_frames" if room >= 1 else "references" if is_recorded else "text"
    share = f", {others} of them for the references," if is_recorded else ""
    takes = f"the prompt takes {num_positions} positions{share} and leaves room for {max(room, 0)} frames"
    raise RequestError(param, f"{takes}; {max(cap, 1)} are asked for")
