"""The past that the flow keeps of streams, and the part of it that a cell of a stream sees.

A voice's prompt is computed once, as one cell without a past. Then come cells of 25 tokens. The last cell has up to 27.

    encoder   | prompt, in order | the last 50 tokens, a ring |          distances do not count the tokens between
    estimator | the first 100 frames by rank, then a ring  |         no order: attention knows no positions

A frame of the estimator has a rank. That of the prompt's last frame is 0, that of its first one P - 1. The frames of a
cell follow, again from the last to the first. Of T frames, those with a rank below 100 or of at least T - P are kept,
P + 100 at most.

    rank      0 ........ 99 | 100 ......... | T - P ........ T - 1
    place     0 ........ 99 |    dropped    | 100 + (rank - 100) % P

Source: stepfun-ai/Step-Audio2 at 7c58630, token2wav.py, for the estimator. It keeps the whole encoder's past, and fails
after 100 s. minicpmo-utils 1.0.7, stepaudio2/token2wav.py, trims the encoder's past like this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.nn.eager import may_follow_values
from zoo.nn.rows import zeros
from zoo.nn.s3.encoder import FlowEncoder
from zoo.nn.s3.estimator import PAIR
from zoo.nn.s3.sizes import NUM_UP_LAYERS, TOKEN_FRAMES
from zoo.nn.s3.stretch import Seen, Whole
from zoo.step_audio2.config import FlowConfig
from zoo.step_audio2.estimator import Estimator

MAX_PROMPT = 250  # tokens of a voice that the flow reads: 10 s
RING_TOKENS, FIRST_FRAMES = 50, 100
STEPS = 10


class Past:
    """The past of `rows` streams behind prompts of up to `prompt` tokens. The last place of each cache
    belongs to no token.

    tokens, frames [rows, layers, places + 1, 2 D]: keys and values of the encoder's layers, at both rates.
    ends [rows, V]: the ends of the encoder's convolutions. velocities [rows, STEPS, depth, PAIR, places + 1, 2 I]: keys
    and values of the estimator's blocks. turns [rows, STEPS, PAIR, V]: the ends of its convolutions.
    """

    def __init__(
        self,
        config: FlowConfig,
        encoder: FlowEncoder,
        estimator: Estimator,
        like: Tensor,
        rows: int,
        prompt: int,
    ):
        width, inner = 2 * config.width, 2 * config.estimator_heads * config.head_dim
        tokens = prompt + RING_TOKENS
        frames, places = TOKEN_FRAMES * tokens, TOKEN_FRAMES * prompt + FIRST_FRAMES
        self.tokens = zeros(like, rows, config.layers, tokens + 1, width)
        self.frames = zeros(like, rows, NUM_UP_LAYERS, frames + 1, width)
        self.ends = like.new_zeros(rows, encoder.layout.size)
        parts = estimator.parts
        self.velocities = zeros(parts, rows, STEPS, config.depth, PAIR, places + 1, inner)
        self.turns = parts.new_zeros(rows, STEPS, PAIR, estimator.layout.size)

    def encoder_caches(self) -> Sequence[Tensor]:
        return (*self.tokens.unbind(1), *self.frames.unbind(1))

    def put(self, row: int, prompt: Past, num: int) -> None:
        """Begin a stream behind a prompt of num tokens, which is the only row of `prompt`."""
        frames = TOKEN_FRAMES * num
        self.tokens[row, :, :num] = prompt.tokens[0, :, :num]
        self.frames[row, :, :frames] = prompt.frames[0, :, :frames]
        self.velocities[row, ..., :frames, :] = prompt.velocities[0, ..., :frames, :]
        self.ends[row], self.turns[row] = prompt.ends[0], prompt.turns[0]

    def take(self, row: int, other: Past) -> None:
        """Copy the first row of another past of the same size."""
        for name in ("tokens", "frames", "ends", "velocities", "turns"):
            getattr(self, name)[row] = getattr(other, name)[0]

    def clear(self, row: int) -> None:
        """Forget the ends of a row's convolutions. Other values need no clearing, because attention does not
        see them."""
        self.ends[row] = 0
        self.turns[row] = 0

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.tokens, self.frames, self.ends, self.velocities, self.turns))


class PromptTokens(Whole):
    """The positions of a prompt: each sees all others, and all are kept in order."""

    def __init__(self, count: Tensor, num: int):
        super().__init__(count, num)

    def exchange(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[:, : self.num] = new
        return new


class PromptFrames:
    """The frames of a prompt: each sees all others, and all are kept by their rank."""

    mask = None

    def joined(self, cache: Tensor, new: Tensor) -> Tensor:
        return new

    def keep(self, caches: Tensor, new: Tensor) -> None:
        caches[:, 0, :, : new.shape[2]] = new.flip(2)


class CellTokens(Seen):
    """The positions of a cell in the encoder, at `rate` positions per token."""

    def __init__(self, cell: Cell, rate: int):
        device, ring = cell.start.device, RING_TOKENS * rate
        num, start, prompt = cell.tokens * rate, cell.start * rate, cell.prompt * rate
        places = (cell.max_prompt + RING_TOKENS) * rate
        self.slots, self.grid = cell.slots, num
        self.held = places
        if may_follow_values(start):
            self.held = int((prompt + start.clamp(max=ring)).max())
        own, place = torch.arange(num, device=device), torch.arange(self.held, device=device)
        at, behind = start[:, None] + own, prompt[:, None]  # of the answer
        is_new = own < (cell.count * rate)[:, None]
        self.index = torch.where(is_new, behind + at % ring, places)
        # the position of the answer at each place, counted from the cell's first one; negative
        back = (start[:, None] - 1 - (place - behind)) % ring
        ago = torch.where(place < behind, start.clamp(max=ring)[:, None] + behind - place, back + 1)
        is_held = (place < behind) | ((place < behind + ring) & (back < start[:, None]))
        sees_own = is_new[:, None] | torch.eye(num, dtype=torch.bool, device=device)
        mask = torch.cat((is_held[:, None].expand(-1, num, -1), sees_own.expand(-1, num, -1)), 2)
        ahead = (own[:, None] - own).expand(len(start), -1, -1)
        distance = torch.cat((own[:, None] + ago[:, None], ahead), 2)
        self._sight = mask, distance.clamp(1 - num, self.max_distance)

    @property
    def max_distance(self) -> int:
        return self.held + self.num


class CellFrames:
    """The frames of a cell in the estimator."""

    def __init__(self, cell: Cell):
        num, prompt = cell.tokens * TOKEN_FRAMES, (cell.prompt * TOKEN_FRAMES)[:, None]
        count, device = (cell.count * TOKEN_FRAMES)[:, None], cell.start.device
        places = cell.max_prompt * TOKEN_FRAMES + FIRST_FRAMES
        before = prompt + TOKEN_FRAMES * cell.start[:, None]  # frames of the stream so far
        num_held = torch.minimum(before, prompt + FIRST_FRAMES)
        self.slots, self.held = cell.slots, places
        if may_follow_values(before):
            self.held = int(num_held.max())
        own = torch.arange(num, device=device)
        is_new = own < count
        rank = before + count - 1 - own
        is_kept = is_new & ((rank < FIRST_FRAMES) | (own < prompt))
        ring = FIRST_FRAMES + (rank - FIRST_FRAMES) % prompt.clamp(min=1)
        self.index = torch.where(is_kept, torch.where(rank < FIRST_FRAMES, rank, ring), places)  # [B, Q]
        is_held = torch.arange(self.held, device=device) < num_held
        sees_own = is_new[:, None] | torch.eye(num, dtype=torch.bool, device=device)
        mask = torch.cat((is_held[:, None].expand(-1, num, -1), sees_own.expand(-1, num, -1)), 2)
        self.mask = mask[:, None]  # [B, 1, Q, K]

    def joined(self, cache: Tensor, new: Tensor) -> Tensor:
        return torch.cat((cache[self.slots, :, : self.held].flatten(0, 1), new), 1)

    def keep(self, caches: Tensor, new: Tensor) -> None:
        """Write the new keys and values [depth, B * PAIR, Q, V] of a step to the caches."""
        pair = torch.arange(PAIR, device=new.device)[:, None]
        caches[:, self.slots[:, None, None], pair, self.index[:, None]] = new.unflatten(1, (-1, PAIR))


class Cell:
    """Tokens start .. start + count of each row's answer, padded to `tokens`, behind a prompt of `prompt` tokens."""

    def __init__(
        self, slots: Tensor, start: Tensor, count: Tensor, prompt: Tensor, tokens: int, max_prompt: int
    ):
        self.slots, self.start, self.count, self.prompt = slots, start, count, prompt  # [B]
        self.tokens, self.max_prompt = tokens, max_prompt
        self.sights: tuple[Seen, Seen] = (CellTokens(self, 1), CellTokens(self, TOKEN_FRAMES))
        self.frames: CellFrames | PromptFrames = CellFrames(self)
        self.first_frame = TOKEN_FRAMES * (prompt + start)  # of the stream


class PromptCell:
    """A whole prompt of `tokens` tokens, the only row of its past."""

    def __init__(self, tokens: int, device: torch.device):
        one = torch.ones(1, dtype=torch.int64, device=device)
        self.slots, self.count, self.tokens = 0 * one, tokens * one, tokens
        self.sights: tuple[Seen, Seen] = (
            PromptTokens(tokens * one, tokens),
            PromptTokens(TOKEN_FRAMES * tokens * one, TOKEN_FRAMES * tokens),
        )
        self.frames: CellFrames | PromptFrames = PromptFrames()
        self.first_frame = 0 * one
