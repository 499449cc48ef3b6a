"""The code predictor: it makes a frame's other fifteen codes from the talker's hidden state and the first
code.

It is a small transformer whose cache starts empty in every frame. Position 0 reads the talker's hidden state,
position 1 the talker's embedding of the first code, and position g+1 this module's embedding of code g. The
output at position g+1, through head g, gives code g+1. The last code is never fed back.

    position   0       1    2    3   ...  15
    input      hidden  c0   c1   c2  ...  c14
    gives      -       c1   c2   c3  ...  c15

The variances of the norms, RoPE and attention stay in fp32, because bf16 is audible there (vllm-omni #2274).
Source: QwenLM/Qwen3-TTS, modeling_qwen3_tts.py, Qwen3TTSTalkerCodePredictorModelForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.checkpoint.stack import StackConfig
from zoo.nn.frame_stack import FrameBlock, frame_stack
from zoo.nn.linear import Tables
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table
from zoo.qwen3_tts.config import Config


class DepthBlock(FrameBlock):
    """A block with a norm per head."""

    def __init__(self, config: StackConfig):
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)


class CodePredictor(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        depth = config.depth
        self.config = depth
        self.codebooks = config.codebooks
        # [K - 1, V, D]: as wide as the talker
        self.embeddings = Tables(config.codebooks - 1, config.depth_vocab, config.talker.hidden)
        self.project = nn.Linear(config.talker.hidden, depth.hidden) if config.projects else nn.Identity()
        self.layers = nn.ModuleList(DepthBlock(depth) for _ in range(depth.layers))
        self.norm = RMSNorm(depth.hidden, depth.eps)
        self.heads = nn.ModuleList(
            nn.Linear(depth.hidden, config.depth_vocab, bias=False) for _ in range(config.codebooks - 1)
        )

    def forward(
        self, hidden: Tensor, first: Tensor, first_row: Tensor, noise: Tensor, pick: Callable[..., Tensor]
    ) -> Tensor:
        """Return the frame's codes [B, K].

        hidden [B, D] comes after the talker's final norm; first [B] is code 0 and first_row [B, D] its
        embedding. pick(logits=, noise=) chooses each code: [B, V] fp32 -> [B]; noise [B, K - 1, V].
        """
        positions, depth = torch.arange(self.codebooks, device=hidden.device), self.config
        rotary = rope_table(positions, depth.head_dim, depth.rope_theta, torch.float32)  # [K, dim] each
        stack = frame_stack(self.layers, self.norm, *rotary, hidden)
        codes = [first]
        x = torch.stack((hidden, first_row), 1)  # [B, 2, D]
        for step in range(self.codebooks - 1):
            here = slice(0, 2) if step == 0 else slice(step + 1, step + 2)
            logits = self.heads[step](stack(self.project(x), here)).float()  # [B, V]
            code = pick(logits=logits, noise=noise[:, step])
            codes.append(code)
            if step + 2 < self.codebooks:
                x = self.embeddings.rows(step, code)[:, None]  # [B, 1, D]
        return torch.stack(codes, 1)
