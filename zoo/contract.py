"""Every type that crosses rooms: what a family is, and what the engine hands it.

    request -> Prompt -> slot -> frames on the tape -> samples

A running request holds a *slot*: one row in tensors that live on the device. Each step makes one pass through paged layers and appends
one *frame* to the slot's *tape*. The renderer reads a *window* of the tape and returns samples. The engine knows slots, pages, frames and
deadlines; it never sees a logit, a codebook or a latent.

Letters, everywhere: B slots in a launch, L lanes per slot, S all slots, T positions, F frames, K codebooks, V vocabulary, D width,
H heads, C channels, N samples, P pages of one sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from compile_cache.strategy import Strategy

Layout = Literal["whole", "streaming"]


@dataclass(frozen=True, eq=False)
class Clip:
    """Recorded audio: samples float32, [N] mono or [C, N], as loud as they are (1 is full scale)."""

    samples: np.ndarray
    sample_rate_hz: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for. `None` means the checkpoint's own default; temperature 0 is greedy.

    `reference` is a voice to speak in and `reference_text` what it says; `x_vector_only` takes the sound of the voice alone from it.
    `layout` says how the text is laid out for the model: "whole" gives all of it before the first frame, "streaming" a token a frame.
    `depth_*` rule the codes after a frame's first one; a temperature of 0 makes them greedy too unless `depth_temperature` says otherwise.
    `guidance` says how far to go from what the model would do without the text (0) to what it does with it (1) and beyond;
    `solver_steps` in how many steps noise becomes a frame. A family refuses what it has no use for.
    """

    text: str
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    reference: Clip | None = None
    reference_text: str | None = None
    x_vector_only: bool = False
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    depth_temperature: float | None = None
    depth_top_k: int | None = None
    depth_top_p: float | None = None
    guidance: float | None = None
    solver_steps: int | None = None
    max_frames: int | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that no model can take: what reaches an engine cannot stop it."""
        for names, least, most in _BOUNDS:
            for name in names:
                value = getattr(self, name)
                if value is not None and not least <= value <= most:  # NaN is in no range
                    raise refuse(name, f"{name} is {value}; from {least:g} to {most:g} is possible")


_TINY, _INT64 = 1e-6, 2**63 - 1
_BOUNDS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("seed",), -_INT64, _INT64),
    (("temperature", "depth_temperature"), 0, 100),
    (("top_k", "depth_top_k"), 0, 2**31),
    (("top_p", "depth_top_p"), _TINY, 1),
    (("repetition_penalty",), 0.01, 100),
    (("guidance",), 0, 100),
    (("solver_steps", "max_frames"), 1, 2**31),
)


@dataclass(frozen=True)
class KV:
    """One stack of attention layers that shares a page table."""

    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def row_values(self) -> int:
        """Values of one row: the keys, or the values, of one position in one layer."""
        return self.num_heads * self.head_dim

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self.num_layers * 2 * self.row_values * dtype.itemsize


@dataclass(frozen=True)
class Window:
    """Which stretches of the tape `render` takes, in frames: `new` frames each (ascending; a shorter stretch is padded up to one).

    right: how many frames beyond a stretch `render` reads. They must be on the tape before it is rendered, unless the tape ends there.
    """

    new: tuple[int, ...] = (1, 4, 25)
    right: int = 0

    def fit(self, frames: int) -> int:
        """The smallest shape that holds `frames` frames, or the largest shape."""
        return next((n for n in self.new if n >= frames), self.new[-1])


@dataclass(frozen=True)
class Spec:
    """The facts of a loaded model that the engine and its users may know."""

    family: str
    variant: str
    frame_shape: tuple[int, ...]
    frame_dtype: torch.dtype
    frame_samples: int
    sample_rate_hz: int
    kv: KV
    width: int  # D, of what the LM reads
    max_frames: int  # the longest tape
    max_positions: int  # the longest prompt and tape together
    window: Window
    lanes: int = 1
    delay: int = 0  # steps from a frame's first code to its last: so many positions follow those of the prompt and the frames
    noise_shape: tuple[int, ...] = ()  # of the noise that one frame is solved from; () where frames are not solved from noise
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()  # "voice" of its own, "instruct", "design" from instructions, "clone" of a reference
    reference_s: tuple[float, float] | None = None  # the shortest and the longest reference, where references are taken

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.frame_samples


def refuse(param: str, message: str) -> ValueError:
    """A ValueError that also says which field of the request it is about."""
    error = ValueError(message)
    error.param = param  # type: ignore[attr-defined]
    return error


@dataclass(frozen=True, eq=False)
class Lane:
    """What one lane reads before the first frame: all but the last input fill pages, the last one is read by the first step.

    `keys` name the positions: equal keys from the start mean equal inputs, so pages can be shared, by the lanes of any slots.
    """

    inputs: Tensor  # [T, D], the model's dtype and device
    keys: tuple[int, ...]  # T values of 64 bits


@dataclass
class Prompt:
    """What a request begins with. `inputs` and `keys` are those of its first lane (see Lane), which for most families is the only one.

    Guidance is a second lane of the same slot: the same speech over a prompt of another length that lacks what guides, and `emit` merges
    what the two say. A request that asks for no guidance has both lanes too: the launch is the same for all.
    """

    inputs: Tensor  # [T, D]
    keys: tuple[int, ...]
    max_frames: int
    slot: dict[str, Any] = field(default_factory=dict)  # what `admit` writes into the slot's row
    usage: dict[str, int] = field(default_factory=dict)
    null: Lane | None = None  # of the second lane, where spec.lanes is 2
    text_steps: int = 0  # the most steps that make no frame because the model writes text

    @property
    def lanes(self) -> tuple[Lane, ...]:
        first = Lane(self.inputs, self.keys)
        return (first,) if self.null is None else (first, self.null)

    def most_positions(self, spec: Spec) -> tuple[int, ...]:
        """All that each lane can ever hold: every step adds one to each."""
        steps = self.text_steps + self.max_frames + spec.delay
        return tuple(len(lane.inputs) + steps for lane in self.lanes)


@dataclass
class Batch:
    """Where a launch reads and writes. Fixed shapes; the tensors live on the device and the host fills them.

    A step has a sequence for each lane of each slot, in blocks of B: all first lanes, then all second ones. A prefill has N sequences of
    any slots and lanes. Sequences lie one after the other: sequence n owns positions starts[n]:starts[n+1]. `rows` counts rows of `kv`:
    layer 0's keys of a page begin at its row in `rows`, the values `page_tokens` rows later, and each further layer 2 * page_tokens rows
    later.
    """

    slots: Tensor  # [B], the slots of a step (unused while prompts are prefilled)
    positions: Tensor  # [T], each input's place in its sequence; of a step, T is L * B
    writes: Tensor  # [T], the row of kv that takes layer 0's key of each input
    rows: Tensor  # [N, P], the row of kv where each page begins; of a step, N is L * B
    lengths: Tensor  # [N], positions in the cache, those of this launch included
    starts: Tensor  # [N + 1]
    kv: Tensor  # [rows, H, D], the family's view of the byte arena
    page_tokens: int


@dataclass
class View:
    """A stretch of tape per slot to be rendered: frames start .. start + count of `frames` (the launch's shape) ones."""

    slots: Tensor  # [B]
    start: Tensor  # [B]
    count: Tensor  # [B], at most `frames`
    frames: int


class State:
    """One row per slot, and a spare row (the last) that padding reads and writes. Tensors only; families add their own.

    tape [S+1, F, *frame]; ready [S+1] frames on the tape, at most limit [S+1]; steps [S+1] emissions made; done [S+1]; seed [S+1];
    first [S+1, L, D], the last input of each lane's prompt, which the first step reads; written [S+1], the text token that the last step
    wrote, or -1. noise [F, *noise] takes the place of what each step draws, in every slot alike, where it is not None: see zoo.generate.
    """

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        rows = slots + 1
        self.spare = slots
        self.tape = torch.zeros(rows, max_frames, *spec.frame_shape, dtype=spec.frame_dtype, device=device)
        self.ready = torch.zeros(rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.limit = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.first = torch.zeros(rows, spec.lanes, spec.width, dtype=dtype, device=device)
        self.written = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.noise: Tensor | None = None

    def open(self, slot: int, prompt: Prompt) -> None:
        """Make a row new: nothing of the request that held it before is left."""
        self.tape[slot] = 0
        self.ready[slot] = 0
        self.steps[slot] = 0
        self.done[slot] = False
        self.limit[slot] = prompt.max_frames
        self.written[slot] = -1
        lanes, expected = prompt.lanes, self.first.shape[1]
        assert len(lanes) == expected, f"a prompt of {len(lanes)} lanes for a model of {expected}"
        self.first[slot] = torch.stack([lane.inputs[-1] for lane in lanes])

    def write(self, slots: Tensor, token: Tensor) -> None:
        """The text token of this step [B], -1 where it writes none; a slot that is done stays as it is, so this comes before its end."""
        self.written[slots] = torch.where(self.done[slots], self.written[slots], token)

    def append(self, slots: Tensor, frame: Tensor, ended: Tensor) -> None:
        """One more frame [B, *frame] on each tape, or none where the model ended [B]; a slot that is done stays as it is."""
        alive, ready = ~self.done[slots], self.ready[slots]
        spoken = alive & ~ended
        at = ready.clamp(max=self.tape.shape[1] - 1)
        fits = spoken.view(-1, *(1,) * (frame.dim() - 1))
        self.tape[slots, at] = torch.where(fits, frame, self.tape[slots, at])
        self.ready[slots] = ready + spoken
        self.steps[slots] = self.steps[slots] + alive
        self.done[slots] = ~alive | ended | (ready + spoken >= self.limit[slots])


class Family(nn.Module, ABC):
    """A speech LM as four verbs: embed (slot -> what the LM reads next), hidden (through the layers), emit (hidden -> one frame on the
    tape) and render (a window of the tape -> samples)."""

    spec: Spec
    strategy: Strategy
    dtype: torch.dtype
    device: torch.device

    # host, off the loop
    @abstractmethod
    def prompt(self, request: Request) -> Prompt:
        """May be called from several threads. What a reference costs is paid here, once, and kept. Raises ValueError for what a user got
        wrong: what came, and what is possible; `.param` names the field (see `refuse`)."""

    # at the door
    @abstractmethod
    def state(self, slots: int, max_frames: int | None = None) -> State: ...

    @abstractmethod
    def admit(self, state: State, slot: int, prompt: Prompt) -> None: ...

    # device: fixed shapes, in place by slot, nothing read back
    @abstractmethod
    def embed(self, state: State, slots: Tensor) -> Tensor:
        """[B] -> what the LM reads after the slot's last step [L * B, D]; anything where there was no step yet."""

    @abstractmethod
    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """[T, D] -> [T, D]; writes the positions' keys and values into batch.kv."""

    @abstractmethod
    def emit(self, state: State, slots: Tensor, h: Tensor) -> None:
        """h [L * B, D] -> one frame on each slot's tape, or none; may write a text token; may set done. A slot that is done is left as it
        is."""

    @abstractmethod
    def render(self, state: State, view: View) -> Tensor:
        """-> samples [B, frames * frame_samples] float32, of which the first count * frame_samples are valid; moves the decoder's past."""

    # host, as reports come in
    def spell(self, token: int) -> bytes:
        """The UTF-8 bytes of a text token that the model wrote; a character may span tokens. For families that write text."""
        raise AssertionError(f"{self.spec.family} wrote the text token {token}, and cannot spell it")

    # written once, here
    def step(self, state: State, batch: Batch) -> None:
        """Everything between two frames, for every slot of the launch. A slot's first step reads the prompt's last input, so filling pages
        never emits and all that emits is this one function."""
        # A list has its length in the graph; a size that differs from model to model becomes a variable there.
        slots, first = batch.slots, state.first[batch.slots].unbind(1)  # L of [B, D]
        torch._check(batch.positions.shape[0] == len(first) * slots.shape[0])  # what a graph for any B has to know
        is_first = (state.steps[slots] == 0).repeat(len(first))[:, None]  # [L B, 1]
        inputs = torch.where(is_first, torch.cat(first), self.embed(state, slots))  # [L B, D]
        self.emit(state, slots, self.hidden(inputs, batch))


@dataclass
class Speech:
    frames: Tensor  # [F, K]
    samples: Tensor  # [N] float32
    sample_rate_hz: int
    text: str = ""  # that the model wrote
