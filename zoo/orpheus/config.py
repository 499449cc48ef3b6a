"""config.json of the LM and of the codec as frozen dataclasses. A key that is missing or out of range is an
error that names it; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zoo.checkpoint.config import MAX_WIDTH, POSITIONS, STRIDE, VOCABULARY, WIDTH, ConfigBlock
from zoo.checkpoint.json_files import read_json
from zoo.hub import codec_directory
from zoo.nn.llama import LlamaConfig
from zoo.orpheus.tokens import CODES, COLUMNS, NUM_MARKED
from zoo.request import BLANK

MODEL = "llama"
VOICES = "voices"  # a key that no publisher writes: the voices of a fine-tune
NO_VOICE = "default"  # the text alone
SAMPLE_RATE_HZ = 24_000
CONTEXT = 8192  # positions of a training sequence (the original's README); config.json has room for more
CODEC_FOLDER = "snac_24khz"
CODEC_REPOSITORY = "hubertsiuzdak/snac_24khz"
LEVELS = (4, 2, 1)  # latent columns that a code of each level stands for


@dataclass(frozen=True)
class SnacConfig:
    """The sizes of SNAC, a codec of three levels of codes."""

    encoder_width: int
    encoder_rates: tuple[int, ...]
    decoder_width: int
    decoder_rates: tuple[int, ...]
    codebook_width: int
    has_noise: bool

    @property
    def latent(self) -> int:
        """Channels between encoder and decoder."""
        return self.encoder_width << len(self.encoder_rates)

    @property
    def column_samples(self) -> int:
        return prod(self.decoder_rates)

    @property
    def frame_samples(self) -> int:
        return self.column_samples * len(COLUMNS)

    @property
    def noise_per_frame(self) -> int:
        """Draws of noise that one frame takes: one for each position behind each upsampling."""
        total, rate = 0, len(COLUMNS)
        for stride in self.decoder_rates:
            rate *= stride
            total += rate
        return total if self.has_noise else 0

    @classmethod
    def read(cls, values: dict[str, Any], file: str = "config.json") -> SnacConfig:
        """Raises ValueError."""
        block = ConfigBlock(values, file=file)
        block.expect(
            sampling_rate=SAMPLE_RATE_HZ, codebook_size=CODES, vq_strides=list(LEVELS), depthwise=True
        )
        block.expect_none("attn_window_size")
        encoder_rates = block.integers("encoder_rates", *STRIDE)
        decoder_rates = block.integers("decoder_rates", 2, STRIDE[1])
        if any(rate % 2 for rate in decoder_rates):
            raise block.refuse("decoder_rates", "even rates are possible")
        if prod(encoder_rates) != prod(decoder_rates):
            raise block.refuse("decoder_rates", f"the encoder's rates multiply to {prod(encoder_rates)}")
        return cls(
            encoder_width=block.integer("encoder_dim", 1, MAX_WIDTH >> len(encoder_rates)),
            encoder_rates=encoder_rates,
            decoder_width=block.integer("decoder_dim", 1, MAX_WIDTH, step=1 << len(decoder_rates)),
            decoder_rates=decoder_rates,
            codebook_width=block.integer("codebook_dim", *WIDTH),
            has_noise=block.flag("noise"),
        )


@dataclass(frozen=True)
class Config:
    stack: LlamaConfig
    num_words: int  # ids in front of the special tokens (see tokens.py)
    is_tied: bool
    max_positions: int
    voices: tuple[str, ...] | None  # that a fine-tune names itself, as its prompts spell them

    @property
    def vocabulary(self) -> int:
        return self.num_words + NUM_MARKED

    @classmethod
    def read(cls, values: dict[str, Any]) -> Config:
        """Raises ValueError for what is missing or out of range."""
        block = ConfigBlock(values).with_defaults({"tie_word_embeddings": False})  # Llama's default
        block.expect(model_type=MODEL)
        return cls(
            stack=LlamaConfig.read(block),
            num_words=block.integer("vocab_size", NUM_MARKED + 1, VOCABULARY[1]) - NUM_MARKED,
            is_tied=block.flag("tie_word_embeddings"),
            max_positions=min(block.integer("max_position_embeddings", 64, POSITIONS[1]), CONTEXT),
            voices=_voices(block) if VOICES in values else None,
        )


def _voices(block: ConfigBlock) -> tuple[str, ...]:
    """Return the names in a list of voices, which may be empty. Raises ValueError."""
    names = block.get(VOICES)
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip(BLANK) for name in names):
        raise block.refuse(VOICES, "a list of names is possible")
    if len({NO_VOICE, *(name.lower() for name in names)}) != len(names) + 1:
        raise block.refuse(VOICES, f"names that differ from each other and from {NO_VOICE!r} are possible")
    return tuple(names)


def find_codec(directory: Path) -> Path:
    """Return the directory of SNAC. Raises ValueError that says where it may lie."""
    return codec_directory(directory, CODEC_FOLDER, CODEC_REPOSITORY, "Orpheus")


def read_configs(directory: Path) -> tuple[Config, SnacConfig]:
    """Return the LM's config and the codec's. Raises ValueError."""
    config = Config.read(read_json(directory / "config.json"))
    codec = find_codec(directory)
    return config, SnacConfig.read(read_json(codec / "config.json"), f"{codec.name}/config.json")
