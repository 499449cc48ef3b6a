"""The speaker encoder of the Base models. It turns a voice into one row that the talker reads. The network is
ECAPA-TDNN without batch norms, and its modules are transformers'.

    mel [B, 128, T] ─ conv ─ block ─ block ─ block ─ conv over all three ─ attentive mean and deviation ─ linear ─ [B, D]
                             └── each: conv, seven convs in a chain, conv, gate by channel, + its input

The output of every convolution is as long as its input, which has reflect padding. The vector is not
normalized.
Source: Desplanques et al. 2020 (arXiv 2005.07143); QwenLM/Qwen3-TTS, modeling_qwen3_tts.py,
Qwen3TTSSpeakerEncoder; transformers 5.23, models/qwen2_5_omni.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo.nn.deferred import Deferred, Shape, scratch
from zoo.qwen3_tts.config import SpeakerConfig

PACKAGES = ("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",)
PEAK_WIDTH = 9  # values per frame and channel: the pooling joins three rows, two of them copied before


class SpeakerEncoder(Deferred):
    """The whole network of the drawing above. Run it in fp32."""

    def __init__(self, config: SpeakerConfig):
        super().__init__(shapes(config))
        self.config = config

    def build(self) -> nn.Module:
        from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

        config = self.config
        return ECAPA_TimeDelayNet(
            Qwen2_5OmniDiTConfig(
                mel_dim=config.mels,
                enc_dim=config.width,
                enc_channels=list(config.channels),
                enc_kernel_sizes=list(config.kernels),
                enc_dilations=list(config.dilations),
                enc_attention_channels=config.attention,
                enc_res2net_scale=config.parts,
                enc_se_channels=config.gate,
            )
        )

    def forward(self, mel: Tensor) -> Tensor:
        """mel [B, M, T] -> speaker vectors [B, D]. T must be at least `config.min_frames`."""
        if mel.is_meta:
            scratch(PEAK_WIDTH * self.config.channels[-1] * len(mel) * mel.shape[2], mel)
            return mel.new_empty(len(mel), self.config.width)
        return self.module(mel.mT)


def shapes(config: SpeakerConfig) -> dict[str, Shape]:
    """Return the shapes of the encoder's tensors, by their published names, which are transformers'."""
    channels, wide, gate = config.channels[0], config.channels[-1], config.gate
    first_kernel, *kernels, last_kernel = config.kernels
    convs: dict[str, Shape] = {"blocks.0.conv": (channels, config.mels, first_kernel)}
    for i, kernel in enumerate(kernels, 1):
        part = channels // config.parts
        convs |= {f"blocks.{i}.tdnn{n}.conv": (channels, channels, 1) for n in (1, 2)}
        convs |= {
            f"blocks.{i}.res2net_block.blocks.{k}.conv": (part, part, kernel) for k in range(config.parts - 1)
        }
        convs[f"blocks.{i}.se_block.conv1"] = (gate, channels, 1)
        convs[f"blocks.{i}.se_block.conv2"] = (channels, gate, 1)
    convs["mfa.conv"] = (wide, wide, last_kernel)
    convs["asp.tdnn.conv"] = (config.attention, 3 * wide, 1)
    convs["asp.conv"] = (wide, config.attention, 1)
    convs["fc"] = (config.width, 2 * wide, 1)
    return {
        f"{name}.{leaf}": shape if leaf == "weight" else shape[:1]
        for name, shape in convs.items()
        for leaf in ("weight", "bias")
    }
