"""The checkpoint's config.json as frozen dataclasses. A missing or out-of-range key raises an error that
names it; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.checkpoint.config import (
    CODEBOOKS,
    POSITIONS,
    ROPE_THETA,
    VOCABULARY,
    WIDTH,
    ConfigBlock,
)
from zoo.checkpoint.stack import StackConfig, read_stack

VARIANTS = ("base", "custom_voice", "voice_design")
CODEC = "qwen3_tts_tokenizer_12hz"
SAMPLE_RATE_HZ = 24_000
# The last 1024 ids of the codec vocabulary are control ids; the model samples only one of them, the end.
CONTROL_IDS = 1024
NEW_TOKENS = (2, 1 << 17)  # the reference counts one token more than frames
NARROW = (1, 64)  # kernels and dilations of the speaker encoder; wider ones would need long references
# The same limits apply to a request's values: see zoo.request.sampling_options.
TEMPERATURE, TOP_K, TOP_P, PENALTY = (0.0, 2.0), (0, 1_000_000), (1e-6, 1.0), (0.5, 2.0)
# Published configs give only the speaker encoder's width and sample rate. These are the reference's class
# defaults for the other keys (configuration_qwen3_tts.py).
SPEAKER: dict[str, Any] = {
    "mel_dim": 128,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}


def qwen3_stack(block: ConfigBlock) -> StackConfig:
    """Read the sizes of a stack of Qwen3 blocks. Raises ValueError."""
    block.expect(hidden_act="silu", attention_bias=False)
    return read_stack(block, block.number("rope_theta", *ROPE_THETA))


@dataclass(frozen=True)
class Control:
    """Codec ids that are not codes."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int

    @classmethod
    def read(cls, talker: ConfigBlock, vocab: int) -> Control:
        def row(name: str) -> int:
            return talker.integer(f"codec_{name}_id", 0, vocab - 1)

        return cls(
            pad=row("pad"),
            bos=row("bos"),
            eos=row("eos_token"),
            think=row("think"),
            nothink=row("nothink"),
            think_bos=row("think_bos"),
            think_eos=row("think_eos"),
        )


@dataclass(frozen=True)
class SpeakerConfig:
    width: int
    mels: int
    channels: tuple[int, ...]  # of the first convolution, the blocks, and the joining convolution
    kernels: tuple[int, ...]  # in the same order
    dilations: tuple[int, ...]  # in the same order
    attention: int  # bottleneck channels of the pooling's attention
    parts: int  # into which a block's chain splits its channels
    gate: int  # bottleneck channels of a block's gate

    @property
    def min_frames(self) -> int:
        """Fewest mel frames that are enough for the reflect padding of every convolution."""
        return 1 + max(
            (kernel - 1) * dilation // 2
            for kernel, dilation in zip(self.kernels, self.dilations, strict=True)
        )

    @classmethod
    def read(cls, block: ConfigBlock, talker_width: int) -> SpeakerConfig:
        """Read the block. Raises ValueError for a missing key, and for values that do not fit together."""
        block.expect(sample_rate=SAMPLE_RATE_HZ)
        width = block.integer("enc_dim", *WIDTH)
        if width != talker_width:
            raise block.refuse("enc_dim", f"it must equal the talker's hidden_size, {talker_width}")
        block = block.with_defaults(SPEAKER)
        parts = block.integer("enc_res2net_scale", 2, 64)
        read = cls(
            width=width,
            mels=block.integer("mel_dim", 1, 1024),
            channels=block.integers("enc_channels", *WIDTH, lengths=(3, 16)),
            kernels=block.integers("enc_kernel_sizes", *NARROW),
            dilations=block.integers("enc_dilations", *NARROW),
            attention=block.integer("enc_attention_channels", *WIDTH),
            parts=parts,
            gate=block.integer("enc_se_channels", *WIDTH),
        )
        first, *middle, last = read.channels
        if (
            not len(read.channels) == len(read.kernels) == len(read.dilations)
            or set(middle) != {first}
            or last != len(middle) * first
        ):
            counts = f"there are {len(read.kernels)} enc_kernel_sizes and {len(read.dilations)} enc_dilations"
            known = "only equal blocks that the last convolution joins are supported"
            raise block.refuse("enc_channels", f"{counts}; {known}")
        if first % parts:
            raise block.refuse(
                "enc_res2net_scale", f"a block's {first} channels do not divide into that many equal parts"
            )
        return read


@dataclass(frozen=True)
class Config:
    variant: str
    size: str
    speaker: SpeakerConfig | None  # only Base models have one
    talker: StackConfig
    depth: StackConfig
    vocab: int  # codes and control ids of the first codebook
    depth_vocab: int
    codebooks: int
    text_vocab: int
    text_hidden: int
    max_positions: int
    control: Control
    languages: dict[str, int]
    voices: dict[str, int]
    dialects: dict[str, str]  # voice -> the dialect it speaks
    im_start: int
    im_end: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int

    @property
    def projects(self) -> bool:
        """Whether the code predictor is narrower than the talker (1.7B) and so needs a projection."""
        return self.depth.hidden != self.talker.hidden

    @property
    def takes_instructions(self) -> bool:
        """Whether the checkpoint was trained to follow instructions. The 0.6B and Base models were not; the
        reference drops their instructions."""
        return self.variant == "voice_design" or (self.variant == "custom_voice" and self.size != "0b6")

    @property
    def modes(self) -> tuple[str, ...]:
        """The voice modes, as in zoo.contract.Spec."""
        if self.variant == "custom_voice":
            return ("voice", "instruct") if self.takes_instructions else ("voice",)
        return ("clone",) if self.variant == "base" else ("design",)

    def check_codes(self, codebooks: int, size: int, where: str) -> None:
        """Raise ValueError if the codec's encoder or decoder has other codes than the model."""
        first = self.vocab - CONTROL_IDS
        if (self.codebooks, first, self.depth_vocab) != (codebooks, size, size):
            model = f"{self.codebooks}: {first} codes in the first, {self.depth_vocab} in the others"
            raise ValueError(f"{where} has {codebooks} codebooks of {size} codes, but the model has {model}")

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Read config.json. Raises ValueError for a missing or out-of-range key, and for an unsupported
        model."""
        root = ConfigBlock(config)
        if (model := str(config.get("model_type"))).startswith("qwen3_tts_tokenizer"):
            raise ValueError(
                f"this directory holds only a codec ({model}); load the model that contains it as speech_tokenizer/"
            )
        tokenizer, variant = root.string("tokenizer_type"), root.string("tts_model_type")
        if tokenizer != CODEC:
            raise ValueError(f"tokenizer_type {tokenizer!r} is not supported; supported: {CODEC}")
        if variant not in VARIANTS:
            raise ValueError(f"tts_model_type {variant!r} is not supported; supported: {', '.join(VARIANTS)}")
        talker = root.block("talker_config")
        depth = talker.block("code_predictor_config")
        for block in (talker, depth):
            block.expect_none("sliding_window")
        codebooks = talker.integer("num_code_groups", 2, CODEBOOKS[1])
        depth.expect(num_code_groups=codebooks)
        stack, speaker = qwen3_stack(talker), None
        # A fine-tuned CustomVoice directory keeps its Base model's speaker_encoder_config, but not the
        # tensors.
        if variant == "base":
            speaker = SpeakerConfig.read(root.block("speaker_encoder_config"), stack.hidden)
        vocab = talker.integer("vocab_size", CONTROL_IDS + 1, VOCABULARY[1])
        text_vocab = talker.integer("text_vocab_size", *VOCABULARY)
        languages, voices = talker.ids("codec_language_id", vocab), talker.ids("spk_id", vocab)
        if variant == "custom_voice" and not voices:
            raise talker.refuse("spk_id", "a custom_voice model needs at least one voice")

        def text_row(key: str) -> int:
            return root.integer(key, 0, text_vocab - 1)

        return cls(
            variant=variant,
            size=root.string("tts_model_size"),
            speaker=speaker,
            talker=stack,
            depth=qwen3_stack(depth),
            vocab=vocab,
            depth_vocab=depth.integer("vocab_size", *VOCABULARY),
            codebooks=codebooks,
            text_vocab=text_vocab,
            text_hidden=talker.integer("text_hidden_size", *WIDTH),
            max_positions=talker.integer("max_position_embeddings", *POSITIONS),
            control=Control.read(talker, vocab),
            languages=languages,
            voices=voices,
            dialects=_dialects(talker.block("spk_is_dialect"), languages),
            im_start=text_row("im_start_token_id"),
            im_end=text_row("im_end_token_id"),
            assistant=text_row("assistant_token_id"),
            tts_pad=text_row("tts_pad_token_id"),
            tts_bos=text_row("tts_bos_token_id"),
            tts_eos=text_row("tts_eos_token_id"),
        )


def _dialects(block: ConfigBlock, languages: dict[str, int]) -> dict[str, str]:
    """Return the dialect of each voice that has one. The config has false for the others."""
    dialects: dict[str, str] = {}
    for name, dialect in block.values.items():
        if dialect is False:
            continue
        if not isinstance(dialect, str) or dialect not in languages:
            raise block.refuse(name, "use false or a key of codec_language_id")
        dialects[name.lower()] = dialect
    return dialects


# A key of our own checkpoints: false if the model was trained only on complete texts.
FEEDS = "interleaved_text"


@dataclass(frozen=True)
class Defaults:
    """The defaults for a request, from generation_config.json."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    depth_temperature: float
    depth_top_k: int
    depth_top_p: float
    max_new_tokens: int
    feeds: bool  # whether the model can speak while text arrives; all published ones can

    @classmethod
    def read(cls, config: dict[str, Any]) -> Defaults:
        """Read the file. Raises ValueError for a missing or out-of-range key."""
        root = ConfigBlock(config, file="generation_config.json")
        draws, depth_draws = root.flag("do_sample"), root.flag("subtalker_dosample")
        return cls(
            temperature=root.number("temperature", *TEMPERATURE) if draws else 0.0,
            top_k=root.integer("top_k", *TOP_K),
            top_p=root.number("top_p", *TOP_P),
            repetition_penalty=root.number("repetition_penalty", *PENALTY),
            depth_temperature=root.number("subtalker_temperature", *TEMPERATURE) if depth_draws else 0.0,
            depth_top_k=root.integer("subtalker_top_k", *TOP_K),
            depth_top_p=root.number("subtalker_top_p", *TOP_P),
            max_new_tokens=root.integer("max_new_tokens", *NEW_TOKENS),
            feeds=root.flag(FEEDS) if FEEDS in config else True,
        )
