"""The types that the engine and the families share.

    request -> Prompt -> slot -> frames on the tape -> samples

A running request holds a *slot*: one row in tensors that live on the device. Each step makes one pass through
paged layers and appends one *frame*, or a part of one, to the slot's *tape*. The renderer reads a *window* of
the tape and returns samples. The engine knows slots, pages, frames and deadlines; it never sees a logit, a
codebook or a latent.

Letters in shapes: B slots in a launch, L lanes per slot, S all slots, T positions, F frames, K codebooks, V
vocabulary, D width, H heads, C channels, N samples, P pages of one sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from compile_cache.strategy import Strategy
from zoo.nn.keys import prefix_key
from zoo.nn.rows import beginning, copy_rows
from zoo.request import AudioClip, Option, Reference, Request, RequestError, Turn
from zoo.text import expected_s, pieces_of

__all__ = [
    "KV",
    "AudioClip",
    "Batch",
    "Family",
    "FamilyFolder",
    "Lane",
    "Option",
    "Prompt",
    "Reference",
    "Request",
    "RequestError",
    "Said",
    "Spec",
    "Speech",
    "State",
    "Turn",
    "View",
    "Window",
    "following",
    "frame_cap",
]


@dataclass(frozen=True)
class KV:
    """The shape of the KV cache: one stack of attention layers that shares a page table."""

    num_layers: int
    num_heads: int
    head_dim: int

    @property
    def row_values(self) -> int:
        """Return the size of one row: the keys (or the values) of one position in one layer."""
        return self.num_heads * self.head_dim

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self.num_layers * 2 * self.row_values * dtype.itemsize


@dataclass(frozen=True)
class Window:
    """The stretches of the tape that `render` accepts, in frames. The engine picks when a stretch is
    rendered; this class fixes its shapes.

    sizes: the shapes of a launch, ascending. A shorter stretch is padded up to one of them.
    lookahead: the frames after a stretch that `render` also reads. They must be on the tape before the
    stretch is rendered, unless the speech ends there.
    left: the frames before a stretch that `render` reads again.
    grid: a stretch ends at `Prompt.grid_offset` plus a multiple of the grid, or at the end of the speech.
    hold_samples: the most samples that `render` may hold back until the next stretch. The last stretch
    returns all of them.
    lengths: for a decoder that reads a growing past, the padded lengths of everything up to a stretch's end,
    ascending. Empty for other decoders.

        tape      0        25        50        75         grid 25, grid_offset 0, lookahead 3
        ready     ............................... 78 ->   the stretch 50 .. 75 may be rendered
        left                    <---|                     and reads these frames again
    """

    sizes: tuple[int, ...] = (1, 4, 25)
    lookahead: int = 0
    left: int = 0
    grid: int = 1
    hold_samples: int = 0
    lengths: tuple[int, ...] = ()

    def bucket(self, frames: int) -> int:
        """Return the smallest size that holds `frames` frames, or the largest size if none does."""
        return next((n for n in self.sizes if n >= frames), self.sizes[-1])

    def length_bucket(self, stop: int) -> int:
        """Return the smallest length that holds everything up to frame `stop`, or 0 without `lengths`."""
        if not self.lengths:
            return 0
        assert stop <= self.lengths[-1], (
            f"a window ends at frame {stop}, beyond the longest length {self.lengths[-1]}"
        )
        return next(n for n in self.lengths if n >= stop)


@dataclass(frozen=True)
class Spec:
    """The facts about a model that the engine and its users may know."""

    family: str
    variant: str
    frame_shape: tuple[int, ...]
    frame_dtype: torch.dtype
    frame_samples: int
    sample_rate_hz: int
    kv: KV
    width: int  # D of the LM's inputs
    max_frames: int  # of the longest tape
    max_positions: int  # of a prompt and its tape together
    window: Window
    lanes: int = 1
    # shape of the noise that one frame is solved from; empty if frames are not solved from noise
    noise_shape: tuple[int, ...] = ()
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    # "voice" (built-in voices), "instruct", "design" (a voice from instructions), "clone" (of a reference)
    modes: tuple[str, ...] = ()
    # the shortest and the longest reference; None if the model takes no references
    reference_s: tuple[float, float] | None = None
    max_references: int = 1
    needs_transcript: bool = False  # whether a reference's words must be given
    options: tuple[Option, ...] = ()  # everything else that a request may set, including the sampling fields
    # field that the model does not take -> what to use instead
    hints: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # for messages; family and variant if empty
    feeds: bool = False  # whether text may arrive while the model speaks
    # strings that are a single token in fed text; each begins with "[" or "<"
    tags: tuple[str, ...] = ()
    listens: bool = False  # whether a request may hold turns of a conversation
    # whether the next turn of a conversation can reuse the KV cache of generated frames
    shares_turns: bool = False
    licence: str = ""  # of the weights, if it limits their use
    # The longest text that the model speaks well in one pass, in seconds of `zoo.text.expected_s`. A longer
    # text is split into pieces. None: a text is never split.
    piece_s: float | None = None
    # whether later pieces continue in the voice of the first one if the request has no reference:
    # `Family.later_prompt`
    keeps_voice: bool = False
    # a pattern that matches a prefix of the text that applies to all of it; it is repeated before each piece
    lead: str = ""
    # whether voices can be mixed by adding up their speaker vectors: `zoo.request.shares`
    mixes: bool = False
    unsplit: str = ""  # a pattern; a text in which it is found is never split

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.frame_samples


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
) -> int:
    """Return the most frames that a request may make when its prompt takes `num_positions`.

    That is the request's `max_frames`, or else as many of `expected` frames as fit; never more than
    `spec.max_frames`.
    extra_steps: positions that the model takes in addition to those of its frames. Raises RequestError if the
    frames do not fit.
    """
    room = (spec.max_positions - num_positions - extra_steps) // steps_per_frame
    wanted = min(expected, room) if request.max_frames is None else request.max_frames
    cap = min(spec.max_frames, wanted)
    if not 1 <= cap <= room:
        takes = f"the prompt takes {num_positions} positions and leaves room for {max(room, 0)} frames"
        raise RequestError("text", f"{takes}; {max(cap, 1)} are asked for")
    return cap


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
    null: Lane | None = None  # the second lane, if spec.lanes is 2
    max_steps: int = 0  # the most steps that the pass can take; 0: one per frame
    is_audio: Tensor | None = None
    grid_offset: int = 0  # frames before the first point of the window's grid
    # the number of steps that the text so far allows; None if the text is complete
    num_fed_steps: int | None = None
    conversation: str | None = None  # the request's `conversation`
    is_final: bool = True  # whether this is certainly the last pass of the answer
    expected_s: float = 0.0  # roughly how long its speech is; 0: unknown
    text: str = ""  # the text of the pass, if known

    @property
    def lanes(self) -> tuple[Lane, ...]:
        first = Lane(self.inputs, self.prefix_keys, self.is_audio)
        return (first,) if self.null is None else (first, self.null)

    @property
    def max_positions(self) -> tuple[int, ...]:
        """Return the most positions that each lane can hold: its prompt, and one for each step."""
        steps = self.max_steps or self.max_frames
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


@dataclass
class Batch:
    """The addresses that a launch reads and writes. Shapes are fixed; the tensors live on the device, and the
    host fills them.

    A step has one sequence for each lane of each slot, in blocks of B: all first lanes, then all second ones.
    A prefill has N sequences of any slots and lanes. The sequences are packed: sequence n owns positions
    cu_seqlens[n]:cu_seqlens[n+1]. `page_table` counts rows of `kv`: layer 0's keys of a page begin at its row
    in the table, its values `page_tokens` rows later, and each further layer 2 * page_tokens rows later.
    """

    slots: Tensor  # [B], the slots of a step (unused in a prefill)
    positions: Tensor  # [T], each input's position in its sequence; in a step, T is L * B
    kv_write_index: Tensor  # [T], the row of kv that receives layer 0's key of each input
    page_table: Tensor  # [N, P], the row of kv where each page begins; in a step, N is L * B
    kv_lens: Tensor  # [N], positions in the KV cache, including those of this launch
    cu_seqlens: Tensor  # [N + 1]
    kv: Tensor  # [rows, H, D], the family's view of the byte arena
    page: Tensor  # [page_tokens], the positions within a page; its shape tells a graph the page size
    # [T] bool, whether each input is a row of audio. `Family.step` replaces it: true for all but a prompt's
    # last input, which may be text.
    is_audio: Tensor

    @property
    def page_tokens(self) -> int:
        return self.page.shape[0]


@dataclass
class View:
    """The stretches of tape to render, one per slot: frames start .. start + count, padded to `frames`."""

    slots: Tensor  # [B]
    start: Tensor  # [B]
    count: Tensor  # [B], at most `frames`; 0 if only held samples are left
    is_last: Tensor  # [B] bool, whether the speech ends with this stretch
    frames: int  # the launch's shape, one of `Window.sizes`
    length: int = 0  # one of `Window.lengths`, at least start + count; 0 if the decoder reads no growing past


SMALL_ROW = 64  # values; a longer row is filled on the device


class State:
    """The tensors of all slots: one row per slot, and a spare last row that padding reads and writes.
    Families add tensors with `add`.

    tape [S+1, F, *frame]: the frames.
    ready [S+1], limit [S+1]: the number of frames on the tape, and the most that it may get.
    steps [S+1], done [S+1], seed [S+1]: the number of steps made, whether the slot has ended, and its seed.
    first [S+1, L, D], first_is_audio [S+1, L]: the last input of each lane's prompt, which the first step
    reads, and whether it is audio.
    written [S+1]: the text token of the last step, or -1.
    noise [F, *noise]: replaces the noise that each step draws, in every slot, unless it is None. See
    `zoo.generate`.
    """

    seed: Tensor
    limit: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        rows = slots + 1
        self.spare, self.device = slots, device
        self._defaults: dict[str, float] = {}
        self.tape = torch.zeros(rows, max_frames, *spec.frame_shape, dtype=spec.frame_dtype, device=device)
        self.ready = torch.zeros(rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done = torch.ones(rows, dtype=torch.bool, device=device)
        self.first = torch.zeros(rows, spec.lanes, spec.width, dtype=dtype, device=device)
        self.first_is_audio = torch.zeros(rows, spec.lanes, dtype=torch.bool, device=device)
        self.written = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.noise: Tensor | None = None
        self.add("limit", dtype=torch.int64)
        self.add("seed", dtype=torch.int64)

    def add(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, default: float = 0) -> None:
        """Add a tensor [S+1, *shape] under `name`. `open` sets a slot's row to the prompt's value or
        `default`."""
        rows = self.spare + 1
        setattr(self, name, torch.full((rows, *shape), default, dtype=dtype, device=self.device))
        self._defaults[name] = default

    def open(self, slot: int, prompt: Prompt) -> None:
        """Reset a slot's row for a new request. A value shorter than its row fills the beginning of the row.
        Values on the host go to the device in one copy, without synchronizing."""
        lanes, expected = prompt.lanes, self.first.shape[1]
        assert len(lanes) == expected, f"a prompt of {len(lanes)} lanes for a model of {expected}"
        unknown = prompt.slot.keys() - self._defaults.keys()
        assert not unknown, f"the prompt sets {sorted(unknown)}; the state has {sorted(self._defaults)}"
        self.tape[slot].zero_()
        self.first[slot] = torch.stack([lane.inputs[-1] for lane in lanes])
        self.first_is_audio[slot] = torch.stack([lane.audio_mask[-1] for lane in lanes])
        always = {"ready": 0, "steps": 0, "done": False, "written": -1, "limit": prompt.max_frames}
        values: dict[str, Any] = {**self._defaults, **always, **prompt.slot}
        rows = {name: getattr(self, name)[slot : slot + 1] for name in values}  # [1, *shape]
        known = {}  # the rows whose values are on the host
        for name, value in values.items():
            row, default = rows[name], self._defaults.get(name, 0)
            if isinstance(value, Tensor) and value.device.type != "cpu":
                row.fill_(default)
                (row if value.dim() == 0 else row[0, : len(value)]).copy_(value)
            elif not isinstance(value, Tensor) and row.numel() > SMALL_ROW:
                row.fill_(value)
            else:
                known[name] = beginning(row, torch.as_tensor(value), default)
        copy_rows([rows[name] for name in known], list(known.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have a row for each slot, by name."""
        return {
            name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "noise"
        }

    def take_row(self, slot: int, source: State) -> None:
        """Copy slot 0 of `source`, a state of the same family, to `slot`."""
        for name, value in source.tensors().items():
            getattr(self, name)[slot] = value[0]

    def last_frame(self, slots: Tensor) -> Tensor:
        """Return the latest frame of each tape [B, *frame]; undefined if a tape is empty."""
        return self.tape[slots, (self.ready[slots] - 1).clamp(min=0)]

    def window(self, view: View, left: int = 0, lookahead: int = 0) -> Tensor:
        """Return the tape around each stretch [B, left + F + lookahead, *frame]. Frames beyond an end of the
        tape repeat that end."""
        frames = torch.arange(-left, view.frames + lookahead, device=view.start.device)
        at = (view.start[:, None] + frames).clamp(min=0, max=self.tape.shape[1] - 1)  # [B, F]
        return self.tape[view.slots[:, None], at]

    def write(self, slots: Tensor, token: Tensor) -> None:
        """Set the text token of this step [B], -1 for none. Slots that are done are left unchanged, so call
        this before `append` ends one."""
        self.written[slots] = torch.where(self.done[slots], self.written[slots], token)

    def append(self, slots: Tensor, frame: Tensor, ended: Tensor, is_spoken: Tensor | None = None) -> None:
        """Append a frame [B, *frame] to each tape, unless the model `ended` [B] there or `is_spoken` [B] is
        false. Slots that are done are left unchanged."""
        alive, ready = ~self.done[slots], self.ready[slots]
        spoken = alive & ~ended if is_spoken is None else alive & ~ended & is_spoken
        at = ready.clamp(max=self.tape.shape[1] - 1)
        fits = spoken.view(-1, *(1,) * (frame.dim() - 1))
        self.tape[slots, at] = torch.where(fits, frame, self.tape[slots, at])
        self.ready[slots] = ready + spoken
        self.steps[slots] = self.steps[slots] + alive
        self.done[slots] = ~alive | ended | (ready + spoken >= self.limit[slots])


S = TypeVar("S", bound=State)


@dataclass(frozen=True, eq=False)
class Said:
    """The first spoken piece of an answer, whose voice the later pieces continue."""

    text: str
    frames: Tensor  # [F, *frame], on the CPU


class Family(nn.Module, ABC, Generic[S]):
    """A speech LM as four verbs: embed (slot -> the LM's next input), hidden (through the layers), emit
    (hidden -> one frame on the tape) and render (a window of the tape -> samples)."""

    spec: Spec
    strategy: Strategy
    dtype: torch.dtype
    device: torch.device

    # on the host, outside the engine's loop
    @abstractmethod
    def prompt(self, request: Request) -> Prompt:
        """Build the prompt of a request. May be called from several threads. References are encoded here,
        once, and kept. Raises RequestError, whose message says what was given and what is possible.
        `zoo.request.check` refuses everything that `spec` says the model does not take."""

    def prompts(self, request: Request) -> Generator[Prompt, Tensor, None]:
        """Yield the passes (segments, turns) of a text that is not split; they follow each other in one
        stream of audio. Each pass's frames [F, *frame] (on the CPU) are sent back, so that the next pass can
        continue from them. All but the last pass have `is_final=False`."""
        yield self.prompt(request)

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        """Build the prompt of a later piece in the voice of the first one. Only for families whose spec has
        `keeps_voice`."""
        raise AssertionError(f"{self.spec.family} cannot continue in the voice of an earlier piece")

    # when a request enters a slot
    @abstractmethod
    def state(self, slots: int, max_frames: int | None = None) -> S: ...

    def admit(self, state: S, slot: int, prompt: Prompt) -> None:
        state.open(slot, prompt)

    def feed(self, state: S, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """Add text to a slot whose prompt was open -> the number of further steps that it allows. `is_last`:
        no text follows, so the text no longer limits the steps. Raises RequestError if the slot cannot hold
        the text, and then takes none of it. Only for families whose spec has `feeds`."""
        raise AssertionError(f"{self.spec.family} takes no text while it speaks")

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of fed text, for `feed`. The parts that zoo.open_text cuts have the same tokens
        as the whole text. Only for families whose spec has `feeds`."""
        raise AssertionError(f"{self.spec.family} takes no text while it speaks")

    # on the device: shapes are fixed, rows are updated in place, nothing is read back
    @abstractmethod
    def embed(self, state: S, slots: Tensor) -> Tensor:
        """[B] -> the LM's input after each slot's last step [L * B, D]; undefined before a slot's first
        step."""

    @abstractmethod
    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """[T, D] -> [T, D]; also writes the keys and values of the positions to batch.kv."""

    @abstractmethod
    def emit(self, state: S, slots: Tensor, h: Tensor) -> None:
        """Append a frame to each slot's tape, or none, given h [L * B, D]. May write a text token and may set
        done. Slots that are done are left unchanged."""

    @abstractmethod
    def render(self, state: S, view: View) -> tuple[Tensor, Tensor]:
        """Render a stretch of each tape -> samples [B, N] float32 and the number of valid samples [B] int64.
        N depends on `view.frames` only. Advances the decoder's state by `view.count` frames."""

    # on the host, when the engine reads a step's report
    def detokenize(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a text token that the model wrote; a character may span tokens. Only for
        families that write text."""
        raise AssertionError(f"{self.spec.family} wrote the text token {token}, and cannot detokenize it")

    def end_turn(self, prompt: Prompt, frames: Tensor) -> tuple[int, ...]:
        """Remember the frames [F, *frame] (on the CPU) of a prompt for the conversation's next turn. Returns
        one prefix key per frame: those that the next prompt gives the positions after this prompt. Only for
        families whose spec has `shares_turns`."""
        raise AssertionError(f"{self.spec.family} does not share turns")

    # the same for all families
    def passes(self, request: Request) -> Generator[Prompt, Tensor, None]:
        """Yield all passes of one answer: those of `prompts`, or one for each piece of a long text. The
        answer may end after a pass with `is_final=False`. Raises RequestError.

        The seed of piece i is derived from the request's seed and i. `max_frames` limits all pieces together.
        """
        pieces = pieces_of(request, self.spec)
        if len(pieces) == 1:
            passes = self.prompts(replace(request, text=pieces[0]))
            first = next(passes)
            if first.is_final and not request.is_open:
                first.expected_s, first.text = expected_s(pieces[0]), pieces[0]
            whole: Prompt | None = first
            while whole is not None:
                whole = following(passes, (yield whole))
            return
        left = request.max_frames
        said: Said | None = None
        for i, piece in enumerate(pieces):
            seed = prefix_key(request.seed, i) if i else request.seed
            asked = replace(request, text=piece, seed=seed, max_frames=None)
            prompt = self.prompt(asked) if said is None else self.later_prompt(asked, said)
            prompt.is_final = i == len(pieces) - 1
            prompt.expected_s, prompt.text = expected_s(piece), piece
            if left is not None:
                prompt.max_frames = min(prompt.max_frames, left)
            frames = yield prompt
            if left is not None:
                left -= len(frames)
                if left == 0:
                    return
            if self.spec.keeps_voice and not request.references and said is None and len(frames):
                said = Said(piece, frames.clone())  # a copy, because the slot is reused

    def step(self, state: S, batch: Batch) -> Tensor:
        """Run one step of every slot of the launch -> the report [B, 3]: frames ready, whether the slot is
        done, and the text token of this step or -1. A slot's first step reads the prompt's last input, so
        prefill never emits; only this function does."""
        # `unbind` makes the number of lanes a constant of the graph. A tensor size that differs between
        # models would become a variable there.
        slots, first = batch.slots, state.first[batch.slots].unbind(1)  # L of [B, D]
        # a graph for any B needs this fact
        torch._check(batch.positions.shape[0] == len(first) * slots.shape[0])
        is_first = (state.steps[slots] == 0).repeat(len(first))  # [L B]
        inputs = torch.where(is_first[:, None], torch.cat(first), self.embed(state, slots))  # [L B, D]
        first_is_audio = torch.cat(state.first_is_audio[slots].unbind(1))  # [L B]
        batch = Batch(
            slots=slots,
            positions=batch.positions,
            kv_write_index=batch.kv_write_index,
            page_table=batch.page_table,
            kv_lens=batch.kv_lens,
            cu_seqlens=batch.cu_seqlens,
            kv=batch.kv,
            page=batch.page,
            is_audio=first_is_audio | ~is_first,
        )
        self.emit(state, slots, self.hidden(inputs, batch))
        return torch.stack((state.ready[slots], state.done[slots].long(), state.written[slots]), 1)


class FamilyFolder(Protocol):
    """The interface that makes a folder of `zoo/` a family."""

    NAME: str

    def claims(self, path: Path) -> bool:
        """Return whether this family can load the model directory `path`."""

    def load(
        self, directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
    ) -> Family[Any]:
        """Load the family with its weights and the adapter in directory `adapter`. Raises ValueError that
        names the fault, also for an adapter if the family does not take one."""

    def survey(self, directory: Path) -> tuple[Spec, int]:
        """Return the spec and the number of parameters without reading the weights. Raises ValueError."""

    def write_demo(
        self, directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None
    ) -> Path:
        """Write a random checkpoint in the published layout. Raises ValueError, OSError."""


@dataclass
class Speech:
    frames: Tensor  # [F, *frame]
    samples: Tensor  # [N] float32
    sample_rate_hz: int
    text: str = ""  # written by the model
