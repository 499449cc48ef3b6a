"""config.json of the model and of the codec as frozen dataclasses. A key that is missing or out of range is
an error that names it; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zoo.checkpoint.config import EPS, HEADS, LAYERS, MAX_WIDTH, WIDTH, ConfigBlock
from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.stack import StackConfig
from zoo.hub import codec_directory

SAMPLE_RATE_HZ = 44_100
BOOKS = 9
CODES = 1024  # of a codebook
END, MASK = 1024, 1025  # the ids behind the codes; the heads know END, the embeddings both
DELAY = BOOKS - 1  # steps from a frame's first code to its last
ROPE_THETA = 10_000.0
CODEC_FOLDER, CODEC_REPOSITORY = "dac_44khz", "descript/dac_44khz"
# A condition's values lie in a range; Fourier features take any number of them.
VALUE = (-1e6, 1e6)
ESPEAK, SPEAKER, LANGUAGE = "espeak", "speaker", "language_id"
KINDS = {
    ESPEAK: "EspeakPhonemeConditioner",
    SPEAKER: "PassthroughConditioner",
    "emotion": "FourierConditioner",
    "fmax": "FourierConditioner",
    "pitch_std": "FourierConditioner",
    "speaking_rate": "FourierConditioner",
    LANGUAGE: "IntegerConditioner",
}
EMOTIONS = ("happiness", "sadness", "disgust", "fear", "surprise", "anger", "other", "neutral")
NUM_VALUES = {"emotion": len(EMOTIONS)}  # 1 for the others


@dataclass(frozen=True)
class Condition:
    """One entry of the prefix. num_values: how many numbers it takes, each from `low` to `high`."""

    name: str
    num_values: int
    low: float
    high: float

    @classmethod
    def read(cls, block: ConfigBlock) -> Condition:
        name = block.string("name")
        if name not in KINDS:
            raise block.refuse("name", f"known: {', '.join(KINDS)}")
        block.expect(type=KINDS[name])
        if name == ESPEAK:
            return cls(name, 0, 0, 0)
        block.expect(uncond_type="learned")
        if name == SPEAKER:
            block.expect(projection="linear")
            return cls(name, block.integer("cond_dim", *WIDTH), 0, 0)
        if name == LANGUAGE:
            low = block.integer("min_val", -1, 0)
            return cls(name, 1, low, block.integer("max_val", 108, 1 << 16))
        return cls._fourier(name, block.with_defaults({"input_dim": 1, "min_val": 0, "max_val": 1}))

    @classmethod
    def _fourier(cls, name: str, block: ConfigBlock) -> Condition:
        block.expect(input_dim=NUM_VALUES.get(name, 1))
        low = float(block.number("min_val", *VALUE))
        high = float(block.number("max_val", *VALUE))
        if high <= low:
            raise block.refuse("max_val", f"a number above min_val, {low:g}, is possible")
        return cls(name, NUM_VALUES.get(name, 1), low, high)


@dataclass(frozen=True)
class CodecConfig:
    """The sizes of DAC."""

    encoder_channels: int  # of the first convolution; each block doubles them
    decoder_channels: int  # of the first block; each block halves them
    codebook_width: int
    encoder_rates: tuple[int, ...]
    decoder_rates: tuple[int, ...]

    @property
    def latent(self) -> int:
        """Channels between encoder and decoder."""
        return self.encoder_channels << len(self.encoder_rates)

    @property
    def frame_samples(self) -> int:
        return prod(self.decoder_rates)

    @classmethod
    def read(cls, values: dict[str, Any], file: str) -> CodecConfig:
        """Raises ValueError."""
        block = ConfigBlock(values, file=file)
        rates = (2, 4, 8, 8)
        block.expect(
            model_type="dac",
            sampling_rate=SAMPLE_RATE_HZ,
            n_codebooks=BOOKS,
            codebook_size=CODES,
            downsampling_ratios=list(rates),
        )
        return cls(
            encoder_channels=block.integer("encoder_hidden_size", 1, MAX_WIDTH >> len(rates)),
            decoder_channels=block.integer("decoder_hidden_size", 1, MAX_WIDTH, step=1 << len(rates)),
            codebook_width=block.integer("codebook_dim", *WIDTH),
            encoder_rates=rates,
            decoder_rates=rates[::-1],
        )


@dataclass(frozen=True)
class Config:
    stack: StackConfig
    conditions: tuple[Condition, ...]  # in the order of the prefix

    def condition(self, name: str) -> Condition:
        return next(condition for condition in self.conditions if condition.name == name)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Config:
        """Raises ValueError for what is missing or out of range, and for the hybrid model."""
        root = ConfigBlock(values)
        root.expect(eos_token_id=END, masked_token_id=MASK)
        prefix = root.block("prefix_conditioner")
        prefix.expect(projection="linear")
        return cls(_stack(root.block("backbone")), _conditions(prefix))


def _stack(block: ConfigBlock) -> StackConfig:
    if block.block("ssm_cfg").values:
        raise block.refuse("ssm_cfg", "only the transformer is supported, not the hybrid with Mamba layers")
    block.expect(rms_norm=False, d_intermediate=0)
    layers = block.integer("n_layer", *LAYERS)
    block.expect(attn_layer_idx=list(range(layers)))
    attention = block.block("attn_cfg")
    attention.expect(causal=True, rotary_emb_interleaved=True, qkv_proj_bias=False, out_proj_bias=False)
    kv_heads = attention.integer("num_heads_kv", *HEADS)
    heads = attention.integer("num_heads", *HEADS, step=kv_heads)
    hidden = block.integer("d_model", *WIDTH, step=2 * heads)
    return StackConfig(
        hidden=hidden,
        inner=block.integer("attn_mlp_d_intermediate", *WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        eps=block.number("norm_epsilon", *EPS),
        rope_theta=ROPE_THETA,
    )


def _conditions(prefix: ConfigBlock) -> tuple[Condition, ...]:
    """Return the conditions in the file's order. Phonemes are first, so that both lanes share their pages."""
    found = prefix.get("conditioners")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise prefix.refuse("conditioners", "a list of objects is possible")
    name = "prefix_conditioner.conditioners"
    conditions = tuple(
        Condition.read(ConfigBlock(entry, f"{name}[{i}]", prefix.file)) for i, entry in enumerate(found)
    )
    names = [condition.name for condition in conditions]
    if sorted(names) != sorted(KINDS) or names[0] != ESPEAK:
        raise prefix.refuse(
            "conditioners", f"{ESPEAK} first, and each of {', '.join(KINDS)} once is possible"
        )
    return conditions


def find_codec(directory: Path) -> Path:
    """Return the directory of DAC. Raises ValueError that says where it may lie."""
    return codec_directory(directory, CODEC_FOLDER, CODEC_REPOSITORY, "Zonos")


def read_configs(directory: Path) -> tuple[Config, CodecConfig]:
    """Return the model's config and the codec's. Raises ValueError."""
    config = Config.read(read_json(directory / "config.json"))
    codec = find_codec(directory)
    return config, CodecConfig.read(read_json(codec / "config.json"), f"{codec.name}/config.json")
