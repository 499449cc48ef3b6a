"""The checkpoint's config.json as frozen dataclasses. A missing key is an error that names it; unknown keys are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.nn.config import need

VARIANTS = ("base", "custom_voice", "voice_design")
CODEC = "qwen3_tts_tokenizer_12hz"
SAMPLE_RATE_HZ = 24_000
# Published configs name the speaker encoder's width and rate alone; the rest is the reference's (configuration_qwen3_tts.py).
SPEAKER: dict[str, Any] = {
    "mel_dim": 128,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}


@dataclass(frozen=True)
class StackConfig:
    """A stack of Qwen3 blocks."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def read(cls, config: dict[str, Any], where: str) -> StackConfig:
        activation, bias = need(config, "hidden_act", where), need(config, "attention_bias", where)
        if activation != "silu" or bias:
            raise ValueError(f"config.json: {where} has hidden_act={activation!r}, attention_bias={bias}; possible: 'silu', false")
        return cls(
            hidden=need(config, "hidden_size", where),
            inner=need(config, "intermediate_size", where),
            layers=need(config, "num_hidden_layers", where),
            heads=need(config, "num_attention_heads", where),
            kv_heads=need(config, "num_key_value_heads", where),
            head_dim=need(config, "head_dim", where),
            eps=need(config, "rms_norm_eps", where),
            rope_theta=need(config, "rope_theta", where),
        )


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


@dataclass(frozen=True)
class SpeakerConfig:
    width: int
    mels: int
    channels: tuple[int, ...]  # of the first convolution, of the blocks, of the one that joins the blocks
    kernels: tuple[int, ...]  # likewise
    dilations: tuple[int, ...]  # likewise
    attention: int  # channels in the middle of the pooling's attention
    parts: int  # of a block's chain
    gate: int  # channels in the middle of a block's gate

    @property
    def min_frames(self) -> int:
        """Frames that the mirrored ends of every convolution need."""
        return 1 + max((kernel - 1) * dilation // 2 for kernel, dilation in zip(self.kernels, self.dilations, strict=True))

    @classmethod
    def read(cls, config: dict[str, Any], talker_width: int) -> SpeakerConfig:
        """Raises ValueError for what is missing and for what does not fit together."""
        where = "speaker_encoder_config"
        rate_hz, width = need(config, "sample_rate", where), need(config, "enc_dim", where)
        if rate_hz != SAMPLE_RATE_HZ:
            raise ValueError(f"config.json: {where} has sample_rate={rate_hz}; only {SAMPLE_RATE_HZ} is known")
        if width != talker_width:
            raise ValueError(f"config.json: {where} has enc_dim={width}, but the talker that reads it has hidden_size={talker_width}")
        config = SPEAKER | config
        read = cls(
            width=width,
            mels=config["mel_dim"],
            channels=tuple(config["enc_channels"]),
            kernels=tuple(config["enc_kernel_sizes"]),
            dilations=tuple(config["enc_dilations"]),
            attention=config["enc_attention_channels"],
            parts=config["enc_res2net_scale"],
            gate=config["enc_se_channels"],
        )
        first, *middle, last = read.channels
        if not len(read.channels) == len(read.kernels) == len(read.dilations) or set(middle) != {first} or last != len(middle) * first:
            raise ValueError(
                f"config.json: {where} has enc_channels={list(read.channels)} with {len(read.kernels)} enc_kernel_sizes and "
                f"{len(read.dilations)} enc_dilations; known are equal blocks, all of which the last convolution joins"
            )
        return read


@dataclass(frozen=True)
class Config:
    variant: str
    size: str
    speaker: SpeakerConfig | None  # of the Base models
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
        """The 0.6B models were not trained for them and neither were the Base models: the reference drops them."""
        return self.variant == "voice_design" or (self.variant == "custom_voice" and self.size != "0b6")

    @property
    def modes(self) -> tuple[str, ...]:
        """As in zoo.contract.Spec."""
        if self.variant == "custom_voice":
            return ("voice", "instruct") if self.takes_instructions else ("voice",)
        return ("clone",) if self.variant == "base" else ("design",)

    @classmethod
    def read(cls, config: dict[str, Any]) -> Config:
        """Raises ValueError for what is missing, and for models that this package cannot run, by name."""
        if (model := config.get("model_type", "")).startswith("qwen3_tts_tokenizer"):
            raise ValueError(f"this directory is a codec alone ({model}) and cannot speak; a model has it as speech_tokenizer/")
        tokenizer, variant = need(config, "tokenizer_type", "the root"), need(config, "tts_model_type", "the root")
        if tokenizer != CODEC:
            raise ValueError(f"tokenizer_type {tokenizer!r} is not supported; supported: {CODEC}")
        if variant not in VARIANTS:
            raise ValueError(f"tts_model_type {variant!r} is not supported; supported: {', '.join(VARIANTS)}")
        talker = need(config, "talker_config", "the root")
        depth = need(talker, "code_predictor_config", "talker_config")
        t, where = (lambda key: need(talker, key, "talker_config")), "talker_config"
        if talker.get("sliding_window") or depth.get("sliding_window"):
            raise ValueError("config.json: sliding_window is not supported in talker_config")
        if need(depth, "num_code_groups", "code_predictor_config") != t("num_code_groups"):
            raise ValueError("config.json: num_code_groups differs between talker_config and code_predictor_config")
        stack, speaker = StackConfig.read(talker, where), None
        if variant == "base":  # fine-tuned CustomVoice directories keep the block of the Base model they come from, but not its tensors
            speaker = SpeakerConfig.read(need(config, "speaker_encoder_config", "the root"), stack.hidden)
        return cls(
            variant=variant,
            size=need(config, "tts_model_size", "the root"),
            speaker=speaker,
            talker=stack,
            depth=StackConfig.read(depth, "code_predictor_config"),
            vocab=t("vocab_size"),
            depth_vocab=need(depth, "vocab_size", "code_predictor_config"),
            codebooks=t("num_code_groups"),
            text_vocab=t("text_vocab_size"),
            text_hidden=t("text_hidden_size"),
            max_positions=t("max_position_embeddings"),
            control=Control(
                pad=t("codec_pad_id"),
                bos=t("codec_bos_id"),
                eos=t("codec_eos_token_id"),
                think=t("codec_think_id"),
                nothink=t("codec_nothink_id"),
                think_bos=t("codec_think_bos_id"),
                think_eos=t("codec_think_eos_id"),
            ),
            languages={name.lower(): index for name, index in t("codec_language_id").items()},
            voices={name.lower(): index for name, index in t("spk_id").items()},
            dialects={name.lower(): dialect for name, dialect in t("spk_is_dialect").items() if dialect},
            im_start=need(config, "im_start_token_id", "the root"),
            im_end=need(config, "im_end_token_id", "the root"),
            assistant=need(config, "assistant_token_id", "the root"),
            tts_pad=need(config, "tts_pad_token_id", "the root"),
            tts_bos=need(config, "tts_bos_token_id", "the root"),
            tts_eos=need(config, "tts_eos_token_id", "the root"),
        )


@dataclass(frozen=True)
class Defaults:
    """generation_config.json: what a request gets that does not say."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    depth_temperature: float
    depth_top_k: int
    depth_top_p: float
    max_new_tokens: int

    @classmethod
    def read(cls, config: dict[str, Any]) -> Defaults:
        def value(key: str) -> Any:
            if key not in config:
                raise ValueError(f"generation_config.json has no {key!r}")
            return config[key]

        return cls(
            temperature=value("temperature") if value("do_sample") else 0.0,
            top_k=value("top_k"),
            top_p=value("top_p"),
            repetition_penalty=value("repetition_penalty"),
            depth_temperature=value("subtalker_temperature") if value("subtalker_dosample") else 0.0,
            depth_top_k=value("subtalker_top_k"),
            depth_top_p=value("subtalker_top_p"),
            max_new_tokens=value("max_new_tokens"),
        )
