"""Random checkpoints in the published layouts, without trained weights. They serve tests, first tries and speed
measurements.

    write("demo", "tiny")    # 2 megabytes, runs anywhere; "tiny_converted" has safetensors and a config.json,
                             # "tiny_mute" no audio encoder and another shape of the body
    write("mid", "mid")      # 250 million parameters; the codec as published
    write("full", "full")    # the published shapes and sizes, 18 GB, all of them in memory while it is written

The published repository has model.pt, train_bagpiper_tts.yaml and inference.yaml; sizes of the body and tokenizer
come from another one and lie in backbone/. A tensor's values depend only on (seed, published name, shape).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from zoo.bagpiper.config import (
    BACKBONE,
    BODIES,
    BODY,
    CODEC,
    CODEC_TAG,
    EOS,
    EOT,
    FIRST_WORD,
    IDS,
    INFERENCE,
    JSON,
    PUBLISHED_CODEC,
    PUBLISHED_TOWER,
    SAMPLE_RATE_HZ,
    STREAMS,
    TOWER_TAG,
    CodecConfig,
    Config,
    Phase,
    Sampling,
    TowerConfig,
)
from zoo.checkpoint import synthetic
from zoo.checkpoint.synthetic import Rule
from zoo.nn.deferred import Shape
from zoo.nn.llama import LlamaConfig
from zoo.nn.llama_vocabulary import merges, vocabulary
from zoo.text.bpe import QWEN_PARTS, added_token, tokenizer_json

# --- sizes --------------------------------------------------------------------------------------------------

YAML = "train_bagpiper_tts.yaml"
ADDED = (("<|endoftext|>", True), ("<|im_start|>", True), ("<think>", False), ("</think>", False))
TINY_TOWER = TowerConfig(mels=16, width=64, inner=96, layers=2, heads=1, channels=4, out=24)


@dataclass(frozen=True)
class Size:
    """The sizes of a checkpoint. body: hidden, inner, layers, heads, kv heads, head dim. words: text tokens with a
    name; semantic: the width of the codec's other encoder; text, audio: limits in steps, the least and the
    most."""

    body: tuple[int, int, int, int, int, int] = (4096, 12288, 36, 32, 8, 128)
    words: int = 151_643
    rows: int = 151_936
    positions: int = 32768
    codec: CodecConfig = PUBLISHED_CODEC
    semantic: int = 768
    acoustic: int = 64
    tower: TowerConfig | None = PUBLISHED_TOWER
    text: tuple[int, int] = (1, 8192)
    audio: tuple[int, int] = (50, 2048)
    is_converted: bool = False


TINY = Size(
    body=(64, 128, 2, 4, 2, 16),
    words=468,
    rows=480,
    positions=1024,
    codec=CodecConfig(num_codes=24, width=48, latent=16, channels=64, rates=(8, 5, 4, 2)),
    semantic=32,
    acoustic=8,
    tower=TINY_TOWER,
    text=(1, 24),
    audio=(10, 256),
)
CONFIGS: dict[str, Size] = {
    "tiny": TINY,
    "tiny_converted": replace(TINY, is_converted=True),
    "tiny_mute": replace(TINY, body=(48, 80, 3, 3, 3, 24), words=462, rows=470, tower=None, text=(2, 20)),
    "mid": Size(body=(768, 2048, 12, 12, 4, 64), tower=replace(PUBLISHED_TOWER, layers=4), text=(1, 1024)),
    "full": Size(),
}
SIZES = tuple(CONFIGS)


def config_of(size: Size) -> Config:
    """Return the config that the loader reads back."""
    hidden, inner, layers, heads, kv_heads, head_dim = size.body
    body = LlamaConfig(hidden, inner, layers, heads, kv_heads, head_dim, 1e-6, 1e6, None)
    sampling = Sampling(Phase(0.6, 20, *size.text), Phase(0.8, 20, *size.audio), 3.0)
    return Config(body, size.rows, size.positions, size.codec, size.tower, sampling, size.is_converted)


# --- files --------------------------------------------------------------------------------------------------


def _body(size: Size) -> dict[str, Any]:
    """Return the body's config.json."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = dict(zip((*names, "num_key_value_heads", "head_dim"), size.body, strict=True))
    own = {"vocab_size": size.rows, "max_position_embeddings": size.positions, "tie_word_embeddings": False}
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | BODY | values | own


def _train_yaml(size: Size) -> dict[str, Any]:
    io: dict[str, Any] = {
        "text": {"tokenizer_name": BODIES[0]},
        "discrete_audio": {
            "codec_choice": "Xcodec",
            "codec_hf_model_tag": CODEC_TAG,
            "ssl_choice": None,
            "ssl_hf_model_tag": None,
            "delay_interleave": True,
            "stream_weights": [1 / STREAMS] * STREAMS,
        },
    }
    if size.tower is not None:
        io["continuous_audio"] = {
            "encoder_choice": "huggingface",
            "encoder_hf_model_tag": TOWER_TAG,
            "attn_implementation": "flash_attention_3",
            "dtype": "bfloat16",
        }
    return {
        "job_type": "speechlm",
        "multimodal_io": io,
        "model": {
            "model_choice": "parallel",
            "model_hf_tag": BODIES[0],
            "model_conf": {"attn_implementation": "flash_attention_3", "dtype": "bfloat16"},
            "activation_checkpointing": True,
        },
        "preprocessor": {
            "audio_input": "continuous_audio",
            "audio_output": "discrete_audio",
            "loss_region": "assistant",
            "audio_cfg": 0.05,
        },
    }


def _inference_yaml(size: Size) -> dict[str, Any]:
    text, audio = (
        {"topk": 20, "min_step": least, "max_step": most} for least, most in (size.text, size.audio)
    )
    return {
        "dtype": "bfloat16",
        "num_hypo": 1,
        "enforce_modality": ["text", "audio"],
        "audio": {"temperature": 0.8, "cfg": 3} | audio,
        "text": {"temperature": 0.6, "cfg": 1} | text,
    }


def _converted_json(size: Size) -> dict[str, Any]:
    """Return config.json as the converter writes it, with its own window of the audio encoder."""
    config, tower = config_of(size), size.tower
    assert tower is not None, "a converted checkpoint has an audio encoder"
    text = _body(size) | {"model_type": "bagpiper_text", "vocab_size": config.num_ids}
    audio = {
        "model_type": "bagpiper_audio_encoder",
        "num_mel_bins": tower.mels,
        "encoder_layers": tower.layers,
        "encoder_attention_heads": tower.heads,
        "encoder_ffn_dim": tower.inner,
        "d_model": tower.width,
        "activation_function": "gelu",
        "scale_embedding": False,
        "max_source_positions": 1500,
        "n_window": 100,
        "output_dim": tower.out,
        "n_window_infer": 400,
        "conv_chunksize": 500,
        "downsample_hidden_size": tower.channels,
    }
    return {
        "architectures": ["BagpiperForConditionalGeneration"],
        "model_type": "bagpiper",
        "audio_config": audio,
        "text_config": text,
        "num_stream": STREAMS,
        "adaptor_input_dim": tower.out,
        "vocab_size": config.num_ids,
        "hidden_size": config.body.hidden,
        "codec_base_offset": config.first_pad,
        "codec_layer_size": size.codec.num_codes + 1,
        "text_token_offset": FIRST_WORD,
        "text_token_end": config.first_pad,
        "audio_temperature": 0.8,
        "audio_topk": 20,
        "text_temperature": 0.6,
        "text_topk": 20,
        "xcodec_hf_model_tag": CODEC_TAG,
        "xcodec_sample_rate": SAMPLE_RATE_HZ,
        **{f"{name}_token_id": id for name, id in IDS.items()},
        "audio_placeholder_token_id": IDS["audio"],
    }


def _tokenizer(size: Size) -> dict[str, Any]:
    """Return the tokenizer of the body; in a converted checkpoint, with all ids of the model among its words."""
    words = vocabulary(size.words - len(ADDED))
    added = {name: len(words) + i for i, (name, _) in enumerate(ADDED)}
    pairs = [list(pair) for pair in merges()]
    if not size.is_converted:
        special = [added_token(added[name], name, is_special) for name, is_special in ADDED]
        return tokenizer_json(words, map(" ".join, merges()), special, **QWEN_PARTS)
    config = config_of(size)
    reserved = {f"<|{name}|>": id for name, id in IDS.items()}
    reserved |= {f"<|unused_{i}|>": i for i in range(len(IDS), FIRST_WORD)}
    shifted = {token: FIRST_WORD + id for token, id in (words | added).items()}
    names = ("pad", *(f"code{code}" for code in range(size.codec.num_codes)))
    codes = (f"<codec_layer{s}_{name}>" for s in range(STREAMS) for name in names)
    vocab = reserved | shifted | {name: config.first_pad + i for i, name in enumerate(codes)}
    return tokenizer_json(vocab, pairs, [], **QWEN_PARTS)


# --- values -------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    (r"vocab_weight$", 1.0, 0.1, False),
    (r"\.inited$", 1.0, 0.0, False),
    (r"\.cluster_size$", 9.0, 1.0, False),
    (r"\.embed_avg$", 0.0, 4.0, False),
    (r"\.codebook\.embed$", 0.0, 0.5, False),
    (r"norm\w*\.weight$", 1.0, 0.1, False),
    (r"ln_post\.weight$", 1.0, 0.1, False),
    (r"\.alpha$", 1.0, 0.2, False),
    (r"\.original0$", 1.4, 0.2, False),
    (r"(\.original1|\.masked_spec_embed)$", 0.0, 1.0, False),
    (r"\.acoustic_decoder\.conv2\.bias$", 0.0, 0.001, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"embed_tokens\.weight$", 0.0, 0.5, False),
    (r"stream_emb\.weight$", 0.0, 0.5, False),
    (r"lm_head\.weight$", 0.0, 3.0, True),
    (r"adaptor\..*weight$", 0.0, 0.5, True),
    (r"model\.layers\..*\.[qk]_proj\.weight$", 0.0, 2.0, True),  # so that attention tells positions apart
    (r"\.acoustic_decoder\.conv2\.weight$", 0.0, 0.01, True),  # quiet audio
    (r"\.acoustic_(en|de)coder\..*\.res_unit\d\.conv2\.weight$", 0.0, 0.5, True),
    (r"\.conv_t1\.weight$", 0.0, 1.4, True),  # transposed: its real fan-in is at most two thirds of this
    (r"\.weight$", 0.0, 1.0, True),
)
# How much louder rows of the head are, so that some answers end early: the ends, and less so in audio, where they
# compete with fewer others
LOUD = {EOS: 1.3, EOT: 1.2}
LOUD_CODES = 2.0  # of the first stream


def fill(name: str, shape: Shape, seed: int, size: Size = CONFIGS["full"]) -> np.ndarray:
    """Return random float32 values for the tensor with that published name. Raises ValueError if no rule
    matches."""
    values = synthetic.fill(name, shape, f"bagpiper:{seed}", RULES)
    if name != "lm_head.weight":
        return values
    values = values.copy()  # a rehearsal gives an array that cannot be written
    for row, factor in LOUD.items():
        values[row] *= factor
    first = FIRST_WORD + size.rows
    values[first : first + size.codec.num_codes + 1] *= LOUD_CODES
    return values


def codec_shapes(size: Size) -> dict[str, Shape]:
    """Return the names and shapes of the whole codec, as transformers builds it, behind the checkpoint's prefix."""
    from transformers import XcodecConfig, XcodecModel

    codec, is_full = size.codec, size.semantic == 768
    acoustic = {
        "encoder_hidden_size": size.acoustic,
        "downsampling_ratios": list(codec.rates),
        "decoder_hidden_size": codec.channels,
        "upsampling_ratios": list(codec.rates),
        "hidden_size": codec.latent,
    }
    tiny = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16] * 7}
    semantic = {"hidden_size": size.semantic} | ({} if is_full else tiny)
    bits = (codec.num_codes - 1).bit_length()
    config = XcodecConfig(
        target_bandwidths=[STREAMS * 50 * bits / 1000],
        codebook_size=codec.num_codes,
        codebook_dim=codec.width,
        acoustic_model_config={"model_type": "dac"} | acoustic,
        semantic_model_config={"model_type": "hubert"} | semantic,
    )
    with torch.device("meta"):
        found = XcodecModel(config).state_dict()
    return {f"{CODEC}.{name}": tuple(value.shape) for name, value in found.items()}


def shapes_of(size: Size) -> dict[str, Shape]:
    """Return name -> shape of every tensor of a checkpoint."""
    from zoo.bagpiper import build, weights
    from zoo.checkpoint.loading import published

    config = config_of(size)
    backbone, _, ear = build(config)
    shapes = weights.shapes(config, published(backbone, weights.lm(config)))
    if ear is not None and config.tower is not None:
        shapes |= published(ear, weights.ear(config.tower))
    return shapes | codec_shapes(size) | {weights.UNUSED[0]: (config.num_ids,)}


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Path:
    """Write a checkpoint with every file of its layout and return its directory. changes: to the `Size`. Raises
    ValueError for an unknown size or dtype, and if the directory is not empty."""
    synthetic.check_dtype(dtype)
    directory, chosen = write_texts(directory, size, **changes)
    tensors = dict(_tensors(chosen, seed, dtype))
    if chosen.is_converted:
        _write_shards(directory, tensors)
    else:
        torch.save({"module": tensors}, directory / "model.pt")
    return directory


def _tensors(size: Size, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in shapes_of(size).items():
        values = torch.from_numpy(np.asarray(fill(name, shape, seed, size))).reshape(shape)
        yield name, values if name == "vocab_weight" else values.to(dtype)


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write two safetensors files and their index."""
    half = len(tensors) // 2
    names = sorted(tensors)
    where: dict[str, str] = {}
    for i, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_texts(directory: str | Path, size: str, **changes: Any) -> tuple[Path, Size]:
    """Write the YAML and JSON files of a checkpoint, without its tensors. Arguments and errors are those of
    `write`."""
    directory, chosen = synthetic.begin(directory, size, CONFIGS)
    chosen = replace(chosen, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    if chosen.is_converted:
        synthetic.write_json(directory / JSON, _converted_json(chosen))
        synthetic.write_json(directory / "tokenizer.json", _tokenizer(chosen))
        return directory, chosen
    (directory / BACKBONE).mkdir()
    synthetic.write_json(directory / BACKBONE / JSON, _body(chosen))
    synthetic.write_json(directory / BACKBONE / "tokenizer.json", _tokenizer(chosen))
    for name, content in ((YAML, _train_yaml(chosen)), (INFERENCE, _inference_yaml(chosen))):
        (directory / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return directory, chosen
