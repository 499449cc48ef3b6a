"""Random checkpoints in the published layout, without trained weights. They serve tests, first tries and
speed measurements.

    write("demo", "tiny")    # a megabyte, runs anywhere; "tiny_smollm" has the body of the 1.7B model, and
                             # "tiny_dialogue" is OpusLM-Dialogue
    write("mid", "mid")      # 180 million parameters; the codec as published
    write("full", "full")    # the published shapes and sizes, 15 GB, all of them in memory while it is written

The published repository has model.pth and config.yaml; codec, tokenizer, body and XEUS come from others and lie in
folders. A converted checkpoint has config.json and safetensors files instead. A tensor's values depend only on
(seed, published name, shape). Codec and XEUS are in fp32 whatever the model's dtype is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.checkpoint.tensor_files import INDEX
from zoo.nn.llama_vocabulary import added_token, tokenizer, vocabulary
from zoo.opuslm import demo_xeus
from zoo.opuslm.config import (
    BACKBONE,
    BODIES,
    CODEC,
    JSON,
    LLAMA,
    OLMO,
    REPOSITORY,
    SAMPLE_RATE_HZ,
    CodecConfig,
    Config,
)
from zoo.opuslm.encoder import Encoder
from zoo.opuslm.ids import BOOKS, NAMES, PAD, STREAMS, YAML
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
    """Return token_list and token_bias for these numbers of clusters, codes of a codebook, and words."""
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
PUBLISHED, PUBLISHED_SMOLLM = (5000, 1024, 100_352, 500), (5000, 1024, 49_152, 500)


class Configs(NamedTuple):
    model: dict[str, Any]
    body: dict[str, Any] | None
    codec: dict[str, Any]
    xeus: dict[str, Any] = demo_xeus.TINY


SMOLLM = _body(LLAMA, (48, 96, 3, 4, 4))
DIALOGUE = {"model": "dpo", "subword_model": "HuggingFaceTB/SmolLM-1.7B"}
# config.yaml, the body's config.json (None: as published, by its tag), the codec's config.yaml, and that of XEUS
CONFIGS: dict[str, Callable[[], Configs]] = {
    "tiny": lambda: Configs(_yaml(OLMO_TAG, *TINY), _body(OLMO, (64, 128, 2, 4, 2)), _codec(16, 4, 16)),
    "tiny_smollm": lambda: Configs(_yaml(SMOLLM_TAG, *TINY), SMOLLM, _codec(16, 4, 16)),
    "tiny_dialogue": lambda: Configs(_yaml(SMOLLM_TAG, *TINY) | DIALOGUE, SMOLLM, _codec(16, 4, 16)),
    "mid": lambda: Configs(
        _yaml(OLMO_TAG, *PUBLISHED),
        _body(OLMO, (768, 2048, 12, 12, 12)),
        PUBLISHED_CODEC,
        demo_xeus.PUBLISHED,
    ),
    "full": lambda: Configs(_yaml(OLMO_TAG, *PUBLISHED), None, PUBLISHED_CODEC, demo_xeus.PUBLISHED),
    "full_smollm": lambda: Configs(
        _yaml(SMOLLM_TAG, *PUBLISHED_SMOLLM) | {"subword_model": "HuggingFaceTB/SmolLM-1.7B"},
        None,
        PUBLISHED_CODEC,
        demo_xeus.PUBLISHED,
    ),
    "full_dialogue": lambda: Configs(
        _yaml(SMOLLM_TAG, *PUBLISHED_SMOLLM) | DIALOGUE, None, PUBLISHED_CODEC, demo_xeus.PUBLISHED
    ),
}
SIZES = tuple(CONFIGS)

# --- values -------------------------------------------------------------------------------------------------

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
    (r"encoder\.model\.0\.conv\.conv\.weight_g$", 8.0, 1.0, False),  # so that a clip has different codes
    (r"encoder\.model\.23\.conv\.conv\.weight_g$", 2.0, 0.2, False),
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
PASSENGERS = {"codec.discriminator.mpd.0.convs.0.bias": (2,)}  # of the codec's training, one of many


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
    is_converted: bool = False,
    has_xeus: bool = True,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout and return its directory.

    config: changes to config.yaml; codec: to the codec's. has_new_names: whether weight norm has the names of
    newer releases of PyTorch. is_converted: whether the model's files are those of a converter. has_xeus: whether
    XEUS is there, too. Raises ValueError for an unknown size, key or dtype, and if the directory is not empty.
    """
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.opuslm import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, codec, **config)
    lm_config, codec_config, _ = describe(directory)
    backbone, decoder = build(lm_config, codec_config)
    shapes = weights.shapes(lm_config, published(backbone, weights.lm(lm_config)))
    tensors = {name: torch.from_numpy(fill(name, shape, seed)).to(dtype) for name, shape in shapes.items()}
    if lm_config.is_dialogue:  # otherwise no text would end
        tensors[weights.names_of(lm_config).head][lm_config.vocabulary.end] *= -0.95
    if is_converted:
        convert(directory, lm_config, tensors)
    else:
        torch.save(
            tensors | {"criterion.lm_head.weight": tensors[weights.ESPNET.head]}, directory / "model.pth"
        )
    with torch.device("meta"):
        encoder = Encoder(codec_config)
    shapes = published(decoder, weights.codec(codec_config)) | published(
        encoder, weights.encoder(codec_config)
    )
    shapes = weight_normed(shapes, weights.is_normed) | PASSENGERS
    torch.save(_codec_tensors(shapes, seed, has_new_names), directory / CODEC / MODEL_FILE)
    _write_voice(directory, lm_config)
    if has_xeus:
        clusters, values = lm_config.vocabulary.num_clusters, CONFIGS[size]().xeus
        demo_xeus.write(
            directory, values, clusters, lambda *one: fill(one[0], one[1], seed, one[2]), not has_new_names
        )
    else:
        shutil.rmtree(directory / demo_xeus.FOLDER)
    return directory


def convert(directory: Path, config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Write the files of a converted checkpoint, and remove config.yaml and the body's folder."""
    from zoo.opuslm import weights

    theirs, ours = weights.ESPNET, weights.CONVERTED
    renamed = {old: new for old, new in zip(theirs, ours, strict=True) if old != theirs.body}
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    for i, (name, value) in enumerate(tensors.items()):
        new = renamed.get(name, name.replace(f"{theirs.body}.", f"{ours.body}."))
        files[i % 2][new] = value.contiguous()
    shards = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for shard, part in zip(shards, files, strict=True):
        save_file(part, directory / shard)
    weight_map = {name: shard for shard, part in zip(shards, files, strict=True) for name in part}
    synthetic.write_json(directory / f"model.safetensors{INDEX}", {"metadata": {}, "weight_map": weight_map})
    synthetic.write_json(directory / JSON, converted(config))
    (directory / YAML).unlink()
    shutil.rmtree(directory / BACKBONE, ignore_errors=True)


def converted(config: Config) -> dict[str, Any]:
    """Return the config.json of a converted checkpoint."""
    known, body = config.vocabulary, config.body
    values: dict[str, Any] = {
        "model_type": "opuslm_dialogue" if config.is_dialogue else "opuslm",
        "vocab_size": known.size,
        "hidden_size": body.hidden,
        "intermediate_size": body.inner,
        "num_hidden_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": body.eps,
        "rope_theta": body.rope_theta,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "ssl_token_start": known.ssl,
        "ssl_token_end": known.codec,
        "codec_token_start": known.codec,
        "codec_token_end": known.codec + BOOKS * known.num_codes,
        "text_token_start": known.first_word,
        "text_token_end": known.first_word + known.num_words,
        "nq": STREAMS,
        "num_codec_streams": BOOKS,
        "codec_per_stream_size": known.num_codes,
        "speaker_prompt_length": config.voice_frames,
        "dac_hf_model_tag": REPOSITORY,
        "xeus_hf_model_tag": "espnet/xeus",
        "xeus_layer": 18,
    }
    return values | {key: getattr(known, name) for name, (_, key) in NAMES.items()}


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
    model, body, codec_values, xeus = make()
    change(model, config, YAML)
    change(codec_values, codec or {}, f"{CODEC}/{YAML}")
    words = Config.read(model, body).vocabulary.num_words  # raises an error before anything is written
    CodecConfig.read(codec_values, f"{CODEC}/{YAML}")
    (directory / CODEC / EXPERIMENT).mkdir(parents=True, exist_ok=True)
    _write_yaml(directory / YAML, model)
    _write_yaml(directory / CODEC / CODEC_YAML, codec_values)
    demo_xeus.write_texts(directory, xeus, _write_yaml)
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
