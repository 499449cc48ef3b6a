"""The YAML files of the model and of its codec, and the backbone's config.json, as frozen dataclasses.

A key that is missing or out of range is an error that names it; unknown keys are ignored. A converted checkpoint
has a config.json instead of the model's YAML file and of the backbone's file.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from zoo.checkpoint.config import MAX_WIDTH, POSITIONS, WIDTH, ConfigBlock
from zoo.checkpoint.json_files import read_config, read_json
from zoo.checkpoint.yaml_files import read_yaml
from zoo.hub import codec_directory
from zoo.nn.llama import LlamaConfig
from zoo.opuslm.ids import BOOKS, STREAMS, YAML, Vocabulary

JSON = "config.json"  # of a converted checkpoint
BACKBONE, CODEC = "backbone", "codec"  # folders
REPOSITORY = "ftshijt/espnet_codec_dac_large_v1.4_360epoch"  # of the codec
SAMPLE_RATE_HZ = 16_000
DELAY = STREAMS - 1  # steps from a frame's first id to its last
HEAD_ROWS = 12  # of `head_emb`; one for each stream is used
OLMO, LLAMA = "olmo2", "llama"
MODELS = {"espnet": False, "dpo": True}  # `model` of config.yaml: whether it is OpusLM-Dialogue
CONVERTED = {"opuslm": False, "opuslm_dialogue": True}  # `model_type` of config.json
log = logging.getLogger(__name__)
# The bodies of the published checkpoints: their repositories are named, and not copied, by the checkpoint.
BODIES: dict[str, dict[str, Any]] = {
    "allenai/OLMo-2-1124-7B": {
        "model_type": OLMO,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
    },
    "HuggingFaceTB/SmolLM2-1.7B": {
        "model_type": LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 130_000.0,
    },
}
# ESPnet's own, of keys that a file may lack
DEFAULTS = {"model": "espnet", "cleaner": None, "audio_modality": "codec_ssl", "pad_speaker_prompt": True}


@dataclass(frozen=True)
class Config:
    vocabulary: Vocabulary
    body: LlamaConfig
    is_olmo: bool  # whether the body is OLMo-2's, and not Llama's
    voice_frames: int  # the most frames of a voice prompt
    pads_voices: bool  # whether shorter voice prompts are padded
    max_positions: int
    is_dialogue: bool  # whether it is OpusLM-Dialogue
    is_converted: bool = False  # whether names and config are those of a converter of vLLM's

    @classmethod
    def read(cls, values: dict[str, Any], backbone: dict[str, Any] | None) -> Config:
        """Raises ValueError. backbone: the content of backbone/config.json, None without it."""
        root = ConfigBlock(values, file=YAML).with_defaults(DEFAULTS)
        _check_recipe(root)
        transformer = root.block("transformer_conf").with_defaults({"n_ctx": 8192})
        body = _body(transformer, backbone)
        sizes = LlamaConfig.read(body)
        if sizes.head_dim % 2:
            raise body.refuse("hidden_size", "heads of an even width are possible")
        return cls(
            Vocabulary.read(root),
            sizes,
            body.values["model_type"] == OLMO,
            root.integer("speaker_prompt_length", 1, 4096),
            root.flag("pad_speaker_prompt"),
            transformer.integer("n_ctx", *POSITIONS),
            is_dialogue=MODELS[root.values["model"]],
        )

    @classmethod
    def of_converted(cls, values: dict[str, Any]) -> Config:
        """Read a converted checkpoint's config.json. Raises ValueError."""
        root = ConfigBlock(values)
        if root.get("model_type") not in tuple(CONVERTED):
            raise root.refuse("model_type", f"{' and '.join(CONVERTED)} are possible")
        root.expect(tie_word_embeddings=False, nq=STREAMS)
        is_dialogue = CONVERTED[root.values["model_type"]]
        sizes = LlamaConfig.read(root)
        if sizes.head_dim % 2:
            raise root.refuse("hidden_size", "heads of an even width are possible")
        if not is_dialogue and sizes.eps == 1e-5:
            log.warning("%s has rms_norm_eps 1e-05, but OLMo-2 and ESPnet have 1e-06", JSON)
        return cls(
            Vocabulary.of_converted(root),
            sizes,
            not is_dialogue,
            root.integer("speaker_prompt_length", 1, 4096),
            True,
            root.integer("max_position_embeddings", *POSITIONS),
            is_dialogue,
            is_converted=True,
        )


def _check_recipe(root: ConfigBlock) -> None:
    """Raise ValueError for a model that was built in another way."""
    if root.values["model"] not in tuple(MODELS):
        raise root.refuse("model", f"{' and '.join(MODELS)} are possible")
    root.expect(
        cleaner=None,
        corelm="ar_delay",
        transformer="huggingface",
        audio_modality="codec_ssl",
        codec_token_per_frame=STREAMS,
        codec_token_in_use=STREAMS,
        subword_choice="huggingface",
    )
    root.block("corelm_conf").with_defaults({"share_emb": False}).expect(share_emb=False)


def _body(transformer: ConfigBlock, backbone: dict[str, Any] | None) -> ConfigBlock:
    """Return the sizes of the body, from the checkpoint's own file or else from the table."""
    if backbone is not None:
        block = ConfigBlock(backbone, file=f"{BACKBONE}/{JSON}")
        if block.get("model_type") not in (OLMO, LLAMA):
            raise block.refuse("model_type", f"{OLMO} and {LLAMA} are possible")
        return block
    tag = transformer.string("hf_model_tag")
    known = next((body for name, body in BODIES.items() if tag.startswith(name)), None)
    if known is None:
        advice = f"put its {JSON} into {BACKBONE}/, or use one of {', '.join(BODIES)}"
        raise transformer.refuse("hf_model_tag", f"its sizes are not known: {advice}")
    return ConfigBlock(known, file=tag)


@dataclass(frozen=True)
class CodecConfig:
    """The sizes of the decoder: a SEANet behind an LSTM."""

    width: int  # of a code's vector
    channels: int  # of the last level; each level below has twice as many
    residuals: int  # units of a level
    rates: tuple[int, ...]
    kernel: int
    unit_kernel: int
    last_kernel: int
    dilation: int  # of a unit: this to the power of its index
    compress: int  # how many times fewer channels a unit has inside
    lstm: int  # layers
    num_codes: int

    @property
    def frame_samples(self) -> int:
        return prod(self.rates)

    @classmethod
    def read(cls, values: dict[str, Any], file: str) -> CodecConfig:
        """Raises ValueError."""
        root = ConfigBlock(values, file=file)
        root.expect(codec="dac")
        conf = root.block("codec_conf")
        conf.expect(sampling_rate=SAMPLE_RATE_HZ)
        block = conf.block("generator_params").with_defaults({"decoder_final_activation": None})
        block.expect(
            encdec_channels=1,
            encdec_activation="Snake",
            encdec_norm="weight_norm",
            encdec_causal=False,
            encdec_pad_mode="reflect",
            encdec_true_skip=False,
            decoder_final_activation=None,
            quantizer_n_q=BOOKS,
        )
        width = block.integer("hidden_dim", *WIDTH)
        block.expect(codebook_dim=width)  # otherwise there are projections
        rates = block.integers("encdec_ratios", 2, 16, (1, 6))
        compress = block.integer("encdec_compress", 1, 16)
        kernels = (f"encdec_{name}kernel_size" for name in ("", "residual_", "last_"))
        kernel, unit_kernel, last_kernel = (_odd(block, name) for name in kernels)
        return cls(
            width=width,
            channels=block.integer("encdec_n_filters", compress, MAX_WIDTH >> len(rates), step=compress),
            residuals=block.integer("encdec_n_residual_layers", 1, 6),
            rates=rates,
            kernel=kernel,
            unit_kernel=unit_kernel,
            last_kernel=last_kernel,
            dilation=block.integer("encdec_dilation_base", 1, 4),
            compress=compress,
            lstm=block.integer("encdec_lstm", 1, 8),
            num_codes=block.integer("quantizer_bins", 1, 1 << 16),
        )


def _odd(block: ConfigBlock, name: str) -> int:
    value = block.integer(name, 1, 31)
    if value % 2 == 0:
        raise block.refuse(name, "an odd number is possible")
    return value


@dataclass(frozen=True)
class CodecFiles:
    """The paths of the files in the codec's directory, from its meta.yaml."""

    config: Path
    weights: Path

    @classmethod
    def find(cls, directory: Path) -> CodecFiles:
        """Raises ValueError."""
        folder = codec_directory(directory, CODEC, REPOSITORY, "OpusLM")
        root = ConfigBlock(read_yaml(folder / "meta.yaml"), file=f"{folder.name}/meta.yaml")
        return cls(
            folder / _inside(root.block("yaml_files"), "train_config"),
            folder / _inside(root.block("files"), "model_file"),
        )


def _inside(block: ConfigBlock, key: str) -> str:
    """Return a relative path that leads nowhere else."""
    path = PurePosixPath(block.string(key))
    if path.is_absolute() or ".." in path.parts:
        raise block.refuse(key, "a path inside the directory is possible")
    return str(path)


def is_opuslm(directory: Path) -> bool:
    """Return whether a directory's config.yaml is that of an ESPnet speech LM with delayed streams, or its
    config.json that of a converted one. The YAML file has megabytes of tokens, so it is searched and not
    parsed."""
    if is_converted(directory):
        return True
    path = directory / YAML
    if not path.is_file():
        return False
    text = path.read_bytes()
    return all(re.search(line, text, re.MULTILINE) for line in (rb"^corelm: ar_delay\r?$", rb"^token_bias:"))


def is_converted(directory: Path) -> bool:
    """Return whether a directory has the config.json of a converted checkpoint. Raises ValueError if it cannot be
    read."""
    return read_config(directory).get("model_type") in tuple(CONVERTED)


def read_configs(directory: Path) -> tuple[Config, CodecConfig]:
    """Return the model's config and the codec's. Raises ValueError."""
    if is_converted(directory):
        config = Config.of_converted(read_json(directory / JSON))
    else:
        backbone = directory / BACKBONE / JSON
        values = read_yaml(directory / YAML)
        config = Config.read(values, read_json(backbone) if backbone.exists() else None)
    path = CodecFiles.find(directory).config
    codec = CodecConfig.read(read_yaml(path), f"{CODEC}/{path.name}")
    if codec.num_codes != config.vocabulary.num_codes:
        ours = config.vocabulary.num_codes
        raise ValueError(
            f"the codec {path} has {codec.num_codes} codes in a codebook, and the model has {ours}"
        )
    return config, codec


def find_weights(directory: Path) -> Path:
    """Return the file of the weights: model.pth, or else the only .pth. Raises ValueError."""
    files = sorted(directory.glob("*.pth"))
    usual = directory / "model.pth"
    if usual in files or not files:
        return usual
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{directory} has several checkpoints ({names}); name one of them {usual.name}")
    return files[0]


def find_tokenizer(directory: Path) -> Path:
    """Return the tokenizer's file, which the published checkpoints lack. Raises ValueError."""
    places = [directory / folder / "tokenizer.json" for folder in ("", "tokenizer", BACKBONE)]
    for path in places:
        if path.is_file():
            return path
    advice = f"put tokenizer.json of the model that {YAML} names as subword_model into {directory}"
    raise ValueError(f"the text tokenizer of OpusLM is missing: {advice}")
