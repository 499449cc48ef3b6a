"""The transformer block that the talker and the code predictor share: everything except attention itself."""

from __future__ import annotations

from torch import Tensor, nn

from zoo.checkpoint.stack import StackConfig
from zoo.nn.linear import FusedLinear, SwiGLU
from zoo.nn.norm import RMSNorm


class Qwen3Block(nn.Module):
    """Grouped-query attention with a norm per head, then a gated MLP. Both are pre-norm and residual.

    Source: transformers, models/qwen3, Qwen3DecoderLayer.
    """

    def __init__(self, config: StackConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm = RMSNorm(config.hidden, config.eps)
        self.qkv = FusedLinear(config.hidden, (queries, keys, keys))
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)
        self.out = nn.Linear(queries, config.hidden, bias=False)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config.hidden, config.inner)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] -> normalized queries [..., H, dim], normalized keys and values [..., Hkv, dim]."""
        q, k, v = self.project_plain_qkv(x)
        return self.q_norm(q), self.k_norm(k), v

    def project_plain_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as `project_qkv`, but without the norm per head."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(self.norm(x)))
        return q, k, v

    def project_output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [..., D] and the attention output of its heads [..., H * dim] -> the block's output [..., D]."""
        x = x + self.out(mixed)
        return x + self.mlp(self.mlp_norm(x))
