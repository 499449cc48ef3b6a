"""The checkpoint's config.json as frozen dataclasses. A missing key is an error that names it; unknown keys are ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from zoo.nn.config import need

# What the published config.json leaves to the reference's defaults, and the only values that this package knows.
VAE_FIXED: dict[str, Any] = {"depthwise": True, "use_noise_block": False, "cond_type": "scale_bias", "cond_out_layer": False}
# The same of the first generation (model/voxcpm.py, modules/audiovae/audio_vae.py): VoxCPM-0.5B says nothing of its VAE.
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


@dataclass(frozen=True)
class Rope:
    """LongRoPE: the angle of position t and pair i is t / factors[i] * theta ** (-2 i / head_dim)."""

    theta: float
    factors: tuple[float, ...]  # one per pair of values of a head
    amplitude: float

    @classmethod
    def read(cls, lm: dict[str, Any]) -> Rope:
        where = "lm_config.rope_scaling"
        scaling = need(lm, "rope_scaling", "lm_config")
        if (kind := need(scaling, "type", where)) != "longrope":
            raise ValueError(f"config.json: {where} has type={kind!r}; only 'longrope' is known")
        most, trained = need(lm, "max_position_embeddings", "lm_config"), need(scaling, "original_max_position_embeddings", where)
        factors = need(scaling, "long_factor" if most > trained else "short_factor", where)
        amplitude = math.sqrt(1 + math.log(most / trained) / math.log(trained))
        return cls(need(lm, "rope_theta", "lm_config"), tuple(factors), amplitude)


@dataclass(frozen=True)
class StackConfig:
    """A stack of MiniCPM4 blocks."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope | None  # None: the blocks know no positions

    @classmethod
    def read(cls, lm: dict[str, Any]) -> StackConfig:
        where = "lm_config"
        hidden, heads = need(lm, "hidden_size", where), need(lm, "num_attention_heads", where)
        return cls(
            hidden=hidden,
            inner=need(lm, "intermediate_size", where),
            layers=need(lm, "num_hidden_layers", where),
            heads=heads,
            kv_heads=need(lm, "num_key_value_heads", where),
            head_dim=lm.get("kv_channels") or hidden // heads,
            eps=need(lm, "rms_norm_eps", where),
            rope=Rope.read(lm),
        )

    def local(self, block: dict[str, Any], where: str) -> StackConfig:
        """One of the small stacks that work within a patch: it has its own sizes, and the rest of this one."""
        hidden, heads = need(block, "hidden_dim", where), need(block, "num_heads", where)
        return replace(
            self,
            hidden=hidden,
            inner=need(block, "ffn_dim", where),
            layers=need(block, "num_layers", where),
            heads=heads,
            head_dim=block.get("kv_channels") or hidden // heads,
        )


@dataclass(frozen=True)
class VaeConfig:
    latent: int  # channels of a latent frame
    encoder_width: int  # channels of the first convolution, doubled by each stride
    encoder_rates: tuple[int, ...]
    decoder_width: int  # channels of the first block, halved by each
    decoder_rates: tuple[int, ...]
    rate_hz: int  # of what is encoded
    out_rate_hz: int
    boundaries: tuple[int, ...]  # of the classes of output rates, in Hz; empty where the decoder knows one rate alone
    pads_odd: bool  # the encoder pads a convolution of an odd stride by one sample more

    @property
    def hop_samples(self) -> int:
        """Samples that are encoded as one latent frame."""
        return prod(self.encoder_rates)

    @property
    def frame_samples(self) -> int:
        """Samples that one latent frame is decoded to."""
        return prod(self.decoder_rates)

    @property
    def rate_class(self) -> int:
        """Which row of the decoder's rate tables the output rate takes: how many boundaries lie below it."""
        return sum(boundary < self.out_rate_hz for boundary in self.boundaries)

    @classmethod
    def read(cls, config: dict[str, Any], is_first_generation: bool) -> VaeConfig:
        where = "audio_vae_config"
        if is_first_generation:
            config = OLD_VAE | config
            config |= {"out_sample_rate": need(config, "sample_rate", where), "sr_bin_boundaries": []}
        for key, known in VAE_FIXED.items():
            if config.get(key, known) != known:
                raise ValueError(f"config.json: {where} has {key}={config[key]!r}; only {known!r} is known")
        read = cls(
            latent=need(config, "latent_dim", where),
            encoder_width=need(config, "encoder_dim", where),
            encoder_rates=tuple(need(config, "encoder_rates", where)),
            decoder_width=need(config, "decoder_dim", where),
            decoder_rates=tuple(need(config, "decoder_rates", where)),
            rate_hz=need(config, "sample_rate", where),
            out_rate_hz=need(config, "out_sample_rate", where),
            boundaries=tuple(need(config, "sr_bin_boundaries", where)),
            pads_odd=is_first_generation,
        )
        if any(low >= high for low, high in pairwise(read.boundaries)):
            raise ValueError(f"config.json: {where} has sr_bin_boundaries={list(read.boundaries)}; they must ascend")
        if read.hop_samples * read.out_rate_hz != read.frame_samples * read.rate_hz:
            raise ValueError(
                f"config.json: {where} encodes {read.hop_samples} samples of {read.rate_hz} Hz as a latent frame and decodes it to "
                f"{read.frame_samples} samples of {read.out_rate_hz} Hz, which do not last as long"
            )
        return read


@dataclass(frozen=True)
class Config:
    is_first_generation: bool  # the first generation adds what VoxCPM2 lays side by side
    lm: StackConfig
    residual: StackConfig
    encoder: StackConfig
    dit: StackConfig
    vae: VaeConfig
    vocab: int
    patch: int  # latent frames of one position
    fsq_width: int
    fsq_scale: int
    max_positions: int

    @property
    def frame_samples(self) -> int:
        """Samples of one patch."""
        return self.patch * self.vae.frame_samples

    @property
    def name(self) -> str:
        return ("VoxCPM1.5" if self.vae.rate_hz == 44_100 else "VoxCPM-0.5B") if self.is_first_generation else "VoxCPM2"

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Raises ValueError for what is missing, and for models that this package cannot run, by name."""
        root, is_first_generation = "the root", is_old(config)
        if is_first_generation:
            local = {name: OLD_LOCAL | need(config, name, root) for name in ("encoder_config", "dit_config")}
            config = OLD | {"audio_vae_config": {}} | config | local
        lm, vae = need(config, "lm_config", root), VaeConfig.read(need(config, "audio_vae_config", root) or {}, is_first_generation)
        if need(lm, "use_mup", "lm_config"):
            raise ValueError("config.json: lm_config has use_mup=true; only false is known")
        dit = need(config, "dit_config", root)
        if dit.get("dit_mean_mode") or (is_first_generation and config.get("dit_mean_mode")):
            raise ValueError("config.json: dit_config has dit_mean_mode=true; only false is known")
        solver = need(dit, "cfm_config", "dit_config").get("solver", "euler")
        if solver != "euler":
            raise ValueError(f"config.json: dit_config.cfm_config has solver={solver!r}; only 'euler' is known")
        if (channels := need(config, "feat_dim", root)) != vae.latent:
            raise ValueError(f"config.json: feat_dim is {channels}, but audio_vae_config has latent_dim={vae.latent}")
        stack = StackConfig.read(lm)
        no_rope = need(config, "residual_lm_no_rope", root)
        read = cls(
            is_first_generation=is_first_generation,
            lm=stack,
            residual=replace(stack, layers=need(config, "residual_lm_num_layers", root), rope=None if no_rope else stack.rope),
            encoder=stack.local(need(config, "encoder_config", root), "encoder_config"),
            dit=stack.local(dit, "dit_config"),
            vae=vae,
            vocab=need(lm, "vocab_size", "lm_config"),
            patch=need(config, "patch_size", root),
            fsq_width=need(config, "scalar_quantization_latent_dim", root),
            fsq_scale=need(config, "scalar_quantization_scale", root),
            max_positions=min(need(config, "max_length", root), need(lm, "max_position_embeddings", "lm_config")),
        )
        for where, part in (("lm_config", read.lm), ("encoder_config", read.encoder), ("dit_config", read.dit)):
            assert part.rope is not None
            if len(part.rope.factors) != part.head_dim // 2:
                factors = f"lm_config.rope_scaling has {len(part.rope.factors)} factors"
                raise ValueError(f"config.json: {where} has heads of {part.head_dim} values, but {factors}")
        return read


def is_old(config: dict[str, Any]) -> bool:
    """Whether a VoxCPM config is of the first generation. Re-uploads state model_type, and wrongly: what it holds decides."""
    if (architecture := str(config.get("architecture", "")).lower()) in ("voxcpm", "voxcpm2"):
        return architecture == "voxcpm"
    return "residual_lm_no_rope" not in config and "out_sample_rate" not in config.get("audio_vae_config", {})
