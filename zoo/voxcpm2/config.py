"""The checkpoint's config.json as frozen dataclasses. A missing or out-of-range key raises an error that
names it; unknown keys are ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from zoo.checkpoint.config import (
    EPS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    MAX_WIDTH,
    POSITIONS,
    RATE_HZ,
    ROPE_THETA,
    STRIDE,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)

# Keys that the published config.json leaves to the reference's defaults. No other values are supported.
VAE_FIXED: dict[str, Any] = {
    "depthwise": True,
    "use_noise_block": False,
    "cond_type": "scale_bias",
    "cond_out_layer": False,
}
# Defaults of the first generation (model/voxcpm.py, modules/audiovae/audio_vae.py). The config of VoxCPM-0.5B
# does not describe its VAE.
OLD_LOCAL: dict[str, Any] = {"hidden_dim": 1024, "ffn_dim": 4096, "num_heads": 16, "num_layers": 4}
OLD_VAE: dict[str, Any] = {
    "encoder_dim": 128,
    "encoder_rates": [2, 5, 8, 8],
    "latent_dim": 64,
    "decoder_dim": 1536,
    "decoder_rates": [8, 8, 5, 2],
    "sample_rate": 16000,
}
OLD: dict[str, Any] = {
    "patch_size": 2,
    "feat_dim": 64,
    "residual_lm_num_layers": 6,
    "residual_lm_no_rope": False,
    "scalar_quantization_latent_dim": 256,
    "scalar_quantization_scale": 9,
    "max_length": 4096,
}
PATCH = (1, 64)  # latent frames, each a token of the small stacks
FACTOR = (1e-3, 1e6)  # divisor of a rotary angle
FSQ_SCALE = (1, 1 << 16)


@dataclass(frozen=True)
class Rope:
    """LongRoPE. The angle of position t and pair i is t / factors[i] * theta ** (-2 i / head_dim)."""

    theta: float
    factors: tuple[float, ...]  # one per pair of values of a head
    amplitude: float

    @classmethod
    def read(cls, lm: ConfigBlock) -> Rope:
        scaling = lm.block("rope_scaling")
        scaling.expect(type="longrope")
        most = lm.integer("max_position_embeddings", *POSITIONS)
        trained = scaling.integer("original_max_position_embeddings", 2, POSITIONS[1])
        key = "long_factor" if most > trained else "short_factor"
        factors = scaling.numbers(key, *FACTOR, lengths=(1, HEAD_DIM[1] // 2))
        amplitude = math.sqrt(max(0, 1 + math.log(most / trained) / math.log(trained)))
        return cls(lm.number("rope_theta", *ROPE_THETA), factors, amplitude)


@dataclass(frozen=True)
class StackConfig:
    """The sizes of a stack of MiniCPM4 blocks."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope | None  # None: the blocks have no positional encoding

    @classmethod
    def read(cls, lm: ConfigBlock) -> StackConfig:
        hidden, kv_heads = lm.integer("hidden_size", *WIDTH), lm.integer("num_key_value_heads", *HEADS)
        heads = lm.integer("num_attention_heads", *HEADS, step=kv_heads)
        return cls(
            hidden=hidden,
            inner=lm.integer("intermediate_size", *WIDTH),
            layers=lm.integer("num_hidden_layers", *LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(lm, hidden, heads),
            eps=lm.number("rms_norm_eps", *EPS),
            rope=Rope.read(lm),
        )

    def local(self, block: ConfigBlock) -> StackConfig:
        """Return the config of a small stack within a patch: its own sizes, the rest from this stack."""
        hidden = block.integer("hidden_dim", 4, MAX_WIDTH, step=2)  # even, for the sines and cosines of times
        heads = block.integer("num_heads", *HEADS, step=self.kv_heads)
        return replace(
            self,
            hidden=hidden,
            inner=block.integer("ffn_dim", *WIDTH),
            layers=block.integer("num_layers", *LAYERS),
            heads=heads,
            head_dim=_head_dim(block, hidden, heads),
        )


def _head_dim(block: ConfigBlock, hidden: int, heads: int) -> int:
    if block.values.get("kv_channels") is None:
        return hidden // heads
    return block.integer("kv_channels", *HEAD_DIM, step=2)


@dataclass(frozen=True)
class VaeConfig:
    """The sizes and rates of the AudioVAE."""

    latent: int  # channels of a latent frame
    encoder_width: int  # channels of the first convolution; each stride doubles them
    encoder_rates: tuple[int, ...]
    decoder_width: int  # channels of the first block; each block halves them
    decoder_rates: tuple[int, ...]
    rate_hz: int  # of the encoder's input
    out_rate_hz: int
    # between classes of output rates, in Hz; empty if the decoder supports only one rate
    boundaries: tuple[int, ...]
    pads_odd: bool  # the encoder pads a convolution of odd stride by one more sample

    @property
    def hop_samples(self) -> int:
        """Input samples per latent frame."""
        return prod(self.encoder_rates)

    @property
    def frame_samples(self) -> int:
        """Output samples per latent frame."""
        return prod(self.decoder_rates)

    @property
    def rate_class(self) -> int:
        """The output rate's row in the decoder's rate tables: the number of boundaries below it."""
        return sum(boundary < self.out_rate_hz for boundary in self.boundaries)

    @classmethod
    def read(cls, block: ConfigBlock, is_first_generation: bool) -> VaeConfig:
        if is_first_generation:
            block = block.with_defaults(OLD_VAE)
            one_rate = {"out_sample_rate": block.get("sample_rate"), "sr_bin_boundaries": []}
            block = replace(block, values=block.values | one_rate)
        block.with_defaults(VAE_FIXED).expect(**VAE_FIXED)
        encoder_rates = block.integers("encoder_rates", *STRIDE)
        decoder_rates = block.integers("decoder_rates", *STRIDE)
        read = cls(
            latent=block.integer("latent_dim", *WIDTH),
            encoder_width=block.integer("encoder_dim", 1, MAX_WIDTH >> len(encoder_rates)),
            encoder_rates=encoder_rates,
            decoder_width=block.integer("decoder_dim", 1 << len(decoder_rates), MAX_WIDTH),
            decoder_rates=decoder_rates,
            rate_hz=block.integer("sample_rate", *RATE_HZ),
            out_rate_hz=block.integer("out_sample_rate", *RATE_HZ),
            boundaries=block.integers("sr_bin_boundaries", *RATE_HZ, lengths=(0, 16)),
            pads_odd=is_first_generation,
        )
        if any(low >= high for low, high in pairwise(read.boundaries)):
            raise block.refuse("sr_bin_boundaries", "they must ascend")
        if read.hop_samples * read.out_rate_hz != read.frame_samples * read.rate_hz:
            heard = f"{read.hop_samples} samples of {read.rate_hz} Hz as a latent frame"
            made = f"{read.frame_samples} samples of {read.out_rate_hz} Hz, a different duration"
            raise ValueError(f"{block.file}: {block.name} encodes {heard} and decodes it to {made}")
        return read


@dataclass(frozen=True)
class Config:
    """A whole config.json of either generation."""

    is_first_generation: bool  # the first generation adds vectors where VoxCPM2 concatenates them
    lm: StackConfig
    residual: StackConfig
    encoder: StackConfig
    dit: StackConfig
    vae: VaeConfig
    vocab: int
    patch: int  # latent frames per position
    fsq_width: int
    fsq_scale: int
    max_positions: int

    @property
    def frame_samples(self) -> int:
        """Output samples per patch."""
        return self.patch * self.vae.frame_samples

    @property
    def name(self) -> str:
        if not self.is_first_generation:
            return "VoxCPM2"
        return "VoxCPM1.5" if self.vae.rate_hz == 44_100 else "VoxCPM-0.5B"

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Read a config.json. Raises ValueError that names a missing, unsupported or out-of-range key."""
        root, is_first_generation = ConfigBlock(config), is_old(config)
        if is_first_generation:
            root = root.with_defaults(OLD | {"audio_vae_config": {}})
            root.expect_none("dit_mean_mode")
            if root.values["audio_vae_config"] is None:
                root = replace(root, values=root.values | {"audio_vae_config": {}})
        vae = VaeConfig.read(root.block("audio_vae_config"), is_first_generation)
        lm, encoder, dit = (root.block(name) for name in ("lm_config", "encoder_config", "dit_config"))
        if is_first_generation:
            encoder, dit = encoder.with_defaults(OLD_LOCAL), dit.with_defaults(OLD_LOCAL)
        lm.expect(use_mup=False)
        dit.expect_none("dit_mean_mode")
        dit.block("cfm_config").with_defaults({"solver": "euler"}).expect(solver="euler")
        if root.integer("feat_dim", *WIDTH) != vae.latent:
            raise root.refuse("feat_dim", f"audio_vae_config has latent_dim={vae.latent}")
        stack = StackConfig.read(lm)
        layers, no_rope = root.integer("residual_lm_num_layers", *LAYERS), root.flag("residual_lm_no_rope")
        read = cls(
            is_first_generation=is_first_generation,
            lm=stack,
            residual=replace(stack, layers=layers, rope=None if no_rope else stack.rope),
            encoder=stack.local(encoder),
            dit=stack.local(dit),
            vae=vae,
            vocab=lm.integer("vocab_size", *VOCABULARY),
            patch=root.integer("patch_size", *PATCH),
            fsq_width=root.integer("scalar_quantization_latent_dim", *WIDTH),
            fsq_scale=root.integer("scalar_quantization_scale", *FSQ_SCALE),
            max_positions=min(
                root.integer("max_length", *POSITIONS), lm.integer("max_position_embeddings", *POSITIONS)
            ),
        )
        for block, part in ((lm, read.lm), (encoder, read.encoder), (dit, read.dit)):
            assert part.rope is not None
            if 2 * len(part.rope.factors) != part.head_dim:
                heads = f"{block.name} has heads of {part.head_dim} values"
                factors = f"lm_config.rope_scaling has {len(part.rope.factors)} factors"
                raise ValueError(f"{block.file}: {heads}, but {factors}")
        return read


def is_old(config: dict[str, Any]) -> bool:
    """Return whether a VoxCPM config is of the first generation.

    model_type is ignored, because re-uploads state a wrong one. If the architecture is missing, other keys
    decide.
    """
    if (architecture := str(config.get("architecture", "")).lower()) in ("voxcpm", "voxcpm2"):
        return architecture == "voxcpm"
    vae = config.get("audio_vae_config")
    return "residual_lm_no_rope" not in config and not (isinstance(vae, dict) and "out_sample_rate" in vae)
