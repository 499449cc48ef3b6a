"""Random checkpoints in the published layout, without trained weights. For tests, first tries, and speed work.

    write("demo", "tiny")    # 3 megabytes; runs anywhere
    write("mid", "mid")      # 400 million parameters; the vocoder as published
    write("full", "full")    # the published shapes and sizes, 21 GB

The tokenizer and the decoder lie inside, in glm-4-voice-tokenizer/ and glm-4-voice-decoder/. A tensor's values depend
only on (seed, published name, shape). The rows of the codes in the LM's head are loud, so most tokens of an answer are
codes; text and the end come now and then.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.synthetic import Rule
from zoo.glm4_voice.config import DECODER, TOKENIZER, YAML, Config
from zoo.glm4_voice.prompt import OPENING, SPOKEN, WRITTEN
from zoo.glm4_voice.vocabulary import NEEDED, RANKS, TOKENS, audio
from zoo.nn.s3.demo_rules import VOCODER_RULES
from zoo.text.bpe import ENGLISH, byte_symbols, chain, in_symbols

PUBLISHED_WORDS, PUBLISHED_FILLER = 151_329, 1006
SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *(f"<|reserved_{i}|>" for i in range(4)),
    *("<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>"),
)
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
assert set(NEEDED) <= set(SPECIAL)


@dataclass(frozen=True)
class Size:
    hidden: int = 4096
    inner: int = 13696
    layers: int = 40
    heads: int = 32
    kv_heads: int = 2
    head_dim: int = 128
    positions: int = 8192
    rows: int = 168_960  # of the vocabulary; 0: as many as there are tokens, and a few more
    codes: int = 16_384
    listener: int = 1280
    listener_layers: int = 16
    listener_heads: int = 20
    listener_inner: int = 5120
    mels: int = 128
    encoder: int = 512
    encoder_heads: int = 8
    encoder_inner: int = 2048
    encoder_layers: int = 6
    channels: int = 256
    estimator_head_dim: int = 64
    estimator_heads: int = 8
    num_blocks: int = 4
    num_mid: int = 12
    vocoder: int = 512
    f0: int = 512


TINY = Size(
    hidden=32, inner=64, layers=2, heads=4, head_dim=8, positions=1024, rows=0, codes=64,
    listener=32, listener_layers=2, listener_heads=2, listener_inner=48, mels=16,
    encoder=32, encoder_heads=2, encoder_inner=48, encoder_layers=2,
    channels=16, estimator_head_dim=8, estimator_heads=2, num_blocks=1, num_mid=2, vocoder=16, f0=8,
)  # fmt: skip
PARITY = Size(
    hidden=64, inner=96, layers=3, heads=4, head_dim=16, positions=1024, rows=0, codes=160,
    listener=64, listener_layers=3, listener_heads=4, listener_inner=128, mels=128,
    encoder=64, encoder_heads=2, encoder_inner=96, encoder_layers=3,
    channels=32, estimator_head_dim=16, estimator_heads=3, num_blocks=2, num_mid=2, vocoder=32, f0=16,
)  # fmt: skip
MID = Size(
    hidden=1024, inner=3424, layers=12, heads=8, kv_heads=2, listener_layers=4, encoder_layers=3, num_blocks=2, num_mid=4
)  # fmt: skip
CONFIGS = {"tiny": TINY, "parity": PARITY, "mid": MID, "full": Size()}
SIZES = tuple(CONFIGS)

YAML_TEXT = """\
# Written by zoo: the published values, or smaller ones, under the published names.
__set_seed1: !apply:random.seed [1986]
sample_rate: 22050
spk_embed_dim: 192
flow: !new:cosyvoice.flow.flow.MaskedDiffWithXvec
    input_size: {encoder}
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: {codes}
    input_frame_rate: 12.5
    only_mask_loss: True
    encoder: !new:cosyvoice.transformer.encoder.BlockConformerEncoder
        output_size: {encoder}
        attention_heads: {encoder_heads}
        linear_units: {encoder_inner}
        num_blocks: {encoder_layers}
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'block_rel_selfattn'
        block_size: 10
        input_size: {encoder}
        use_cnn_module: False
        macaron_style: False
    length_regulator: !new:cosyvoice.flow.length_regulator.InterpolateRegulator
        channels: 80
        sampling_ratios: [1, 1, 1, 1]
    decoder: !new:cosyvoice.flow.flow_matching.ConditionalCFM
        in_channels: 240
        n_spks: 1
        spk_emb_dim: 80
        cfm_params: !new:omegaconf.DictConfig
            content:
                sigma_min: 1e-06
                solver: 'euler'
                t_scheduler: 'cosine'
                training_cfg_rate: 0.2
                inference_cfg_rate: 0.7
                reg_loss_type: 'l1'
        estimator: !new:cosyvoice.flow.decoder.ConditionalDecoder
            in_channels: 320
            out_channels: 80
            channels: [{channels}, {channels}]
            dropout: 0
            attention_head_dim: {estimator_head_dim}
            n_blocks: {num_blocks}
            num_mid_blocks: {num_mid}
            num_heads: {estimator_heads}
            act_fn: 'gelu'
hift: !new:cosyvoice.hifigan.generator.HiFTGenerator
    in_channels: 80
    base_channels: {vocoder}
    nb_harmonics: 8
    sampling_rate: !ref <sample_rate>
    nsf_alpha: 0.1
    nsf_sigma: 0.003
    nsf_voiced_threshold: 10
    upsample_rates: [8, 8]
    upsample_kernel_sizes: [16, 16]
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: [7, 11]
    source_resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5]]
    lrelu_slope: 0.1
    audio_limit: 0.99
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.ConvRNNF0Predictor
        num_class: 1
        in_channels: 80
        cond_channels: {f0}
"""

# --- texts ---


def words(is_full: bool) -> list[bytes]:
    """Return the text tokens in the order of their ids: bytes, whole words of the prompt, and filler."""
    spoken = f"{SPOKEN}{WRITTEN} {OPENING}".split() + ENGLISH.split()
    pieces = [*spoken, *(f" {word}" for word in spoken)]
    symbols = {symbol: byte for byte, symbol in byte_symbols().items()}
    parts = [left + right for piece in pieces for left, right in chain(in_symbols(piece))]
    tokens = list(dict.fromkeys([*(bytes([byte]) for byte in byte_symbols()), *(
        bytes(symbols[symbol] for symbol in part) for part in parts
    )]))  # fmt: skip
    if is_full:
        tokens += [b"<filler %d>" % i for i in range(len(tokens), PUBLISHED_WORDS)]
    return tokens


def added(size: Size, num_words: int) -> dict[str, int]:
    """Return the ids of the added tokens."""
    filler = [f"<|filler_{i}|>" for i in range(PUBLISHED_FILLER if size.rows else 2)]
    names = [*SPECIAL, *filler, *(audio(code) for code in range(size.codes))]
    return {name: num_words + i for i, name in enumerate(names)}


def texts(size: Size) -> dict[str, dict[str, Any] | str]:
    """Return the content of the text files, by name."""
    tokens = words(bool(size.rows))
    ids = added(size, len(tokens))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    ranks = "".join(f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    entries = {str(id): {"content": name, **flags} for name, id in ids.items()}
    features = {"feature_size": size.mels, "n_fft": 400, "hop_length": 160, "sampling_rate": 16000}
    kind = {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 30}
    return {
        "config.json": _lm(size, size.rows or max(ids.values()) + 8, [ids[stop] for stop in STOPS]),
        RANKS: ranks,
        TOKENS: {"added_tokens_decoder": entries, "tokenizer_class": "ChatGLM4Tokenizer"},
        f"{TOKENIZER}/config.json": _listener(size),
        f"{TOKENIZER}/preprocessor_config.json": features | kind,
        f"{DECODER}/{YAML}": YAML_TEXT.format(**vars(size)),
    }


def _lm(size: Size, rows: int, stops: list[int]) -> dict[str, Any]:
    return {
        "architectures": ["ChatGLMModel"],
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "eos_token_id": stops,
        "ffn_hidden_size": size.inner,
        "hidden_size": size.hidden,
        "kv_channels": size.head_dim,
        "layernorm_epsilon": 3.90625e-08,
        "model_type": "chatglm",
        "multi_query_attention": True,
        "multi_query_group_num": size.kv_heads,
        "num_attention_heads": size.heads,
        "num_layers": size.layers,
        "original_rope": True,
        "padded_vocab_size": rows,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": 1,
        "seq_length": size.positions,
        "torch_dtype": "bfloat16",
        "vocab_size": rows,
    }


def _listener(size: Size) -> dict[str, Any]:
    return {
        "activation_function": "gelu",
        "architectures": ["WhisperVQEncoder"],
        "d_model": size.listener,
        "encoder_attention_heads": size.listener_heads,
        "encoder_causal_attention": False,
        "encoder_causal_convolution": True,
        "encoder_ffn_dim": size.listener_inner,
        "encoder_layers": 2 * size.listener_layers,
        "max_source_positions": 1500,
        "model_type": "whisper",
        "num_mel_bins": size.mels,
        "pooling_kernel_size": 4,
        "pooling_position": size.listener_layers,
        "pooling_type": "avg",
        "quantize_causal_block_size": 200,
        "quantize_causal_encoder": False,
        "quantize_ema_decay": 0.99,
        "quantize_encoder_only": True,
        "quantize_position": size.listener_layers,
        "quantize_vocab_size": size.codes,
        "scale_embedding": False,
        "torch_dtype": "float32",
    }


# --- values ---

RULES: tuple[Rule, ...] = (
    (r"inv_freq$", 0.5, 0.1, False),
    *VOCODER_RULES,
    (r"(norm\w*|layernorm|\.out\.1|block\.1|length_regulator\.model\.(1|4|7|10))\.weight$", 1.0, 0.1, False),
    (r"(bias|pos_bias_[uv])$", 0.0, 0.1, False),
    (r"(embedding|embeddings|codebook)\.weight$", 0.0, 1.0, False),
    (r"(embed_positions2?\.weight|ema_\w+)$", 0.0, 0.3, False),
    (r"output_layer\.weight$", 0.0, 2.0, True),
    (r"weight(_v)?$", 0.0, 1.0, True),
)
LOUDER = 1.5


def fill(name: str, shape: tuple[int, ...], seed: int, loud: list[int]) -> np.ndarray:
    """Return random float32 values for a tensor by its published name. loud: the tokens that are likely. Raises
    ValueError if no rule matches the name."""
    values = synthetic.fill(name, shape, f"glm4_voice:{seed}", RULES)
    if name == "transformer.output_layer.weight":
        values[loud] *= LOUDER
    return values


# --- writing ---


def write(
    directory: str | Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a checkpoint with its tokenizer and decoder. dtype: of the LM; the others are float32, as published.

    Raises ValueError for an unknown size or dtype, and for a directory that is not empty.
    """
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.glm4_voice import build, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size)
    config, known = Config.read(directory), CONFIGS[size]
    ids = added(known, len(words(bool(known.rows))))
    loud = [*(ids[stop] for stop in STOPS), *(ids[audio(code)] for code in range(known.codes))]
    values = partial(fill, seed=seed, loud=loud)
    lm, flow, vocoder, listener = build(config)
    synthetic.write_tensors(
        directory / "model.safetensors", published(lm, weights.lm(config.lm)), values, dtype
    )
    shapes = published(listener, weights.listener(config.listener))
    synthetic.write_tensors(directory / TOKENIZER / "model.safetensors", shapes, values, torch.float32)
    synthetic.write_pickle(
        directory / DECODER / weights.FLOW_FILE, published(flow, weights.flow(config.flow)), values
    )
    shapes = published(vocoder, weights.vocoder(config.vocoder))
    synthetic.write_pickle(
        directory / DECODER / weights.VOCODER_FILE, weight_normed(shapes, weights.is_weight_normed), values
    )
    return directory


def write_texts(directory: str | Path, size: str = "tiny") -> Path:
    """Write the text files of a checkpoint, without its tensors; errors as in `write`."""
    directory, known = synthetic.begin(directory, size, CONFIGS)
    synthetic.write_contents(directory, texts(known))
    return directory
