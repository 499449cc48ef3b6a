"""Train the talker: from text to codes, where the talker and its code predictor read the true codes.

The module is `zoo.qwen3_tts.model.Talker` itself. Here its blocks attend to a dense batch instead of pages.

Three helpers, which are not part of the checkpoint, reduce hours of training to minutes. A head in each of
two layers learns which byte is spoken next, a classifier on the second layer names the phones, and short
utterances come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train_a_voice.codes import SIZE, Codebooks
from train_a_voice.decoder import meanings
from train_a_voice.job import Job, Losses, Schedule
from train_a_voice.job import train as job_train
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table, rotate
from zoo.qwen3_tts.block import Qwen3Block
from zoo.qwen3_tts.config import Config
from zoo.qwen3_tts.depth import CodePredictor
from zoo.qwen3_tts.model import Talker
from zoo.qwen3_tts.prompt import NOTHING

GUIDED = (1, 2)  # layers whose first head learns where to look
PHONES = 2  # layer whose output predicts the phones
IGNORE = -100


@dataclass(frozen=True)
class Utterances:
    """The data that the talker learns from. All lists are by utterance."""

    prompts: list[np.ndarray]  # [P, 2], text and codec ids
    text_starts: list[int]  # position in the prompt where the text begins
    codes: list[np.ndarray]  # [T, K]
    spoken: list[np.ndarray]  # [T], byte of the text
    phones: list[np.ndarray]  # [T]
    num_phones: int

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(codes) for codes in self.codes])


@dataclass(frozen=True)
class Batch:
    text: Tensor  # [B, L], as codec ids; those of frames are for their codes
    codec: Tensor  # [B, L], NOTHING without an id
    at: Tensor  # [N], flat positions that are frames
    frames: Tensor  # [N, K], the codes at these positions, a few of them wrong
    rows: Tensor  # [M], flat positions that predict a frame or the end
    first: Tensor  # [M], the first code that they predict, or SIZE: the end
    given: Tensor  # [M, K], all codes that they predict; zeros for the end
    looks_at: Tensor  # [M], position in the same sequence of the spoken byte
    phones: Tensor  # [M, 2], of the predicted frame and of the next one


class Training(nn.Module):
    """The talker with its training helpers."""

    def __init__(self, talker: Talker, config: Config, num_phones: int, is_compiled: bool = False):
        super().__init__()
        self.block = torch.compile(run_block, dynamic=True) if is_compiled else run_block
        self.talker, self.config = talker, config
        self.phones = nn.Linear(config.talker.hidden, 2 * num_phones)

    def forward(self, batch: Batch, depth_share: float) -> dict[str, Tensor]:
        """Return the losses: first code, other codes, where to look, phones."""
        x = self.embed(batch)
        length = x.shape[1]
        looks, named = [], None
        cos, sin = rope_table(
            torch.arange(length), self.config.talker.head_dim, self.config.talker.rope_theta, x.dtype
        )
        for i, layer in enumerate(blocks(self.talker)):
            x, q, k = self.block(layer, x, cos, sin)
            if i in GUIDED:
                looks.append(look(q, k, batch))
            if i == PHONES:
                named = self.phones(x.flatten(0, 1)[batch.rows]).unflatten(1, (2, -1))
        assert named is not None, (
            f"the talker has {len(self.talker.layers)} layers; it needs more than {PHONES}"
        )
        h = self.talker.norm(x).flatten(0, 1)[batch.rows]  # [M, D]
        heads = torch.cat(
            (self.talker.codec_head.weight[:SIZE], self.talker.codec_head.weight[[self.config.control.eos]])
        )
        return {
            "first": F.cross_entropy(F.linear(h, heads).float(), batch.first),
            "depth": self.depth(h, batch, depth_share),
            "look": torch.stack(looks).mean(),
            "phone": F.cross_entropy(
                named.flatten(0, 1).float(), batch.phones.flatten(), ignore_index=IGNORE
            ),
        }

    def embed(self, batch: Batch) -> Tensor:
        """Return the input embeddings [B, L, D]."""
        rows = self.talker.codec_embedding(batch.codec.clamp(min=0)).masked_fill(
            (batch.codec < 0)[..., None], 0
        )
        rows = rows.flatten(0, 1).index_add(0, batch.at, self.talker.frames(batch.frames))
        return self.talker.text(batch.text) + rows.view(*batch.text.shape, -1)

    def depth(self, h: Tensor, batch: Batch, share: float) -> Tensor:
        """Return the code predictor's loss on a share of the frames, since it costs as much as the talker."""
        frames = (batch.first < SIZE).nonzero()[:, 0]
        some = frames[torch.randperm(len(frames))[: max(1, round(share * len(frames)))]]
        codes = batch.given[some]  # [N, K]
        losses = [
            F.cross_entropy(x.float(), codes[:, g + 1])
            for g, x in enumerate(self.depth_logits(h[some], codes))
        ]
        return torch.stack(losses).mean()

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
            x, _, _ = self.block(layer, x, cos, sin)
        x = predictor.norm(x)
        return [head(x[:, g + 1]) for g, head in enumerate(predictor.heads)]


def blocks(stack: Talker | CodePredictor) -> list[Qwen3Block]:
    return [layer for layer in stack.layers if isinstance(layer, Qwen3Block)]


def run_block(layer: Qwen3Block, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a block over a dense batch: x [B, L, D], cos and sin [L, dim] -> x, and its first head's q and k
    [B, L, dim].

    Scores are written out, because PyTorch's fused attention takes five times as long backwards at these
    lengths."""
    q, k, v = (part.transpose(1, 2) for part in layer.project_qkv(x))  # [B, heads, L, dim]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    groups = q.unflatten(1, (k.shape[1], -1))  # [B, kv heads, heads each, L, dim]
    later = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
    scores = groups * q.shape[-1] ** -0.5 @ k[:, :, None].mT + later
    mixed = (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v[:, :, None]).flatten(1, 2)
    return layer.project_output(x, mixed.transpose(1, 2).flatten(2)), q[:, 0], k[:, 0]


def look(q: Tensor, k: Tensor, batch: Batch) -> Tensor:
    """Return a head's cross entropy in nats against the position of the next byte. q, k [B, L, dim]."""
    length = q.shape[1]
    sequence, position = batch.rows // length, batch.rows % length
    scores = (q @ k.mT * q.shape[-1] ** -0.5).flatten(0, 1)[sequence * length + position].float()  # [M, L]
    scores = scores.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
    return F.cross_entropy(scores, batch.looks_at)


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
    rows = meanings(codebooks, talker.codec_embedding.weight.shape[1])
    rows *= rows.sum(0).square().mean().rsqrt()
    talker.codec_embedding.weight[:SIZE] = rows[0]
    talker.depth.embeddings.weight.copy_(rows[1:].flatten(0, 1))


# --- batches ---


@dataclass(frozen=True)
class Curriculum:
    """Short utterances first: the longest, in frames, grows from `first` to `last` over `steps` steps."""

    first: int = 24
    last: int = 60
    steps: int = 2_000

    def longest(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(1.0, step / self.steps)


def batch_of(data: Utterances, size: int, curriculum: Curriculum, step: int) -> Batch:
    """Return `size` utterances of about the same length."""
    rng = np.random.default_rng(step)
    order = np.argsort(data.lengths, kind="stable")
    allowed = max(size, int(np.searchsorted(data.lengths[order], curriculum.longest(step))))
    start = int(rng.integers(0, max(1, allowed - 8 * size)))
    near = order[start : min(start + 8 * size, allowed)]
    return collate(data, rng.choice(near, min(size, len(near)), replace=False), rng)


def corrupt(codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return codes with errors like the talker's own.

    8 % of the frames are others of the utterance, and 5 % of the codes are random."""
    codes = codes.copy()
    wrong = rng.random(len(codes)) < 0.08
    codes[wrong] = codes[rng.integers(0, len(codes), wrong.sum())]
    any_code = rng.random(codes.shape) < 0.05
    codes[any_code] = rng.integers(0, SIZE, any_code.sum())
    return codes


def collate(data: Utterances, chosen: np.ndarray, rng: np.random.Generator) -> Batch:
    length = max(len(data.prompts[u]) + len(data.codes[u]) for u in chosen)
    pairs = np.full((len(chosen), length, 2), (0, NOTHING), np.int64)
    parts: dict[str, list[np.ndarray]] = {
        name: [] for name in ("at", "frames", "rows", "first", "given", "looks_at", "phones")
    }
    for b, u in enumerate(chosen):
        prompt, codes = data.prompts[u], data.codes[u].astype(np.int64)
        start, num = len(prompt), len(codes)
        pairs[b, :start] = prompt
        pairs[b, start : start + num, 0] = prompt[-1, 0]  # tts_pad, as at the prompt's last position
        parts["at"].append(b * length + start + np.arange(num))
        parts["frames"].append(corrupt(codes, rng))
        parts["rows"].append(b * length + start - 1 + np.arange(num + 1))
        parts["first"].append(np.append(codes[:, 0], SIZE))
        parts["given"].append(np.concatenate((codes, np.zeros_like(codes[:1]))))
        parts["looks_at"].append(data.text_starts[u] + np.append(data.spoken[u], data.spoken[u][-1]))
        named = np.append(data.phones[u], [IGNORE, IGNORE])
        parts["phones"].append(np.stack((named[:-1], named[1:]), 1))
    joined = {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in parts.items()}
    return Batch(text=torch.from_numpy(pairs[..., 0]), codec=torch.from_numpy(pairs[..., 1]), **joined)


# --- the run ---


PEAK, WARMUP = 1.5e-3, 150  # learning rate, steps


@dataclass(frozen=True)
class Plan:
    batch: int = 12
    depth_share: float = 0.25
    decay: float = 0.998
    log_every: int = 50
    curriculum: Curriculum = Curriculum()
    is_compiled: bool = True
    dtype: torch.dtype = torch.bfloat16


WEIGHTS = {"first": 1.0, "depth": 1.0, "look": 0.3, "phone": 0.3}


def train(
    training: Training, codebooks: Codebooks, data: Utterances, job: Job, plan: Plan, schedule: Schedule
) -> None:
    initialise(training, codebooks)
    optimiser = torch.optim.AdamW(training.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def compute(step: int) -> tuple[Tensor, Losses]:
        batch = batch_of(data, plan.batch, plan.curriculum, step)
        with torch.autocast("cpu", plan.dtype, enabled=plan.dtype != torch.float32):
            losses = training(batch, plan.depth_share)
        return torch.stack([WEIGHTS[name] * loss for name, loss in losses.items()]).sum(), losses

    job_train(job, training, optimiser, schedule, plan.decay, plan.log_every, compute)
