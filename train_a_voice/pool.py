"""The talker's data on the device: flat tensors of fixed size that may still fill up, and dense batches of
fixed shapes.

Every training step has the same launches, and the host only chooses the utterances.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train_a_voice import checkpoint
from train_a_voice.codes import SIZE, Codebooks
from train_a_voice.flite import SPEAKERS
from train_a_voice.lines import Lines
from zoo.check import check
from zoo.qwen3_tts import describe
from zoo.qwen3_tts.prompt import NOTHING, PromptWriter
from zoo.request import Request

IGNORE = -100
NEAR = 16  # codes with which a code may be confused


@dataclass(frozen=True)
class Frame:
    """The prompt around a text.

    `before` [n, 2] and `after` [m, 2] are text and codec ids; `beside` is the codec id of the text's
    positions."""

    before: np.ndarray
    after: np.ndarray
    beside: int

    @classmethod
    def of(cls, texts: Path, voice: str, language: str | None) -> Frame:
        """Return the frame that the served model's own prompt writer puts around a byte.

        texts: the checkpoint's JSON files."""
        config, _, _, spec = describe(texts)
        writer = PromptWriter(config, texts, None)

        def write(text: str) -> np.ndarray:
            request = Request(text=text, voice=voice, language=language)
            return np.array(writer(request, check(request, spec)).pairs)

        pairs = write("a")
        start = len(pairs) - 3  # after the text come its end and codec_bos
        frame = cls(pairs[:start], pairs[start + 1 :], int(pairs[start, 1]))
        assert (frame.around("a, b") == write("a, b")).all(), (
            "a prompt depends on its text in another way than by containing it"
        )
        return frame

    def around(self, text: str) -> np.ndarray:
        """Return the prompt [P, 2]."""
        raw = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        return np.concatenate((self.before, np.stack((raw, np.full_like(raw, self.beside)), 1), self.after))


@dataclass(frozen=True)
class Noise:
    """Errors in the codes that a talker reads, like those of its own speech.

    frames: share of frames that are replaced by others of the utterance; near: share of codes that become one
    of the NEAR nearest of their table; any: share of codes that become any other. Each utterance gets between
    none and twice as much."""

    frames: float = 0.06
    near: float = 0.12
    any: float = 0.03


@dataclass(frozen=True)
class Board:
    """A batch of B utterances with L positions each: a prompt, its frames, and padding."""

    text: Tensor  # [B, L], as codec ids; NOTHING without an id
    codec: Tensor  # [B, L]
    is_frame: Tensor  # [B, L]
    codes: Tensor  # [B, L, K], the codes at a position, with errors
    first: Tensor  # [B, L], the first code that a position predicts, SIZE for the end, or IGNORE
    looks_at: Tensor  # [B, L], position of the byte that is spoken in the predicted frame, or IGNORE
    phones: Tensor  # [B, L, 2], of the predicted frame and of the next one, or IGNORE
    prompts: Tensor  # [B], positions of the prompt
    lengths: Tensor  # [B], frames
    starts: Tensor  # [B], the utterance's first frame in the pool


class Pool:
    def __init__(self, texts: Path, codebooks: Codebooks, device: torch.device, utterances: int, frames: int):
        """Allocate room for a number of utterances and frames."""
        self.device, self.count, self.num_frames, self.num_pairs = device, 0, 0, 0
        languages = (None, checkpoint.LANGUAGE)
        # by speaker and language
        self.frames_of = [[Frame.of(texts, voice, language) for language in languages] for voice in SPEAKERS]
        longest = self.frames_of[0][1]
        self.pad = int(longest.after[-1, 0])  # tts_pad, as at the prompt's last position
        room = utterances * (len(longest.before) + len(longest.after)) + 2 * frames
        self.pairs = torch.zeros(room, 2, dtype=torch.int16, device=device)
        self.codes = torch.zeros(frames, codebooks.count, dtype=torch.int16, device=device)
        self.spoken, self.phones = (torch.zeros(frames, dtype=torch.uint8, device=device) for _ in range(2))
        # [U, 5] pair_start, prompt length, text start, frame_start, frames
        self.places = torch.zeros(utterances, 5, dtype=torch.int64, device=device)
        self.lengths = np.zeros(utterances, np.int64)  # positions of prompt and frames, for the host
        self.near = neighbours(codebooks).to(device)

    def add(self, lines: Lines, seed: int) -> int:
        """Add as many lines as fit, and return their number."""
        rng = np.random.default_rng(seed)
        room = self.codes.shape[0] - self.num_frames
        count = min(len(lines.texts), len(self.lengths) - self.count)
        count = min(count, int(np.searchsorted(lines.edges, room, side="right")) - 1)
        frames = [self.frames_of[speaker][int(rng.random() < 0.5)] for speaker in lines.speakers[:count]]
        prompts = [frame.around(text) for frame, text in zip(frames, lines.texts, strict=False)]
        if not prompts:
            return 0
        pairs = np.concatenate(prompts).astype(np.int16)
        if self.num_pairs + len(pairs) > len(self.pairs):
            return 0
        lines = lines.first(count)
        sizes = np.array([len(prompt) for prompt in prompts])
        places = np.stack(
            (
                self.num_pairs + np.cumsum(sizes) - sizes,
                sizes,
                [len(frame.before) for frame in frames],
                self.num_frames + lines.edges[:-1],
                np.diff(lines.edges),
            ),
            1,
        )
        self.lengths[self.count : self.count + count] = sizes + np.diff(lines.edges)
        num = len(lines.codes)
        into = slice(self.num_frames, self.num_frames + num)
        self.codes[into] = torch.from_numpy(lines.codes).to(self.device)
        self.spoken[into] = torch.from_numpy(lines.spoken.copy()).to(self.device)
        self.phones[into] = torch.from_numpy(lines.phones.copy()).to(self.device)
        self.pairs[self.num_pairs : self.num_pairs + len(pairs)] = torch.from_numpy(pairs).to(self.device)
        self.places[self.count : self.count + count] = torch.from_numpy(places).to(self.device)
        self.count, self.num_frames = self.count + count, self.num_frames + num
        self.num_pairs += len(pairs)
        return count

    def board(self, which: Tensor, length: int, noise: Noise | None) -> Board:
        """Return a batch of utterances `which` [B] of at most `length` positions. Never waits for the
        device."""
        pair_start, prompt, text_start, start, count = self.places[which].unbind(1)  # [B]
        position = torch.arange(length, device=self.device)
        in_prompt = position < prompt[:, None]  # [B, L]
        pairs = self.pairs[(pair_start[:, None] + position).clamp(max=len(self.pairs) - 1)].long()
        frame = position - prompt[:, None]
        gives = frame + 1
        is_frame = (frame >= 0) & (frame < count[:, None])
        does_give = (gives >= 0) & (gives <= count[:, None])
        given = start[:, None] + gives.minimum(count[:, None] - 1).clamp(min=0)  # [B, L]
        is_end = gives == count[:, None]
        first = torch.where(is_end, SIZE, self.codes[given, 0].long())
        here = start[:, None] + frame.clamp(min=0).minimum(count[:, None] - 1)
        codes = self.codes[here].long() if noise is None else self.noisy(here, start, count, noise)
        phone = self.phones[given].long()
        later = self.phones[start[:, None] + (gives + 1).clamp(min=0).minimum(count[:, None] - 1)].long()
        phones = torch.stack(
            (
                phone.masked_fill(~does_give | is_end, IGNORE),
                later.masked_fill(~does_give | (gives + 1 >= count[:, None]), IGNORE),
            ),
            2,
        )
        return Board(
            text=torch.where(in_prompt, pairs[..., 0], self.pad),
            codec=torch.where(in_prompt, pairs[..., 1], NOTHING),
            is_frame=is_frame,
            codes=codes,
            first=first.masked_fill(~does_give, IGNORE),
            looks_at=(text_start[:, None] + self.spoken[given].long()).masked_fill(~does_give, IGNORE),
            phones=phones,
            prompts=prompt,
            lengths=count,
            starts=start,
        )

    def noisy(self, here: Tensor, start: Tensor, count: Tensor, noise: Noise) -> Tensor:
        """Return the codes [B, L, K] of frames `here` [B, L] with noise."""

        def chance(*shape: int) -> Tensor:
            return torch.rand(*shape, device=self.device)

        level = 2 * chance(len(here), 1)
        other = start[:, None] + (chance(*here.shape) * count[:, None]).long()
        codes = self.codes[torch.where(chance(*here.shape) < noise.frames * level, other, here)].long()
        tables = torch.arange(codes.shape[2], device=self.device)
        near = self.near[tables, codes, (chance(*codes.shape) * NEAR).long()].long()
        codes = torch.where(chance(*codes.shape) < noise.near * level[..., None], near, codes)
        anything = (chance(*codes.shape) * SIZE).long()
        return torch.where(chance(*codes.shape) < noise.any * level[..., None], anything, codes)


def neighbours(codebooks: Codebooks) -> Tensor:
    """Return the codes of the same table that sound most like each code: [K, SIZE, NEAR] int16."""
    tables = [*codebooks.mel]
    tone = torch.arange(SIZE, dtype=torch.float32)
    shapes = codebooks.shapes.repeat(SIZE // len(codebooks.shapes), 1)
    tables.append(torch.cat((tone[:, None] // len(codebooks.shapes) / 2, shapes), 1))
    near = [
        torch.cdist(table, table).fill_diagonal_(torch.inf).topk(NEAR, largest=False).indices
        for table in tables
    ]
    return torch.stack(near).to(torch.int16)
