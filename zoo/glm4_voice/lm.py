"""GLM-4's stack. Half of a head's values turn with the position, in neighbouring pairs.

The shared block turns value i with value i + D/2. So the rows of queries and keys are reordered when they are loaded:
pair k goes to places k and k + D/2. Values that do not turn follow, with an angle of 0.
Source: THUDM/glm-4-9b, modeling_chatglm.py; transformers 5.23, models/glm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.glm4_voice.config import LMConfig
from zoo.nn import llama
from zoo.nn.llama import LlamaConfig


class Stack(llama.Stack):
    """Llama's stack with a bias of queries, keys and values, and GLM-4's angles."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, has_bias=True)

    def prepare(self) -> None:
        turning = self.config.head_dim // 2
        exponents = torch.arange(0, turning, 2, dtype=torch.float32, device=self.norm.weight.device) / turning
        angle = 1.0 / self.config.rope_theta**exponents
        self.register_buffer("angle", torch.cat((angle, torch.zeros_like(angle))), persistent=False)


class Lm(nn.Module):
    def __init__(self, config: LMConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.stack.hidden)
        self.stack = Stack(config.stack)
        self.head = nn.Linear(config.stack.hidden, config.vocab, bias=False)
        # published, and checked, but it follows from the config
        self.unread = nn.ParameterList([torch.empty(config.stack.head_dim // 4)])


def order(head_dim: int) -> list[int]:
    """Return the published place of each of our values of a head."""
    half = head_dim // 2
    resting = list(range(half, head_dim))
    return [*range(0, half, 2), *resting[: half // 2], *range(1, half, 2), *resting[half // 2 :]]


def reordered(config: LlamaConfig, name: str, value: Tensor) -> Tensor:
    """Return a published tensor with the rows of queries and keys in our order."""
    if "query_key_value" not in name:
        return value
    turned = (config.heads + config.kv_heads) * config.head_dim
    heads = value[:turned].unflatten(0, (-1, config.head_dim))
    return torch.cat((heads[:, order(config.head_dim)].flatten(0, 1), value[turned:]))
