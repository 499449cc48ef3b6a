"""The modules in the model's shards: the language model, a Qwen2 with a separate head, and the audio
encoder."""

from __future__ import annotations

from torch import nn

from zoo.nn.llama import Stack
from zoo.step_audio2.config import ListenerConfig, LMConfig
from zoo.step_audio2.listener import Listener


class Lm(nn.Module):
    def __init__(self, config: LMConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.stack.hidden)
        self.stack = Stack(config.stack, has_bias=True)
        self.head = nn.Linear(config.stack.hidden, config.vocab, bias=False)


class Published(nn.Module):
    """The networks in the model's shards."""

    def __init__(self, lm: LMConfig, listener: ListenerConfig):
        super().__init__()
        self.lm, self.listener = Lm(lm), Listener(listener)
