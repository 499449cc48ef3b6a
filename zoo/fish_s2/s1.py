"""OpenAudio S1-mini (`dual_ar`), the model before S2. It has the same blocks and codec; this file has the
differences.

                        S2 Pro                                   S1-mini
    config.json         nested, with the ids                     flat; the ids are in special_tokens.json
    prompt              a chat                                   one line of speech after another, see below
    head of code 0      tied to the text embedding               a separate matrix
    fast AR reads       the hidden state after the final norm    the hidden state before the final norm
    draws               top-p, top-k, temperature; a second      repetition penalty over the last 16 frames,
                        draw if code 0 repeats                   top-p, temperature
    residual codes      4,096 per codebook                       1,024 per codebook

    <|interleave|> · for each reference: <|speaker:0|> · its transcript · its frames · <|im_end|>
                   · <|speaker:0|> · text

Source: facts of fish-speech 0.1.0, content_sequence.py and models/text2semantic/{llama,inference}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.check import check
from zoo.checkpoint.config import CODEBOOKS, EPS, LAYERS, POSITIONS, ROPE_THETA, VOCABULARY, ConfigBlock
from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.tensor_files import TensorFile, open_file
from zoo.contract import Batch, Prompt, Said
from zoo.fish_s2.clone import Cloner
from zoo.fish_s2.config import S1, Config, StackConfig
from zoo.fish_s2.model import FishFamily, FishState
from zoo.fish_s2.prompt import HINTS, TextTokenizer, Writer
from zoo.fish_s2.sampling import draw
from zoo.fish_s2.vocabulary import END, INTERLEAVE, semantic
from zoo.nn.sampling import gumbel, keep_logits, penalise
from zoo.request import Reference, Request, RequestError, sampling_options
from zoo.text import tiktoken

LM_FILE, SPECIAL_FILE, TIKTOKEN = "model.pth", "special_tokens.json", "tokenizer.tiktoken"
# From fish-speech 0.1.0, tokenizer.py. Its `(\?!\S)` matches a literal question mark, which looks like a
# mistake, but the model was trained with it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{P}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(\?!\S)|\s+"
)
LICENCE = (
    "CC-BY-NC-SA-4.0: only non-commercial use, with attribution; share adaptations under the same licence"
)
NUM_RESIDUAL_CODES = 1024  # rows of the fast head from which residual codes are drawn
PENALTY_WINDOW = 16  # frames
OPTIONS = sampling_options(temperature=0.8, top_k=0, top_p=0.8, repetition_penalty=1.1)
S1_HINTS = {
    "voice": HINTS["voice"],
    "language": HINTS["language"],
    "instructions": "use markers in the text, such as (whispering)",
    "chunk_length": "it speaks the whole text in one pass",
}
SPEAKER = "<|speaker:0|>"


# --- files ---


def read_config(config: dict[str, Any], special: dict[str, Any]) -> Config:
    """Read config.json and special_tokens.json. Raises ValueError for a missing, out-of-range or unsupported
    value."""
    root, ids = ConfigBlock(config), ConfigBlock(special, file=SPECIAL_FILE)
    root.expect(model_type=S1, tie_word_embeddings=False, scale_codebook_embeddings=True)
    theta, eps = root.number("rope_base", *ROPE_THETA), root.number("norm_eps", *EPS)
    size, vocab = root.integer("codebook_size", *VOCABULARY), root.integer("vocab_size", *VOCABULARY)
    return Config(
        slow=StackConfig.read(root, theta, eps, has_qk_norm=True),
        fast=StackConfig.read(_fast(root), theta, eps, has_qk_norm=False),
        vocab=vocab,
        codebooks=root.integer("num_codebooks", 2, CODEBOOKS[1]),
        codebook_size=size,
        max_positions=root.integer("max_seq_len", 2, POSITIONS[1]),
        end=ids.integer(END, 0, vocab - 1),
        semantic_start=ids.integer(semantic(0), 0, vocab - size),
        num_residual_codes=min(size, NUM_RESIDUAL_CODES),
        is_s1=True,
    )


def _fast(root: ConfigBlock) -> ConfigBlock:
    """Return the fast_* keys without their prefix. A key that is null takes the slow stack's value."""
    prefix = "fast_"
    values = {
        key.removeprefix(prefix): root.values.get(key.removeprefix(prefix)) if value is None else value
        for key, value in root.values.items()
        if key.startswith(prefix)
    }
    fast = ConfigBlock(values | {"n_layer": root.integer("n_fast_layer", *LAYERS)}, "fast_*")
    fast.expect(dim=root.get("dim"))
    return fast


def open_lm(directory: Path) -> TensorFile:
    """Open model.pth with the tensor names of the original's class. Raises ValueError.

    A training run adds the prefix `model.` and the tensors of an audio encoder, which speech synthesis does
    not use. Both are removed, as in the original.
    """
    file = open_file(directory / LM_FILE)
    names = {name.removeprefix("model."): name for name in file.headers if "audio_" not in name}
    headers = {ours: file.headers[theirs] for ours, theirs in names.items()}
    return TensorFile(file.path, headers, lambda name: file.read(names[name]))


def read_tokenizer(directory: Path, config: Config) -> TextTokenizer:
    """Read the tokenizer. The ids in special_tokens.json must follow the ranks of the vocabulary. Raises
    ValueError."""
    path, special = directory / SPECIAL_FILE, read_json(directory / SPECIAL_FILE)
    ranks = tiktoken.read_ranks(directory / TIKTOKEN)
    expected = {token: len(ranks) + i for i, token in enumerate(special)}
    for token, index in expected.items():
        if special[token] != index:
            given = f"{path} gives {token} the id {special[token]!r}"
            raise ValueError(f"{given}; after the {len(ranks)} tokens of {TIKTOKEN} it must be {index}")
    return TextTokenizer(path, expected, tiktoken.tokenizer(ranks, SPLIT), config, (INTERLEAVE,))


# --- the prompt ---


class LineWriter(Writer):
    """Writes S1's prompt as columns [T, 1 + K] int64 on the CPU."""

    def __init__(self, config: Config, directory: Path, cloner: Cloner):
        super().__init__(config, read_tokenizer(directory, config), cloner)
        special = self.tokenize.special
        self._speaker = [special[SPEAKER]] if SPEAKER in special else self.tokenize(SPEAKER)

    def __call__(self, text: str, references: Sequence[Reference], before: Said | None = None) -> Tensor:
        """Return the prompt. before: earlier speech of the same voice, which takes the place of a reference.
        Raises RequestError for an invalid reference."""
        said = [part for reference in references for part in self._line(reference)]
        if before is not None:
            said += self._said(before.text, before.frames)
        now = self._text(self._speaker, self.tokenize(text))
        return torch.cat((self._text([self.tokenize.special[INTERLEAVE]]), *said, now))

    def _line(self, reference: Reference) -> tuple[Tensor, ...]:
        if reference.speaker is not None:
            known = "OpenAudio S1-mini has a single, unnamed speaker"
            raise RequestError("speaker", f"speaker is {reference.speaker!r}, but {known}")
        return self._said(reference.transcript or "", self.cloner(reference.clip))

    def _said(self, text: str, codes: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of a line of speech: its text, and its codes [F, K]."""
        words = self._text(self._speaker, self.tokenize(text))
        return words, self.frames(codes), self._text([self.config.end])


# --- the model ---


class S1State(FishState):
    """The state of a slot, with repetition_penalty [S+1] added. recent [S+1, PENALTY_WINDOW, K] holds whole
    frames: the latest is last, and missing frames are zeros."""

    repetition_penalty: Tensor

    def __init__(self, family: OpenAudioS1, slots: int, max_frames: int):
        super().__init__(family, slots, max_frames)
        self.add("recent", PENALTY_WINDOW, family.config.codebooks, dtype=torch.int64)
        self.add("repetition_penalty", default=1)


class OpenAudioS1(FishFamily[LineWriter]):
    sampled = ("temperature", "top_k", "top_p", "repetition_penalty")

    def prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        read = self.writer(request.text, request.references, said)
        return self._pass(request, values, request.text, read, request.seed)

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self.prompt(request, said)

    def state(self, slots: int, max_frames: int | None = None) -> FishState:
        return S1State(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states before the final norm. Only the head reads them after the norm."""
        return self.stack(inputs, batch, norm=None)

    def emit(self, state: FishState, slots: Tensor, h: Tensor) -> None:
        """Append one frame per slot, or the end, as in S2. Residual codes that occur in the same codebook of
        the last PENALTY_WINDOW frames are less likely; `_oldest` gives the penalized code 0."""
        assert isinstance(state, S1State), type(state)
        alive = ~state.done[slots]
        steps = state.steps[slots]
        seed = state.seed[slots]
        recent = state.recent[slots]  # [B, PENALTY_WINDOW, K]
        penalty = torch.where(steps > 0, state.repetition_penalty[slots], 1.0)
        sampling = state.temperature[slots], state.top_k[slots], state.top_p[slots]
        size, codebooks = self.config.codebook_size, self.config.codebooks
        num_residual = self.config.num_residual_codes

        scores = penalise(self.scores(self.lm.norm(h), steps), self._oldest(recent, steps), penalty)
        token = draw(scores, *sampling, gumbel(seed, steps, range(1), size + 1)[:, 0])
        noise = gumbel(seed, steps, range(1, codebooks), num_residual)  # [B, K - 1, V]

        def pick(logits: Tensor, k: int) -> Tensor:
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, recent[:, :, k], True)
            return draw(penalise(logits, seen, penalty), *sampling, noise[:, k - 1])

        drawn: list[Tensor] = []
        frame = self.lm.fast(h, token.clamp(max=size - 1), keep_logits(pick, drawn))  # [B, K]
        state.check(slots, torch.cat(drawn, 1))
        moved = torch.cat((recent[:, 1:], frame[:, None]), 1)
        state.recent[slots] = torch.where((alive & (steps > 0))[:, None, None], moved, recent)
        state.append(slots, frame, token == size)

    def _oldest(self, recent: Tensor, steps: Tensor) -> Tensor:
        """Return a mask [B, V + 1] of the penalized code 0, which is only that of the oldest frame in the
        window. The first frame never enters the window. (The original reads the window's first column,
        probably instead of its first row.)"""
        at = (PENALTY_WINDOW + 1 - steps).clamp(0, PENALTY_WINDOW - 1)  # [B]
        code = recent[:, :, 0].gather(1, at[:, None])  # [B, 1]
        index = torch.arange(self.config.codebook_size + 1, device=steps.device)
        return (index == code) & (steps > 1)[:, None]
