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

from zoo.nn.frame_attention import attend_and_grow
from zoo.nn.linear import Tables
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table
from zoo.qwen3_tts.block import Qwen3Block
from zoo.qwen3_tts.config import Config


class DepthBlock(Qwen3Block):
    """A block over a dense cache. Its position in the frame is a tensor argument, so that all blocks and
    steps share one compiled region."""

    @torch.compiler.nested_compile_region
    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the block on x [B, L, D], which starts at position [1]; cos and sin [K, dim]; cache [B, 2, Hkv,
        K, dim] fp32. L is 2 at the frame's start and 1 after that. Return x, and the cache with these
        positions added."""
        q, k, v = self.project_plain_qkv(x)
        norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        mixed, cache = attend_and_grow(q, k, v, cos, sin, self.head_dim**-0.5, position, cache, norms=norms)
        return self.project_output(x, mixed.flatten(2)), cache


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
        stack = self._stack(hidden)
        codes = [first]
        x = torch.stack((hidden, first_row), 1)  # [B, 2, D]
        for step in range(self.codebooks - 1):
            here = slice(0, 2) if step == 0 else slice(step + 1, step + 2)
            x = self.project(x)
            x = stack(x, here)
            logits = self.heads[step](self.norm(x[:, -1])).float()  # [B, V]
            code = pick(logits=logits, noise=noise[:, step])
            codes.append(code)
            if step + 2 < self.codebooks:
                x = self.embeddings.rows(step, code)[:, None]  # [B, 1, D]
        return torch.stack(codes, 1)

    def _rope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [K, dim] each."""
        positions = torch.arange(self.codebooks, device=device)
        return rope_table(positions, self.config.head_dim, self.config.rope_theta, torch.float32)

    def _stack(self, hidden: Tensor) -> Callable[[Tensor, slice], Tensor]:
        """Return a function that runs all layers: x [B, L, D] and its positions -> x. Its cache starts
        empty."""
        c = self.config
        cos, sin = self._rope(hidden.device)
        shape = hidden.shape[0], 2, c.kv_heads, self.codebooks, c.head_dim
        cache = [hidden.new_empty(shape, dtype=torch.float32)] * c.layers
        positions = torch.arange(self.codebooks, device=hidden.device)

        def stack(x: Tensor, here: slice) -> Tensor:
            for i, layer in enumerate(self.layers):
                x, cache[i] = layer(x, cos, sin, positions[here][:1], cache[i])
            return x

        return stack
