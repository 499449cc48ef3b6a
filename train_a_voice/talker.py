"""Train the talker: from text to codes, with dense batches of fixed shapes from a pool that may still grow.

The module is `zoo.qwen3_tts.model.Talker` itself. Here its blocks attend to a dense batch instead of pages.

Three helpers, which are not part of the checkpoint, shorten the training. A head in each of two layers learns
which byte is spoken next. A classifier on the second layer names the phones. Short utterances come first.

It reads its own draws. After the first part of the run, a share of a batch's frames are drawn from the
talker's own predictions. So are many of the codes that the code predictor reads. The target of a code is the
residual of the codes before it, drawn ones included. The first code is the exception: the others belong to it
and must not compensate for it.

It learns how far codes lie apart. If a talker is unsure, many codes of a fine level are about equally likely.
Most of them make things worse, because a row is longer than the residual. So the target is a distribution
over all codes by the residual that each leaves: q = exp(-far / softness) / sum. The loss is KL(p || q) in
this order: if many q are possible, p becomes the one of their mean distances. The likeliest code is then the
one with the smallest expected residual, which may be the one that adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train_a_voice.codes import SIZE, Codebooks
from train_a_voice.pool import IGNORE, Board, Noise, Pool
from train_a_voice.sprint import Clock, Every, Log, Losses, Step, optimiser_of, run
from zoo.nn.norm import RMSNorm
from zoo.nn.qwen3 import Block
from zoo.nn.rope import rope_table, rotate
from zoo.qwen3_tts.config import Config
from zoo.qwen3_tts.depth import CodePredictor, DepthBlock
from zoo.qwen3_tts.model import Talker

HELPERS = "phones."  # parameters of a Training that are not its talker's
GUIDED = (1, 2)  # layers whose first head learns where to look
PHONES = 2  # layer whose output predicts the phones

FORWARD = 0.2  # weight of KL(q || p), added to KL(p || q)
TONE = 0.2  # weight of the last code, pitch and voicing, among all codes but the first
WEIGHTS = {"first": 1.0, "depth": 1.0, "look": 0.3, "phone": 0.3}


@dataclass(frozen=True)
class Plan:
    peak: float = 2.5e-3
    warmup: int = 300
    weight_decay: float = 0.02
    positions: int = 24_576  # per batch
    # positions of an utterance, by kind of batch
    rooms: tuple[int, ...] = (64, 80, 96, 112, 136, 168, 216, 288, 352)
    depth_share: float = 0.5
    own_share: float = 0.25  # share of frames that are the talker's own draws
    own_from: float = 0.3  # share of the run after which they begin
    own_temperature: float = 0.6
    noise: Noise = field(default_factory=Noise)
    short_until: float = 0.03  # share of the run that uses only the shorter half of the rooms
    dtype: torch.dtype = torch.bfloat16
    log_s: float = 5.0
    check_s: float = 20.0  # between evaluations on unseen sentences


# Batches of a dozen utterances, which take .4 s of a core, or .6 s with own draws.
ON_CPU: dict[str, Any] = {"peak": 1.5e-3, "warmup": 150, "positions": 1_536, "log_s": 30.0, "check_s": 300.0}


class Training(nn.Module):
    """The talker with its training helpers."""

    pool: Pool
    mel: Tensor  # [levels, SIZE, HOPS * BANDS], from the codebooks
    softness: Tensor  # [levels - 1], squared distances

    def __init__(self, talker: Talker, config: Config, num_phones: int, codebooks: Codebooks):
        super().__init__()
        self.talker, self.config = talker, config
        self.phones = nn.Linear(config.talker.hidden, 2 * num_phones)
        self.register_buffer("mel", codebooks.mel.clone(), persistent=False)
        self.register_buffer("softness", softness_of(codebooks), persistent=False)

    def forward(self, board: Board, num_depth: int, num_own: int, temperature: float) -> Losses:
        """Return the losses of a board.

        num_depth: frames whose codes are learned. num_own: frames that are replaced by the talker's own
        draws. If there are any, half of the codes that the code predictor reads are draws, too."""
        codes = self.own(board, num_own, temperature) if num_own else board.codes
        h, looks, named = self.hidden(board, codes)
        rows = self.rows_of(board, num_depth)  # [N] flat positions that predict a frame
        given, here = self.given(board, rows), h.flatten(0, 1)[rows]
        read = self.mixed(here, given, temperature) if num_own else given
        assert named is not None
        target = board.looks_at.flatten()
        said = self.first_logits(h).flatten(0, 1)
        return {
            "first": F.cross_entropy(said, board.first.flatten(), ignore_index=IGNORE),
            "depth": self.depth_loss(here, given, read),
            "look": torch.stack([F.cross_entropy(x, target, ignore_index=IGNORE) for x in looks]).mean(),
            "phone": F.cross_entropy(named.flatten(0, 2), board.phones.flatten(), ignore_index=IGNORE),
        }

    def depth_loss(self, h: Tensor, given: Tensor, read: Tensor) -> Tensor:
        """Return the loss of all codes but the first, from h [N, D], true codes [N, K] and the codes that are
        read [N, K].

        It is the distance of a prediction from the residual's distribution; for the last code, pitch and
        voicing, it is the cross entropy."""
        levels = torch.arange(len(self.mel), device=h.device)
        goal = self.mel[levels, given[:, :-1]].sum(1)  # [N, mel]
        added = self.mel[levels, read[:, :-1]]  # [N, levels, mel]
        rest = (goal[:, None] - added.cumsum(1) + added)[:, 1:]  # the residual of each level
        with torch.autocast(h.device.type, enabled=False):
            near = 2 * torch.einsum("nkm,kcm->nkc", rest, self.mel[1:]) - self.mel[1:].square().sum(2)
            goals = (near / self.softness[:, None]).log_softmax(-1)  # [N, levels - 1, SIZE]
        said = [x.float() for x in self.depth_logits(h, read)]
        losses = torch.stack([distance(x.log_softmax(-1), goals[:, k]) for k, x in enumerate(said[:-1])])
        # Times its softness, a distance is a squared error, which costs the same at every level.
        mel = (losses * self.softness).sum() / self.softness.sum()
        return (1 - TONE) * mel + TONE * F.cross_entropy(said[-1], given[:, -1])

    @torch.no_grad()
    def far(self, board: Board, num: int) -> Tensor:
        """Return the distance of greedy codes behind the true first one from the true codes.

        It is the root mean square in nats of the log mel spectrogram."""
        rows = self.rows_of(board, num)
        h, given = self.hidden(board, board.codes)[0].flatten(0, 1)[rows], self.given(board, rows)
        read = torch.zeros_like(given)
        read[:, 0] = given[:, 0]
        for level in range(1, len(self.mel)):
            read[:, level] = self.depth_logits(h, read)[level - 1].argmax(1)
        levels = torch.arange(len(self.mel), device=h.device)
        made, true = (self.mel[levels, codes[:, :-1]].sum(1) for codes in (read, given))
        return (made - true).square().mean().sqrt()

    def depth_logits(self, h: Tensor, codes: Tensor) -> list[Tensor]:
        """Return logits [N, SIZE] of each code but the first, for h [N, D] and codes [N, K]."""
        predictor, c = self.talker.depth, self.talker.depth.config
        rows = [self.talker.codec_embedding(codes[:, 0])]
        rows += [
            F.embedding(codes[:, g + 1], predictor.embeddings.table(g)) for g in range(codes.shape[1] - 2)
        ]
        x = predictor.project(torch.stack((h, *rows), 1))  # [N, K, D]
        cos, sin = rope_table(torch.arange(x.shape[1], device=x.device), c.head_dim, c.rope_theta, x.dtype)
        for layer in blocks(predictor):
            x, _, _ = run_block(layer, x, cos, sin)
        x = predictor.norm(x)
        return [head(x[:, g + 1]) for g, head in enumerate(predictor.heads)]

    @torch.no_grad()
    def mixed(self, h: Tensor, given: Tensor, temperature: float) -> Tensor:
        """Return the true codes [N, K] with a random share of each frame's drawn anew, except the first."""
        drawn = self.draw(h, given, temperature)
        share = torch.rand(len(given), 1, device=h.device)
        is_drawn = torch.rand(given.shape, device=h.device) < share
        is_drawn[:, 0] = False
        return torch.where(is_drawn, drawn, given)

    def draw(self, h: Tensor, given: Tensor, temperature: float) -> Tensor:
        """Return codes [N, K], each drawn as if the codes before it were the true ones."""

        def one(logits: Tensor) -> Tensor:
            noise = -torch.empty_like(logits).exponential_().log()
            return (logits / temperature + noise).argmax(-1)

        drawn = [one(self.first_logits(h)[:, :SIZE])]
        return torch.stack(drawn + [one(x.float()) for x in self.depth_logits(h, given)], 1)

    def first_logits(self, h: Tensor) -> Tensor:
        """Return logits [..., SIZE + 1] of h [..., D] in fp32; the last one is the end."""
        head = self.talker.codec_head.weight
        eos = self.config.control.eos
        return F.linear(h, torch.cat((head[:SIZE], head[eos : eos + 1]))).float()

    def hidden(self, board: Board, codes: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return the heads' input [B, L, D], the guided heads' scores [B * L, L], and phones [B, L, 2, P]."""
        talker = self.talker
        beside = F.embedding(board.codec.clamp(min=0), talker.codec_embedding.weight)
        tables = torch.cat((talker.codec_embedding.weight[:SIZE], talker.depth.embeddings.weight))
        offsets = SIZE * torch.arange(codes.shape[2], device=codes.device)
        frames = F.embedding(codes + offsets, tables).sum(2)  # [B, L, D]
        x = talker.text(board.text) + torch.where(
            board.is_frame[..., None], frames, beside * (board.codec >= 0)[..., None]
        )
        length = x.shape[1]
        position = torch.arange(length, device=x.device)
        c = self.config.talker
        cos, sin = rope_table(position, c.head_dim, c.rope_theta, torch.float32)
        later = position > position[:, None]
        looks, named = [], None
        for i, layer in enumerate(blocks(talker)):
            x, q, k = run_block(layer, x, cos, sin)
            if i in GUIDED:
                scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
                looks.append(scores.masked_fill(later, -1e9).flatten(0, 1))
            if i == PHONES:
                named = self.phones(x).float().unflatten(2, (2, -1))
        return talker.norm(x), looks, named

    def rows_of(self, board: Board, num: int) -> Tensor:
        """Return flat positions [num] that predict a frame, drawn uniformly from the frames of the batch."""
        ends = board.lengths.cumsum(0)
        drawn = (torch.rand(num, device=ends.device) * ends[-1]).long().minimum(ends[-1] - 1)
        which = torch.searchsorted(ends, drawn, right=True)
        frame = drawn - (ends - board.lengths)[which]
        return which * board.text.shape[1] + board.prompts[which] - 1 + frame

    def given(self, board: Board, rows: Tensor) -> Tensor:
        """Return the true codes [N, K] of the frames that these positions predict."""
        length = board.text.shape[1]
        which, position = rows // length, rows % length
        return self.pool.codes[board.starts[which] + position - board.prompts[which] + 1].long()

    @torch.no_grad()
    def own(self, board: Board, num: int, temperature: float) -> Tensor:
        """Return the board's codes [B, L, K] with `num` frames drawn anew from the talker's predictions."""
        h, _, _ = self.hidden(board, board.codes)
        rows = self.rows_of(board, num)
        drawn = self.draw(h.flatten(0, 1)[rows], self.given(board, rows), temperature)
        # A position predicts the frame at the next position.
        flat = board.codes.flatten(0, 1)
        # For a full row's last frame this is the next row's prompt, whose codes are never read.
        at = (rows + 1).clamp(max=len(flat) - 1)
        return flat.index_copy(0, at, drawn).view_as(board.codes)


def distance(said: Tensor, goal: Tensor) -> Tensor:
    """Return KL(said || goal) plus FORWARD times the reverse, which teaches faster at first.

    said, goal: log probabilities [N, SIZE]."""
    apart = said - goal
    return ((said.exp() - FORWARD * goal.exp()) * apart).sum(-1).mean()


def softness_of(codebooks: Codebooks) -> Tensor:
    """Return the softness [levels - 1] of each level but the first: its mean gain / log(SIZE).

    The gain is the squared error that a level removes. With this softness a code with the mean gain is as
    likely as all SIZE codes together that gain nothing. A larger one would hide a fine level's code among
    them. With 4 nat^2 at every level, the target of the last one spreads over 277 of 512 codes."""
    return (codebooks.rest[:-1] - codebooks.rest[1:]).clamp(min=1e-3) / math.log(SIZE)


def blocks(stack: Talker | CodePredictor) -> list[Block | DepthBlock]:
    return [layer for layer in stack.layers if isinstance(layer, Block | DepthBlock)]


def run_block(
    layer: Block | DepthBlock, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a block over a dense batch: x [B, L, D], cos and sin [L, dim] -> x, and its first head's q and k
    [B, L, dim]."""
    q, k, v = layer.project(x)
    q, k, v = (part.transpose(1, 2) for part in (layer.q_norm(q), layer.k_norm(k), v))  # [B, heads, L, dim]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    mixed = attend(q.to(v.dtype), k.to(v.dtype), v)
    return layer.combine(x, mixed.transpose(1, 2).flatten(2)), q[:, 0], k[:, 0]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [B, heads, L, dim]. On a CPU its scores are written out: PyTorch's fused
    attention takes five times as long backwards at these lengths."""
    groups = q.shape[1] // k.shape[1]
    if q.is_cuda:
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    each = q.unflatten(1, (k.shape[1], -1))  # [B, kv heads, heads each, L, dim]
    later = torch.full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
    scores = (each * q.shape[-1] ** -0.5 @ k[:, :, None].mT).float() + later
    return (scores.softmax(-1).to(v.dtype) @ v[:, :, None]).flatten(1, 2)


@torch.no_grad()
def initialise(training: Training, codebooks: Codebooks) -> None:
    """Initialise with PyTorch's defaults, small residual branches, and embeddings of the codes' meanings."""
    talker = training.talker
    for module in talker.modules():
        if isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" and parameter.dim() == 2:
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            elif name == "bias":
                nn.init.zeros_(parameter)
    for stack in (talker, talker.depth):
        for layer in blocks(stack):
            for matrix in (layer.out.weight, layer.mlp.down.weight):
                matrix *= (2 * len(stack.layers)) ** -0.5
    nn.init.normal_(talker.text.embedding.weight)
    nn.init.normal_(talker.codec_embedding.weight, std=0.5)
    rows = codebooks.meanings(talker.codec_embedding.weight.shape[1])
    rows *= rows.sum(0).square().mean().rsqrt()
    talker.codec_embedding.weight[:SIZE] = rows[0]
    talker.depth.embeddings.weight.copy_(rows[1:].flatten(0, 1))


class Rooms:
    """Utterances by the kind of batch that they fit into, drawn by the host."""

    def __init__(self, plan: Plan):
        self.plan, self.seen = plan, 0
        self.flat: list[np.ndarray] = [np.zeros(0, np.int64) for _ in plan.rooms]

    def grow(self, pool: Pool) -> None:
        fresh = np.arange(self.seen, pool.count)
        room = np.searchsorted(self.plan.rooms, pool.lengths[fresh])
        for i in range(len(self.plan.rooms)):
            self.flat[i] = np.concatenate((self.flat[i], fresh[room == i]))
        self.seen = pool.count

    def size(self, room: int) -> int:
        return max(4, self.plan.positions // self.plan.rooms[room])

    def draw(self, rng: np.random.Generator, share: float) -> tuple[int, np.ndarray]:
        """Return a kind of batch and utterances for it. All utterances are equally likely."""
        weight = np.array([len(x) * n for x, n in zip(self.flat, self.plan.rooms, strict=True)], float)
        if share < self.plan.short_until:
            weight[(len(weight) + 1) // 2 :] = 0
        room = int(rng.choice(len(weight), p=weight / weight.sum()))
        return room, rng.choice(self.flat[room], self.size(room))


def train(
    training: Training,
    codebooks: Codebooks,
    pool: Pool,
    unseen: Pool,
    plan: Plan,
    clock: Clock,
    log: Log,
    path: Any,
    grow: Any,
    *,
    records: bool = True,
    begin: Callable[[], None] = lambda: None,
    most_steps: int | None = None,
) -> int:
    """Train until the clock ends, and return the number of steps.

    unseen: utterances for evaluation. grow: called occasionally to add new speech to the pool; returns how
    much."""
    device = pool.device
    initialise(training, codebooks)
    begin()
    training.to(device)
    training.pool = pool
    optimiser = optimiser_of(list(training.parameters()), device, plan.weight_decay)
    rooms, rng = Rooms(plan), np.random.default_rng(0)
    rooms.grow(pool)
    which = [torch.zeros(rooms.size(i), dtype=torch.int64, device=device) for i in range(len(plan.rooms))]
    steps: dict[tuple[int, bool], Step] = {}
    due = Every(plan.check_s)

    def compute(room: int, is_own: bool) -> tuple[Tensor, Losses]:
        board = pool.board(which[room], plan.rooms[room], plan.noise)
        num = round(0.36 * plan.positions)  # an estimate of the frames in a batch
        own = round(plan.own_share * num) if is_own else 0
        # Without autocast's cache: it would keep the copy without a gradient that `own` makes of a matrix.
        with torch.autocast(
            device.type, plan.dtype, enabled=plan.dtype != torch.float32, cache_enabled=False
        ):
            losses = training(board, round(plan.depth_share * num), own, plan.own_temperature)
        return torch.stack([WEIGHTS[name] * loss for name, loss in losses.items()]).sum(), losses

    def next_step(step: int, share: float) -> Step:
        room, chosen = rooms.draw(rng, share)
        host = torch.from_numpy(chosen)
        which[room].copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
        key = room, share >= plan.own_from
        if key not in steps:
            steps[key] = Step(training, optimiser, lambda: compute(*key))
        return steps[key]

    def between(step: int, share: float) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if grow(pool):
            rooms.grow(pool)
        extra["utterances"] = pool.count
        if share == 1 or due():
            extra |= examine(training, unseen, plan)
        return extra

    return run(
        training,
        optimiser,
        next_step,
        clock,
        log,
        path,
        peak=plan.peak,
        warmup=plan.warmup,
        records=records and device.type == "cuda",
        log_s=plan.log_s,
        between=between,
        most_steps=most_steps,
    )


@torch.no_grad()
def examine(training: Training, unseen: Pool, plan: Plan) -> dict[str, float]:
    """Return the losses on unseen utterances without noise, from a batch of each kind."""
    taught, training.pool = training.pool, unseen
    rooms = Rooms(plan)
    rooms.grow(unseen)
    sums: dict[str, Tensor] = {}
    total = 0
    for room, members in enumerate(rooms.flat):
        chosen = members[: rooms.size(room)]
        if not len(chosen):
            continue
        board = unseen.board(torch.from_numpy(chosen).to(unseen.device), plan.rooms[room], None)
        with torch.autocast(unseen.device.type, plan.dtype, enabled=plan.dtype != torch.float32):
            losses = training(board, 1024, 0, 1.0) | {"far": training.far(board, 512)}
        for name, loss in losses.items():
            sums[name] = sums.get(name, torch.zeros((), device=unseen.device)) + loss * len(chosen)
        total += len(chosen)
    training.pool = taught
    return {f"unseen_{name}": round(float(value) / total, 4) for name, value in sums.items()}
