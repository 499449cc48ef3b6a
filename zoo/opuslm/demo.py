"""Random checkpoints in the published layout, without trained weights. They serve tests, first tries and
speed measurements.

    write("demo", "tiny")    # half a megabyte, runs anywhere; "tiny_smollm" has the body of the 1.7B model
    write("mid", "mid")      # 180 million parameters; the codec as published
    write("full", "full")    # the published shapes and sizes, 15 GB, all of them in memory while it is written

The published repository has model.pth and config.yaml; codec, tokenizer and body come from others and lie in
folders. A tensor's values depend only on (seed, published name, shape). The codec is in fp32 whatever the
model's dtype is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.nn.llama_vocabulary import added_token, tokenizer, vocabulary
from zoo.opuslm.config import (
    BACKBONE,
    BODIES,
    BOOKS,
    CODEC,
    LLAMA,
    OLMO,
    REPOSITORY,
    SAMPLE_RATE_HZ,
    STREAMS,
    YAML,
    CodecConfig,
    Config,
)
from zoo.opuslm.voices import FOLDER

# --- configs ------------------------------------------------------------------------------------------------

MARKED = {
    0: "<pad>",
    1: "<unk>",
    2: "<blank>",
    3: "<space>",
    4: "<continuous_placeholder>",
    5: "<sos/eos>",
    8: "<system_prompt>",
    9: "<user_input>",
    10: "<assistant_output>",
    32: "<codec_start/end>",
    33: "<ssl_start/end>",
    34: "<codec_ssl_start/end>",
    35: "<text_bpe_start/end>",
    36: "<g2p_start/end>",
    37: "<spk_start/end>",
    64: "<textlm_task>",
    80: "<codec_ssl_asr_task>",
    81: "<codec_ssl_tts_task>",
    82: "<codec_ssl_plain_tts_task>",
    83: "<codec_ssl_audiolm_task>",
    88: "<text_dialogue_task>",
    89: "<audio_dialogue_task>",
}
NUM_MARKED, NUM_PHONES, NUM_ADDED = 256, 70, 1
END_OF_TEXT = "<|endoftext|>"


def _tokens(clusters: int, codes: int, words: int) -> tuple[list[str], dict[str, list[int]]]:
    """Return token_list and token_bias, for so many clusters, codes of a codebook, and words."""
    blocks = {
        "special_token": [MARKED.get(i, f"<unused_token_{i}>") for i in range(NUM_MARKED)],
        "ssl": [f"<ssl_code{i + 1}>" for i in range(clusters)],
        "codec": [f"<codec_layer{k}_code{i}>" for k in range(BOOKS) for i in range(codes)],
        "text_bpe": [*vocabulary(words - NUM_ADDED), END_OF_TEXT],
        "g2p": [f"g2p_{i}" for i in range(NUM_PHONES)],
    }
    tokens: list[str] = []
    bias = {}
    for name, block in blocks.items():
        bias[name] = [len(tokens), len(tokens) + len(block)]
        tokens += block
    return tokens, bias


def _yaml(tag: str, clusters: int, codes: int, words: int, voice_frames: int) -> dict[str, Any]:
    """Return config.yaml. tag: the repository of the body."""
    tokens, bias = _tokens(clusters, codes, words)
    return {
        "token_list": tokens,
        "token_bias": bias,
        "encoder_decoder_format": False,
        "speaker_prompt_length": voice_frames,
        "pad_speaker_prompt": True,
        "subword_choice": "huggingface",
        "subword_model": tag,
        "cleaner": None,
        "g2p": None,
        "codec_token_per_frame": STREAMS,
        "codec_token_in_use": STREAMS,
        "audio_modality": "codec_ssl",
        "corelm": "ar_delay",
        "corelm_conf": {"share_emb": False},
        "transformer": "huggingface",
        "transformer_conf": {"hf_model_tag": tag, "attention_choice": "sdpa", "n_ctx": 8192},
        "model": "espnet",
        "model_conf": {},
    }


def _body(kind: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the body's config.json. sizes: hidden, inner, layers, heads, kv heads."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    known = next(body for body in BODIES.values() if body["model_type"] == kind)
    return known | dict(zip(names, sizes, strict=True)) | {"hidden_act": "silu", "attention_bias": False}


def _codec(width: int, channels: int, codes: int) -> dict[str, Any]:
    """Return the codec's config.yaml."""
    return {
        "codec": "dac",
        "codec_conf": {
            "sampling_rate": SAMPLE_RATE_HZ,
            "generator_params": {
                "hidden_dim": width,
                "codebook_dim": width,
                "encdec_channels": 1,
                "encdec_n_filters": channels,
                "encdec_n_residual_layers": 3,
                "encdec_ratios": [8, 5, 4, 2],
                "encdec_activation": "Snake",
                "encdec_norm": "weight_norm",
                "encdec_kernel_size": 7,
                "encdec_residual_kernel_size": 7,
                "encdec_last_kernel_size": 7,
                "encdec_dilation_base": 2,
                "encdec_causal": False,
                "encdec_pad_mode": "reflect",
                "encdec_true_skip": False,
                "encdec_compress": 2,
                "encdec_lstm": 2,
                "decoder_trim_right_ratio": 1.0,
                "decoder_final_activation": None,
                "quantizer_n_q": BOOKS,
                "quantizer_bins": codes,
                "quantizer_target_bandwidth": [0.5, 1, 2, 4],
            },
        },
    }


OLMO_TAG, SMOLLM_TAG = "allenai/OLMo-2-1124-7B", "HuggingFaceTB/SmolLM2-1.7B"
PUBLISHED_CODEC = _codec(512, 32, 1024)
TINY = (50, 16, 500, 12)  # clusters, codes, words, frames of a voice prompt
PUBLISHED = (5000, 1024, 100_352, 500)
# config.yaml, the body's config.json (None: as published, by its tag), and the codec's config.yaml
CONFIGS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]]] = {
    "tiny": lambda: (_yaml(OLMO_TAG, *TINY), _body(OLMO, (64, 128, 2, 4, 2)), _codec(16, 4, 16)),
    "tiny_smollm": lambda: (_yaml(SMOLLM_TAG, *TINY), _body(LLAMA, (48, 96, 3, 4, 4)), _codec(16, 4, 16)),
    "mid": lambda: (_yaml(OLMO_TAG, *PUBLISHED), _body(OLMO, (768, 2048, 12, 12, 12)), PUBLISHED_CODEC),
    "full": lambda: (_yaml(OLMO_TAG, *PUBLISHED), None, PUBLISHED_CODEC),
    "full_smollm": lambda: (
        _yaml(SMOLLM_TAG, 5000, 1024, 49_152, 500) | {"subword_model": "HuggingFaceTB/SmolLM-1.7B"},
        None,
        PUBLISHED_CODEC,
    ),
}
SIZES = tuple(CONFIGS)

# --- values -------------------------------------------------------------------------------------------------

# (pattern of the published name, mean, deviation, whether to divide the deviation by the root of the fan-in).
# The first match counts. The values are chosen to catch errors: none is one, zero, or small enough that a
# missing branch of the network would go unnoticed.
MODEL_RULES: tuple[Rule, ...] = (
    (r"norm\.weight$", 1.0, 0.1, False),
    (r"\.emb\.weight$", 0.0, 0.5, False),
    (r"\.head_emb\.weight$", 0.0, 0.5, False),
    (r"lm_head\.weight$", 0.0, 3.0, True),
    (r"\.[qk]_proj\.weight$", 0.0, 2.0, True),  # so that attention tells positions apart
    (r"\.weight$", 0.0, 1.0, True),
)
CODEC_RULES: tuple[Rule, ...] = (
    (r"\.alpha$", 1.0, 0.2, False),
    (r"\.embed(_avg)?$", 0.0, 0.5, False),
    (r"cluster_size$", 9.0, 1.0, False),
    (r"\.model\.23\.conv\.conv\.bias$", 0.0, 0.001, False),
    (r"\.bias(_\w+)?$", 0.0, 0.1, False),
    (r"\.model\.23\.conv\.conv\.weight_g$", 0.05, 0.005, False),  # quiet audio
    (r"\.convtr\.weight_g$", 1.6, 0.2, False),
    (r"\.shortcut\..*weight_g$", 0.8, 0.1, False),
    (r"\.weight_g$", 0.7, 0.1, False),
    (r"\.weight_v$", 0.0, 1.0, True),
    (r"\.weight_\w+$", 0.0, 1.5, True),
)
# name -> a row, and how much larger it is than others: the pad, whose vector is zero in the published files, and the
# end, so that some speeches end after a few dozen frames
SCALED = {"corelm.emb.weight": (0, 0.1), "corelm.lm_head.weight": (5, 1.1)}
PASSENGERS = {  # tensors of the codec's file that decoding does not read, a few of many
    "codec.generator.encoder.model.0.conv.conv.bias": (4,),
    "codec.discriminator.mpd.0.convs.0.bias": (2,),
}


def fill(name: str, shape: tuple[int, ...], seed: int, rules: tuple[Rule, ...] = MODEL_RULES) -> np.ndarray:
    """Return random float32 values for the tensor with that published name. Raises ValueError if no rule
    matches."""
    values = synthetic.fill(name, shape, f"opuslm:{seed}", rules)
    row, factor = SCALED.get(name, (0, 1.0))
    if factor == 1.0:
        return values
    values = values.copy()  # a rehearsal gives an array that cannot be written
    values[row] *= factor
    return values


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    codec: dict[str, Any] | None = None,
    has_new_names: bool = False,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout and return its directory.

    config: changes to config.yaml; codec: to the codec's. has_new_names: whether weight norm has the names of
    newer releases of PyTorch. Raises ValueError for an unknown size, key or dtype, and if the directory is not
    empty.
    """
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.opuslm import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, codec, **config)
    lm_config, codec_config, _ = describe(directory)
    backbone, decoder = build(lm_config, codec_config)
    shapes = weights.shapes(lm_config, published(backbone, weights.lm(lm_config)))
    tensors = {name: torch.from_numpy(fill(name, shape, seed)).to(dtype) for name, shape in shapes.items()}
    tensors["criterion.lm_head.weight"] = tensors[weights.HEAD]
    torch.save(tensors, directory / "model.pth")
    shapes = weight_normed(published(decoder, weights.codec(codec_config)), weights.is_normed)
    shapes |= PASSENGERS
    torch.save(_codec_tensors(shapes, seed, has_new_names), directory / CODEC / MODEL_FILE)
    _write_voice(directory, lm_config)
    return directory


def _codec_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, has_new_names: bool
) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(fill(name, shape, seed, CODEC_RULES)) for name, shape in shapes.items()}
    for name in [name for name in tensors if name.endswith("._codebook.embed")]:
        book = name.removesuffix("embed")
        tensors |= {f"{book}inited": torch.ones(1), f"{book}embed_avg": 9 * tensors[name]}
        tensors[f"{book}cluster_size"] = torch.full((len(tensors[name]),), 9.0)
    if not has_new_names:
        return tensors
    return {renamed(name): value for name, value in tensors.items()}


def renamed(name: str) -> str:
    """Return a tensor's name as newer releases of PyTorch write it."""
    new = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{new.get(leaf, leaf)}"


EXPERIMENT = "exp/codec_train_dac_large_v1.4_raw_fs16000"
MODEL_FILE, CODEC_YAML = f"{EXPERIMENT}/360epoch.pth", f"{EXPERIMENT}/{YAML}"


def write_texts(directory: str | Path, size: str, codec: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write the YAML and JSON files of a checkpoint, without its tensors. Arguments and errors are those of
    `write`."""
    directory, make = synthetic.begin(directory, size, CONFIGS)
    model, body, codec_values = make()
    change(model, config, YAML)
    change(codec_values, codec or {}, f"{CODEC}/{YAML}")
    words = len(Config.read(model, body).vocabulary.words)  # raises an error before anything is written
    CodecConfig.read(codec_values, f"{CODEC}/{YAML}")
    (directory / CODEC / EXPERIMENT).mkdir(parents=True, exist_ok=True)
    _write_yaml(directory / YAML, model)
    _write_yaml(directory / CODEC / CODEC_YAML, codec_values)
    files = {"files": {"model_file": MODEL_FILE}, "yaml_files": {"train_config": CODEC_YAML}}
    _write_yaml(directory / CODEC / "meta.yaml", {"espnet": "202402", "repository": REPOSITORY} | files)
    if body is not None:
        (directory / BACKBONE).mkdir()
        synthetic.write_json(directory / BACKBONE / "config.json", body)
    added = added_token(words - NUM_ADDED, END_OF_TEXT)
    content = tokenizer(words - NUM_ADDED, [added]) | {"post_processor": None}
    synthetic.write_json(directory / "tokenizer.json", content)
    return directory


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _write_voice(directory: Path, config: Config) -> None:
    """Write a voice of a few frames. Its first cluster is 0, which the reference takes for a pad."""
    known = config.vocabulary
    sizes = torch.tensor([known.num_clusters] + [known.num_codes] * BOOKS)
    frame = torch.arange(min(10, config.voice_frames))[:, None]
    codes = (frame * (7 + torch.arange(STREAMS)) + 3 * torch.arange(STREAMS)) % sizes
    (directory / FOLDER).mkdir()
    save_file({"codes": codes.contiguous()}, directory / FOLDER / "anna.safetensors")
