"""The facts about a model: the shapes of its frames, windows and KV cache, and what a request may ask of
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zoo.request import Option


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
class Past:
    """The past that a renderer keeps of each stream in pages of the arena: chunks of `frames` frames,
    including the prompt's. On a CPU a state's own rows hold it, since untouched memory costs nothing there.

    values: the number in a chunk. row_values: the number in a row; a page holds whole rows. max_chunks: the
    most that a stream has; later ones overwrite earlier ones.
    """

    frames: int
    values: int
    row_values: int
    max_chunks: int

    def chunks(self, frames: int) -> int:
        """Return the number of chunks that a stream of `frames` frames takes."""
        return min(-(-frames // self.frames), self.max_chunks)


USUAL_FRAMES = 100  # of a speech


@dataclass(frozen=True)
class Window:
    """The stretches of the tape that `render` accepts, in frames. The engine picks when a stretch is
    rendered; this class fixes its shapes.

    sizes: the shapes of a launch, ascending. A shorter stretch is padded up to one of them.
    lookahead: the frames after a stretch that `render` also reads. They must be on the tape before the
    stretch is rendered, unless the speech ends there.
    left: the frames before a stretch that `render` reads again.
    grid: a stretch ends at `Prompt.grid_offset` plus a multiple of the grid, or at the end of the speech.
    grid_offset: that of all prompts, if they have the same; else 0.
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
    grid_offset: int = 0
    hold_samples: int = 0
    lengths: tuple[int, ...] = ()

    def bucket(self, frames: int) -> int:
        """Return the smallest size that holds `frames` frames, or the largest size if none does."""
        return next((n for n in self.sizes if n >= frames), self.sizes[-1])

    @property
    def usual_length(self) -> int:
        """The padded length of most stretches, or 0 without `lengths`."""
        return self.length_bucket(min(USUAL_FRAMES, self.lengths[-1])) if self.lengths else 0

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
    past: Past | None = None  # of streams, which `render` reads and writes
    lanes: int = 1
    # whether the second lane begins at a step that the model chooses (`State.open_lane`), behind inputs that every
    # request shares (`Family.second_lane`); until then a slot takes the steps and the pages of one lane
    opens_late: bool = False
    steps_per_frame: int = 1  # of a model that writes a frame token by token
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
    # whether the model answers its text and turns instead of speaking them: turns alone are a request, and
    # neither the text nor its length says what is spoken
    answers: bool = False
    # whether an answer performs what the text asks for, so that a request for speech may be any text, too
    performs: bool = False
    # whether turns may hold tools and their results (`Turn.role`), which the model calls by its text
    takes_tools: bool = False
    # what a request may ask for (`Request.output`): "speech", "text" (an answer without audio), "transcript",
    # "continuation" (of a clip)
    outputs: tuple[str, ...] = ("speech",)
    # whether a later turn can continue behind an answer's own tokens: `Family.answer_tokens`
    keeps_answers: bool = False
    # whether the next turn of a conversation can reuse the KV cache of generated frames
    shares_turns: bool = False
    licence: str = ""  # of the weights, if it limits their use
    # The longest text that the model speaks well in one pass, in seconds of `zoo.text.pieces.expected_s`. A
    # longer text is split into pieces. None: a text is never split.
    piece_s: float | None = None
    # whether later pieces continue in the voice of the first one if the request has no reference:
    # `Family.later_prompt`
    keeps_voice: bool = False
    # a pattern that matches a prefix of the text that applies to all of it; it is repeated before each piece
    lead: str = ""
    # whether voices can be mixed by adding up their speaker vectors: `zoo.check.shares`
    mixes: bool = False
    unsplit: str = ""  # a pattern; a text in which it is found is never split

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.frame_samples
