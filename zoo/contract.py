"""Every type that crosses rooms: what a family is, and what the engine hands it.

    request -> Prompt -> slot -> frames on the tape -> samples

A running request holds a *slot*: one row in tensors that live on the device. Each step makes one pass through
paged layers and appends one *frame*, or a part of one, to the slot's *tape*. The renderer reads a *window* of
the tape and returns samples. The engine knows slots, pages, frames and deadlines; it never sees a logit, a
codebook or a latent.

Letters, everywhere: B slots in a launch, L lanes per slot, S all slots, T positions, F frames, K codebooks, V
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
    """Which stretches of the tape `render` takes, in frames. The engine picks when a stretch is rendered,
    this fixes its shapes.

    sizes: the shapes of a launch, ascending; a shorter stretch is padded up to one.
    lookahead: frames beyond a stretch that `render` reads. They are on the tape before it is rendered, unless
    the speech ends there.
    left: frames before a stretch that `render` reads again from the tape.
    grid: a stretch ends where `Prompt.grid_offset` and a multiple of the grid add up, or where the speech
    ends.
    hold_samples: the most samples that `render` keeps back until the next stretch; the last one gives them
    all.
    lengths: shapes of everything up to a stretch's end, ascending, for a decoder that reads a growing past;
    () for one that does not.

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
        """The smallest shape that holds `frames` frames, or the largest shape."""
        return next((n for n in self.sizes if n >= frames), self.sizes[-1])

    def length_bucket(self, stop: int) -> int:
        """The smallest length that holds everything up to frame `stop`; 0 where the decoder reads no growing
        past."""
        if not self.lengths:
            return 0
        assert stop <= self.lengths[-1], (
            f"a window ends at frame {stop}, beyond the longest length {self.lengths[-1]}"
        )
        return next(n for n in self.lengths if n >= stop)


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
    # of the noise that one frame is solved from; () where frames are not solved from noise
    noise_shape: tuple[int, ...] = ()
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    # "voice" of its own, "instruct", "design" from instructions, "clone" of a reference
    modes: tuple[str, ...] = ()
    # the shortest and the longest reference, where references are taken
    reference_s: tuple[float, float] | None = None
    max_references: int = 1
    options: tuple[Option, ...] = ()  # what else a request may set, the shared sampling fields included
    # field -> what to do instead, where the model does not take it
    hints: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # for messages; the variant where it is empty
    feeds: bool = False  # whether text may arrive while the model speaks
    tags: tuple[str, ...] = ()  # what is one token in a text that is fed, and begins with "[" or "<"
    listens: bool = False  # whether a request may hold turns of a conversation
    # whether the KV cache of what was generated serves the conversation's next turn
    shares_turns: bool = False
    licence: str = ""  # of the weights, where it limits their use
    # The longest text that the model speaks well in one pass, as `zoo.text.expected_s` counts it; a longer one is spoken
    # in pieces. None: it stays whole, however long it is
    piece_s: float | None = None
    # whether, where no reference is given, the first piece's frames are the voice of the others: `Family.later_prompt`
    keeps_voice: bool = False
    lead: str = (
        ""  # a pattern: what stands at a text's start and holds for all of it, so before each of its pieces
    )
    mixes: bool = False  # whether voices may be mixed, by their speaker vectors: `zoo.request.shares`
    unsplit: str = ""  # a pattern: a text that holds it stays whole

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.frame_samples


def following(passes: Generator[Prompt, Tensor, None], frames: Tensor) -> Prompt | None:
    """What follows a pass that made `frames`; None where the answer ends with it."""
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
    """The longest tape of a request whose prompt takes `num_positions`: what it asks for, else `expected`
    frames or as many as fit.

    extra_steps: positions that the model takes beside those of its frames. Raises RequestError where there is
    no room.
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
    """What one lane reads before the first frame: all but the last input fill pages, the last one is read by
    the first step.

    `prefix_keys` name the positions: equal keys from the start mean equal inputs, so pages can be shared, by
    the lanes of any slots.
    """

    inputs: Tensor  # [T, D], the model's dtype and device
    prefix_keys: tuple[int, ...]  # T values of 64 bits
    is_audio: Tensor | None = None  # [T] bool, which inputs are rows of audio; None: none of them

    @property
    def audio_mask(self) -> Tensor:
        """[T] bool, on the inputs' device."""
        if self.is_audio is not None:
            return self.is_audio
        return torch.zeros(len(self.inputs), dtype=torch.bool, device=self.inputs.device)


@dataclass
class Prompt:
    """What one pass of a request begins with. `inputs`, `prefix_keys` and `is_audio` are those of its first
    lane (see Lane), which for most families is the only one.

    Guidance is a second lane of the same slot: the same speech over a prompt of another length that lacks
    what guides, and `emit` merges what the two say. A request that asks for no guidance has both lanes too:
    the launch is the same for all.
    """

    inputs: Tensor  # [T, D]
    prefix_keys: tuple[int, ...]
    max_frames: int
    # rows of the state by name; what is left out gets its default
    slot: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    null: Lane | None = None  # of the second lane, where spec.lanes is 2
    max_steps: int = 0  # the most steps that the pass can take; 0: one a frame
    is_audio: Tensor | None = None
    grid_offset: int = 0  # frames before the first point of the window's grid
    # steps that the text given so far allows; None: all of the text is there
    num_fed_steps: int | None = None
    conversation: str | None = None  # as the request names it
    is_final: bool = True  # whether it is certain that no other pass follows in the same answer
    expected_s: float = 0.0  # about how long its speech is; 0: not known
    text: str = ""  # all that it says, where that is known

    @property
    def lanes(self) -> tuple[Lane, ...]:
        first = Lane(self.inputs, self.prefix_keys, self.is_audio)
        return (first,) if self.null is None else (first, self.null)

    @property
    def max_positions(self) -> tuple[int, ...]:
        """All that each lane can ever hold: every step adds one to each."""
        steps = self.max_steps or self.max_frames
        return tuple(len(lane.inputs) + steps for lane in self.lanes)

    def tensors(self) -> list[Tensor]:
        """All that it holds, wherever they are."""
        lanes = [(lane.inputs, lane.is_audio) for lane in self.lanes]
        values = [*chain(*lanes), *self.slot.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def check_room(self, spec: Spec) -> None:
        """Raises RequestError for a pass that the model has too few positions for."""
        longest = max(self.max_positions)
        if longest > spec.max_positions:
            takes = f"the prompt and {self.max_frames} frames take {longest} positions"
            raise RequestError("text", f"{takes}; the model has {spec.max_positions}")


@dataclass
class Batch:
    """Where a launch reads and writes. Fixed shapes; the tensors live on the device and the host fills them.

    A step has a sequence for each lane of each slot, in blocks of B: all first lanes, then all second ones. A
    prefill has N sequences of any slots and lanes. Sequences lie one after the other: sequence n owns
    positions cu_seqlens[n]:cu_seqlens[n+1]. `page_table` counts rows of `kv`: layer 0's keys of a page begin
    at its row in the table, the values `page_tokens` rows later, and each further layer 2 * page_tokens rows
    later.
    """

    slots: Tensor  # [B], the slots of a step (unused while prompts are prefilled)
    positions: Tensor  # [T], each input's place in its sequence; of a step, T is L * B
    kv_write_index: Tensor  # [T], the row of kv that takes layer 0's key of each input
    page_table: Tensor  # [N, P], the row of kv where each page begins; of a step, N is L * B
    kv_lens: Tensor  # [N], positions in the KV cache, those of this launch included
    cu_seqlens: Tensor  # [N + 1]
    kv: Tensor  # [rows, H, D], the family's view of the byte arena
    page: Tensor  # [page_tokens], the positions within a page; a graph takes their number from it
    # [T] bool, whether each input is a row of audio; of a step, whether it is the prompt's last input and is
    # one
    is_audio: Tensor

    @property
    def page_tokens(self) -> int:
        return self.page.shape[0]


@dataclass
class View:
    """A stretch of tape per slot to be rendered: frames start .. start + count of `frames` (the launch's
    shape) ones."""

    slots: Tensor  # [B]
    start: Tensor  # [B]
    count: Tensor  # [B], at most `frames`; 0 where nothing but held samples is left
    is_last: Tensor  # [B] bool, whether the speech ends with this stretch
    frames: int
    length: int = 0  # of `Window.lengths`, at least start + count; 0 where the decoder reads no growing past


SMALL_ROW = 64  # values; a longer row is filled where it lies


class State:
    """One row per slot, and a spare row (the last) that padding reads and writes. Tensors only; families add
    theirs with `add`.

    tape [S+1, F, *frame]; ready [S+1] frames on the tape, at most limit [S+1]; steps [S+1] emissions made;
    done [S+1]; seed [S+1]; first [S+1, L, D], the last input of each lane's prompt, which the first step
    reads, and whether it is audio, first_is_audio [S+1, L]; written [S+1], the text token that the last step
    wrote, or -1. noise [F, *noise] takes the place of what each step draws, in every slot alike, where it is
    not None: see zoo.generate.
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
        """A tensor [S+1, *shape] under `name`; `open` sets a slot's row to what the prompt says of it, or to
        `default`."""
        rows = self.spare + 1
        setattr(self, name, torch.full((rows, *shape), default, dtype=dtype, device=self.device))
        self._defaults[name] = default

    def open(self, slot: int, prompt: Prompt) -> None:
        """Make a row new: nothing of the request that held it before is left. A value shorter than its row
        fills the row's beginning. What the host knows of the row goes to the device in one copy, and nothing
        waits."""
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
        known = {}  # rows on the host
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
        """All that have a row for each slot, by name."""
        return {
            name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "noise"
        }

    def take_row(self, slot: int, source: State) -> None:
        """Make a slot all that slot 0 of `source` is: both states are of one family."""
        for name, value in source.tensors().items():
            getattr(self, name)[slot] = value[0]

    def last_frame(self, slots: Tensor) -> Tensor:
        """The latest frame on each tape [B, *frame]; anything where there is none yet."""
        return self.tape[slots, (self.ready[slots] - 1).clamp(min=0)]

    def window(self, view: View, left: int = 0, lookahead: int = 0) -> Tensor:
        """The tape around each stretch [B, left + F + lookahead, *frame]; what lies beyond an end of the tape
        repeats that end."""
        frames = torch.arange(-left, view.frames + lookahead, device=view.start.device)
        at = (view.start[:, None] + frames).clamp(min=0, max=self.tape.shape[1] - 1)  # [B, F]
        return self.tape[view.slots[:, None], at]

    def write(self, slots: Tensor, token: Tensor) -> None:
        """The text token of this step [B], -1 where it writes none; a slot that is done stays as it is, so
        this comes before its end."""
        self.written[slots] = torch.where(self.done[slots], self.written[slots], token)

    def append(self, slots: Tensor, frame: Tensor, ended: Tensor, is_spoken: Tensor | None = None) -> None:
        """One more frame [B, *frame] on each tape, or none where the model ended [B], or where `is_spoken`
        [B] says that this step makes none; a slot that is done stays as it is."""
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
    """What was said in the voice that an answer goes on in."""

    text: str
    frames: Tensor  # [F, *frame], on the CPU


class Family(nn.Module, ABC, Generic[S]):
    """A speech LM as four verbs: embed (slot -> what the LM reads next), hidden (through the layers), emit
    (hidden -> one frame on the tape) and render (a window of the tape -> samples)."""

    spec: Spec
    strategy: Strategy
    dtype: torch.dtype
    device: torch.device

    # host, off the loop
    @abstractmethod
    def prompt(self, request: Request) -> Prompt:
        """May be called from several threads. What a reference costs is paid here, once, and kept. Raises
        RequestError for what a user got wrong: what came, and what is possible. `zoo.request.check` refuses
        what `spec` says the model does not take."""

    def prompts(self, request: Request) -> Generator[Prompt, Tensor, None]:
        """The passes of a text that is spoken as a whole, which follow each other in one stream of audio:
        segments, turns. The frames that a pass made [F, *frame] (on the CPU) are sent back, so the next one
        can go on from them. All but the last say `is_final=False`."""
        yield self.prompt(request)

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        """The prompt of a later piece, in the voice of an earlier one. For families whose spec says
        `keeps_voice`."""
        raise AssertionError(f"{self.spec.family} keeps no voice")

    # at the door
    @abstractmethod
    def state(self, slots: int, max_frames: int | None = None) -> S: ...

    def admit(self, state: S, slot: int, prompt: Prompt) -> None:
        state.open(slot, prompt)

    def feed(self, state: S, slot: int, tokens: Sequence[int], is_last: bool) -> int:
        """More text for a slot whose prompt was open -> how many more steps it allows. `is_last`: no text
        follows, so the slot is bounded no more. Raises RequestError for more than the slot holds, and then
        nothing was taken. For families whose spec says `feeds`."""
        raise AssertionError(f"{self.spec.family} takes no text while it speaks")

    def tokenize(self, text: str) -> list[int]:
        """A text that is fed, as `feed` takes it; what zoo.open_text cuts has the tokens of the whole. For families
        whose spec says `feeds`."""
        raise AssertionError(f"{self.spec.family} takes no text while it speaks")

    # device: fixed shapes, in place by slot, nothing read back
    @abstractmethod
    def embed(self, state: S, slots: Tensor) -> Tensor:
        """[B] -> what the LM reads after the slot's last step [L * B, D]; anything where there was no step
        yet."""

    @abstractmethod
    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """[T, D] -> [T, D]; writes the positions' keys and values into batch.kv."""

    @abstractmethod
    def emit(self, state: S, slots: Tensor, h: Tensor) -> None:
        """h [L * B, D] -> one frame on each slot's tape, or none; may write a text token; may set done. A
        slot that is done is left as it is."""

    @abstractmethod
    def render(self, state: S, view: View) -> tuple[Tensor, Tensor]:
        """-> samples [B, N] float32, N the same for equal `view.frames`, and how many of each row are valid
        [B] int64; moves the decoder's state by `view.count` frames."""

    # host, as reports come in
    def detokenize(self, token: int) -> bytes:
        """The UTF-8 bytes of a text token that the model wrote; a character may span tokens. For families
        that write text."""
        raise AssertionError(f"{self.spec.family} wrote the text token {token}, and cannot detokenize it")

    def end_turn(self, prompt: Prompt, frames: Tensor) -> tuple[int, ...]:
        """The frames [F, *frame] (on the CPU) that were made of a prompt -> prefix keys of the positions
        behind the prompt, one a frame, as the conversation's next prompt names them; the family remembers the
        frames for it. For families whose spec says `shares_turns`."""
        raise AssertionError(f"{self.spec.family} shares no turns")

    # written once, here
    def passes(self, request: Request) -> Generator[Prompt, Tensor, None]:
        """All passes of one answer: those of `prompts`, or one for each piece of a text that is too long for
        one. May end where another one could have followed. Raises RequestError.

        Piece i draws from a seed that follows from the request's and i. `max_frames` is of all pieces
        together.
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
                said = Said(piece, frames.clone())  # of a slot that others will have

    def step(self, state: S, batch: Batch) -> Tensor:
        """Everything between two frames, for every slot of the launch -> the report [B, 3]: frames ready,
        whether it is done, and the text token of this step or -1. A slot's first step reads the prompt's last
        input, so filling pages never emits and all that emits is this one function."""
        # A list has its length in the graph; a size that differs from model to model becomes a variable
        # there.
        slots, first = batch.slots, state.first[batch.slots].unbind(1)  # L of [B, D]
        # what a graph for any B has to know
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
    """What a folder of `zoo/` offers to be a family."""

    NAME: str

    def claims(self, path: Path) -> bool:
        """Whether this family reads the model directory `path`."""

    def load(
        self, directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
    ) -> Family[Any]:
        """The family with its weights, and with what the directory `adapter` adds to them. Raises ValueError
        that names what is wrong, an adapter among it where the family takes none."""

    def survey(self, directory: Path) -> tuple[Spec, int]:
        """The spec and the number of parameters, weights unread. Raises ValueError."""

    def write_demo(
        self, directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None
    ) -> Path:
        """Write a random checkpoint in the published layout. Raises ValueError, OSError."""


@dataclass
class Speech:
    frames: Tensor  # [F, *frame]
    samples: Tensor  # [N] float32
    sample_rate_hz: int
    text: str = ""  # that the model wrote
