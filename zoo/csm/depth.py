"""The depth decoder: from the backbone's hidden state and a frame's first code to its other 31.

A small Llama whose cache starts empty in every frame. Position 0 reads the backbone's hidden state, and
position k reads the embedding of code k - 1. The output at position k goes through head k - 1, which gives
code k. Code 0 is already known, so one pass runs positions 0 and 1. The last code is never read, so 32 codes
need 31 passes.

    position   0       1    2    3   ...  31
    input      hidden  c0   c1   c2  ...  c30
    gives      -       c1   c2   c3  ...  c31

Every input is projected from the backbone's width to the decoder's. For the embeddings this is done once,
when they are loaded. RoPE and attention are in fp32. Source: transformers 5.23, models/csm/modeling_csm.py,
CsmDepthDecoderForCausalLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.csm.config import Config
from zoo.nn.frame_stack import FrameBlock, frame_stack
from zoo.nn.linear import Tables
from zoo.nn.llama import frequencies
from zoo.nn.narrow import dtype_of
from zoo.nn.norm import RMSNorm


class DepthDecoder(nn.Module):
    """Call `prepare` once after loading the weights."""

    cos: Tensor  # [K, dim] fp32, after prepare()
    sin: Tensor
    rows: Tensor  # [(K - 1) * V, D], after prepare(): the projected embeddings

    def __init__(self, config: Config):
        super().__init__()
        self.config = config.depth
        self.codebooks, self.vocab = config.codebooks, config.vocab
        hidden = config.depth.hidden
        self.projector = nn.Linear(config.backbone.hidden, hidden, bias=False)
        self.layers = nn.ModuleList(FrameBlock(config.depth) for _ in range(config.depth.layers))
        self.norm = RMSNorm(hidden, config.depth.eps)
        # as published: head k gives h @ published_heads[k]
        self.published_heads: nn.Parameter | None = nn.Parameter(
            torch.empty(config.codebooks - 1, hidden, config.vocab)
        )
        self.heads = nn.ModuleList()

    @torch.no_grad()
    def prepare(self, audio: Tables) -> None:
        """Compute what follows from the weights and from the backbone's embeddings of codes."""
        assert self.published_heads is not None, "prepare() ran twice"
        for matrix in self.published_heads:
            head = nn.Linear(matrix.shape[0], matrix.shape[1], bias=False, device="meta")
            head.weight = nn.Parameter(matrix.T.contiguous(), requires_grad=False)
            self.heads.append(head)
        self.published_heads = None
        weight = self.projector.weight.float()
        tables = [F.linear(audio.table(k).float(), weight) for k in range(self.codebooks - 1)]
        self.register_buffer("rows", torch.cat(tables).to(dtype_of(self.projector)), persistent=False)
        device = weight.device
        angle = torch.arange(self.codebooks, device=device)[:, None] * frequencies(self.config, device)
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, hidden: Tensor, first: Tensor, pick: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the frame's codes [B, K], from hidden [B, D] after the backbone's last norm and first [B],
        which is code 0.

        pick(logits [B, V] fp32, k) -> [B] chooses code k.
        """
        stack = frame_stack(self.layers, self.norm, self.cos, self.sin, hidden)
        codes = [first]
        x = torch.stack((self.projector(hidden), self._row(first, 0)), 1)  # [B, 2, D]
        for k in range(1, self.codebooks):
            here = slice(0, 2) if k == 1 else slice(k, k + 1)
            code = pick(self.heads[k - 1](stack(x, here)).float(), k)
            codes.append(code)
            if k + 1 < self.codebooks:
                x = self._row(code, k)[:, None]  # [B, 1, D]
        return torch.stack(codes, 1)

    def _row(self, code: Tensor, k: int) -> Tensor:
        """Return the embedding [B, D] of code k."""
        return F.embedding(code, self.rows.narrow(0, k * self.vocab, self.vocab))
