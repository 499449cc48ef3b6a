"""HuBERT, which is transformers'. It represents the content of a recording as 50 vectors per second. The
codec uses the mean of all layers.

    samples [B, N] at 16 kHz ─ 7 strided convs ─ linear ─ + a wide conv (position) ─ norm ─ 12 post-norm layers ─ mean of all [B, T, D]

Source: Hsu et al. 2021 (arXiv 2106.07447).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.higgs_v3.config import SemanticConfig
from zoo.nn.deferred import Deferred, Shape, scratch


class Hubert(Deferred):
    """The whole network. Run it in fp32."""

    def __init__(self, config: SemanticConfig):
        super().__init__(shapes(config))
        self.config = config

    def build(self) -> nn.Module:
        from transformers import HubertConfig, HubertModel

        c = self.config
        return HubertModel(
            HubertConfig(
                hidden_size=c.hidden,
                intermediate_size=c.inner,
                num_hidden_layers=c.layers,
                num_attention_heads=c.heads,
                conv_dim=list(c.conv_widths),
                conv_kernel=list(c.conv_kernels),
                conv_stride=list(c.conv_strides),
                num_conv_pos_embeddings=c.position_kernel,
                num_conv_pos_embedding_groups=c.position_groups,
                layer_norm_eps=float(c.eps),  # the package refuses an integer
                mask_time_prob=0.0,  # masks are for training
            )
        )

    def forward(self, samples: Tensor) -> Tensor:
        """Encode samples [B, N] at 16 kHz, with their loudness unchanged. Return [B, T, D], the mean of the
        first layer's input and all layers' outputs."""
        if samples.is_meta:
            lengths = self.lengths(samples.shape[1])
            scratch(2 * len(samples) * self.config.conv_widths[0] * lengths[0], samples)
            return samples.new_empty(len(samples), lengths[-1], self.config.hidden)
        states = self.module(samples, output_hidden_states=True).hidden_states
        return torch.stack(states, 1).mean(1)

    def lengths(self, samples: int) -> list[int]:
        """Return the number of positions after each convolution."""
        lengths = []
        for kernel, stride in zip(self.config.conv_kernels, self.config.conv_strides, strict=True):
            samples = (samples - kernel) // stride + 1
            lengths.append(samples)
        return lengths


def shapes(config: SemanticConfig) -> dict[str, Shape]:
    """Return the published names and shapes of HuBERT's tensors."""
    hidden, inner, kernel = config.hidden, config.inner, config.position_kernel
    found: dict[str, Shape] = {}

    def both(name: str, *shape: int) -> None:
        found.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    widths = (1, *config.conv_widths)
    for i, size in enumerate(config.conv_kernels):
        found[f"feature_extractor.conv_layers.{i}.conv.weight"] = (widths[i + 1], widths[i], size)
    both("feature_extractor.conv_layers.0.layer_norm", widths[1])
    both("feature_projection.layer_norm", widths[-1])
    both("feature_projection.projection", hidden, widths[-1])
    position = "encoder.pos_conv_embed.conv"
    found[f"{position}.parametrizations.weight.original0"] = (1, 1, kernel)
    found[f"{position}.parametrizations.weight.original1"] = (
        hidden,
        hidden // config.position_groups,
        kernel,
    )
    found[f"{position}.bias"] = (hidden,)
    both("encoder.layer_norm", hidden)
    for i in range(config.layers):
        layer = f"encoder.layers.{i}"
        for part in ("q", "k", "v", "out"):
            both(f"{layer}.attention.{part}_proj", hidden, hidden)
        both(f"{layer}.layer_norm", hidden)
        both(f"{layer}.feed_forward.intermediate_dense", inner, hidden)
        both(f"{layer}.feed_forward.output_dense", hidden, inner)
        both(f"{layer}.final_layer_norm", hidden)
    return found
