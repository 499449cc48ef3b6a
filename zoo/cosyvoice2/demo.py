"""Random checkpoints in the published layout, for tests, first tries, and speed work without trained weights.

    write("demo", "tiny")    # 40 megabytes, mostly the speaker encoder, which has one size; runs anywhere
    write("mid", "mid")      # a fifth of the language model and the flow; the vocoder as published
    write("full", "full")    # the published shapes

The values of a tensor depend only on (seed, published name, shape). Unlike the published directory these
checkpoints contain voices: "demo", a cached prompt, and "sound", only a speaker vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.synthetic import Rule
from zoo.cosyvoice2.config import BLANK, LM_CONFIG, YAML, Config
from zoo.cosyvoice2.vocabulary import merges, vocabulary
from zoo.cosyvoice2.voices import VOICES_FILE
from zoo.nn.s3.sizes import MELS, NUM_CODES
from zoo.nn.s3.tokenizer import S3Config, S3Tokenizer


@dataclass(frozen=True)
class Size:
    hidden: int = 896
    inner: int = 4864
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    text_vocab: int = 151936
    positions: int = 32768
    encoder: int = 512
    encoder_heads: int = 8
    encoder_inner: int = 2048
    encoder_layers: int = 6
    channels: int = 256
    head_dim: int = 64
    estimator_heads: int = 8
    num_blocks: int = 4
    num_mid: int = 12
    vocoder: int = 512
    f0: int = 512
    s3_mels: int = 128
    s3_width: int = 1280
    s3_layers: int = 6


TINY = Size(
    hidden=32, inner=64, layers=2, heads=4, text_vocab=768, positions=1024,
    encoder=32, encoder_heads=2, encoder_inner=48, encoder_layers=2,
    channels=16, head_dim=8, estimator_heads=2, num_blocks=1, num_mid=2,
    vocoder=16, f0=8, s3_width=64, s3_layers=1,
)  # fmt: skip
# The reference's encoder always has 512 channels, regardless of its config.
PARITY = Size(
    hidden=56, inner=96, layers=2, text_vocab=768, positions=1024, encoder_inner=64, encoder_layers=2,
    channels=64, head_dim=16, estimator_heads=2, num_blocks=1, num_mid=2, vocoder=64, f0=32,
    s3_width=128, s3_layers=2,
)  # fmt: skip
MID = Size(hidden=448, inner=2432, layers=12, heads=7, kv_heads=1, encoder_layers=3, num_blocks=2, num_mid=4)
CONFIGS = {"tiny": TINY, "parity": PARITY, "mid": MID, "full": Size()}
SIZES = tuple(CONFIGS)

YAML_TEXT = """\
# Written by zoo: the published values, or smaller ones, under the published names.
sample_rate: 24000
llm_input_size: {hidden}
llm_output_size: {hidden}
spk_embed_dim: 192
qwen_pretrain_path: ''
token_frame_rate: 25
token_mel_ratio: 2
llm: !new:cosyvoice.llm.llm.Qwen2LM
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: 6561
    mix_ratio: [5, 15]
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
        top_k: 25
        win_size: 10
        tau_r: 0.1
flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithXvec
    input_size: {encoder}
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    vocab_size: 6561
    input_frame_rate: !ref <token_frame_rate>
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
    encoder: !new:cosyvoice.transformer.upsample_encoder.UpsampleConformerEncoder
        output_size: {encoder}
        attention_heads: {encoder_heads}
        linear_units: {encoder_inner}
        num_blocks: {encoder_layers}
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        input_size: {encoder}
        use_cnn_module: False
        macaron_style: False
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
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
        estimator: !new:cosyvoice.flow.decoder.CausalConditionalDecoder
            in_channels: 320
            out_channels: 80
            channels: [{channels}]
            attention_head_dim: {head_dim}
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
    upsample_rates: [8, 5, 3]
    upsample_kernel_sizes: [16, 11, 7]
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: [7, 7, 11]
    source_resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    lrelu_slope: 0.1
    audio_limit: 0.99
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.ConvRNNF0Predictor
        num_class: 1
        in_channels: 80
        cond_channels: {f0}
"""


def _lm_config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.inner,
        "max_position_embeddings": size.positions,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": size.text_vocab,
    }


# --- values -------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    (r"^f0_predictor\.classifier\.bias$", 110.0, 0.0, False),  # the pitch of a voice, in Hz
    (r"^f0_predictor\.classifier\.weight$", 0.0, 60.0, True),
    (r"^conv_post\..*original0$", 0.1, 0.01, False),  # quiet audio, far from the clamp
    (r"^conv_post\.bias$", 0.0, 0.1, False),
    (r"^m_source\.l_linear\.weight$", 0.0, 3.0, True),
    (r"^ups\..*original0$", 1.5, 0.2, False),  # transposed convolution: the gain of each input channel
    (r"original0$", 0.7, 0.1, False),  # convolution: the gain of each output channel
    (r"\.alpha$", 1.0, 0.2, False),
    (r"running_var$", 1.0, 0.1, False),
    (r"running_mean$", 0.0, 0.1, False),
    (r"(norm\w*|_ln|batchnorm|layernorm|\.out\.1|block\.2)\.weight$", 1.0, 0.1, False),
    (r"bias$|pos_bias_[uv]$", 0.0, 0.1, False),
    (r"embedding\.weight$|embed_tokens\.weight$", 0.0, 1.0, False),
    (r"llm_decoder\.weight$", 0.0, 2.0, True),  # logits of a few units
    (r"(weight|original1|onnx::\w+)$", 0.0, 1.0, True),
)


def fill(name: str, shape: Iterable[int], seed: int) -> np.ndarray:
    """Return random float32 values for a tensor by its published name.

    Raises ValueError if no rule matches the name.
    """
    shape = tuple(shape)
    if name == "llm.model.lm_head.weight":
        name = "llm.model.model.embed_tokens.weight"  # tied
    return synthetic.fill(name, shape, f"cosyvoice2:{seed}", RULES)


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint with every published file that the loader reads. dtype: of llm.pt and flow.pt.

    Raises ValueError for an unknown size or dtype, and for a directory that is not empty.
    """
    from zoo.checkpoint.loading import published, weight_normed
    from zoo.cosyvoice2 import build, weights
    from zoo.nn.s3 import demo_onnx
    from zoo.nn.s3.campplus import CamPlus

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size)
    config, values = Config.read(directory), partial(fill, seed=seed)
    with torch.device("meta"):
        lm, flow, vocoder = build(config)
        known = CONFIGS[size]
        s3_config = S3Config(known.s3_mels, known.s3_width, known.s3_layers)
        tokenizer, speaker = S3Tokenizer(s3_config), CamPlus()
    _save(directory / weights.LM_FILE, published(lm, weights.lm(config.lm)), values, dtype)
    _save(directory / weights.FLOW_FILE, published(flow, weights.flow(config.flow)), values, dtype)
    shapes = weight_normed(published(vocoder, weights.vocoder(config.vocoder)), weights.is_weight_normed)
    _save(
        directory / weights.VOCODER_FILE,
        {_newer(name): shape for name, shape in shapes.items()},
        values,
        torch.float32,
    )
    shapes = published(tokenizer, weights.s3_tokenizer(s3_config))
    demo_onnx.write(directory / weights.TOKENIZER_FILE, shapes, values)
    demo_onnx.write(directory / weights.SPEAKER_FILE, published(speaker, weights.campplus()), values)
    torch.save(_voices(values), directory / VOICES_FILE)
    return directory


def _newer(name: str) -> str:
    for older, newer in (("weight_g", "original0"), ("weight_v", "original1")):
        name = name.replace(f".{older}", f".parametrizations.weight.{newer}")
    return name


def _save(
    path: Path, shapes: Mapping[str, tuple[int, ...]], values: Callable[..., np.ndarray], dtype: torch.dtype
) -> None:
    torch.save(
        {name: torch.from_numpy(values(name, shape)).to(dtype) for name, shape in shapes.items()}, path
    )


def _voices(values: Callable[..., np.ndarray], num_codes: int = 38) -> dict[str, dict[str, torch.Tensor]]:
    """Return two voices: a prompt that does not end on the grid, and a speaker vector."""
    codes = torch.arange(num_codes)[None] * 1237 % NUM_CODES
    mel = torch.from_numpy(values("voice.demo.weight", (1, 2 * num_codes, MELS))) * MELS - 4
    speakers = [
        torch.from_numpy(values(f"voice.{name}.embedding.weight", (1, 192))) for name in ("demo", "sound")
    ]
    cached = {
        "prompt_text": torch.arange(65, 77)[None],
        "llm_prompt_speech_token": codes,
        "flow_prompt_speech_token": codes,
        "prompt_speech_feat": mel,
        "llm_embedding": speakers[0],
        "flow_embedding": speakers[0],
    }
    return {"demo": cached, "sound": {"embedding": speakers[1]}}


def write_texts(directory: str | Path, size: str) -> Path:
    """Write the text files of a checkpoint without its tensors. Arguments and errors are those of `write`."""
    directory, known = synthetic.begin(directory, size, CONFIGS)
    (directory / BLANK).mkdir(parents=True, exist_ok=True)
    (directory / YAML).write_text(YAML_TEXT.format(**vars(known)), encoding="utf-8")
    synthetic.write_json(directory / "config.json", {})
    synthetic.write_json(directory / BLANK / LM_CONFIG, _lm_config(known))
    words = vocabulary(full=known.text_vocab > 1000)
    (directory / BLANK / "vocab.json").write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges())]
    (directory / BLANK / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory
