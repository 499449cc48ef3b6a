"""Random checkpoints in the published layout, without trained weights. They serve tests, first tries and
speed measurements.

    write("demo", "tiny")    # three megabytes, runs anywhere
    write("mid", "mid")      # 160 million parameters; the codec as published
    write("full", "full")    # the published shapes and sizes, 4 GB

A tensor's values depend only on (seed, published name, shape). Codec and speaker encoder lie in separate
folders, and are in fp32 for any dtype of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint import synthetic
from zoo.checkpoint.config import change
from zoo.checkpoint.synthetic import Rule
from zoo.zonos import speaker
from zoo.zonos.config import BOOKS, CODEC_FOLDER, CODES, END, MASK, CodecConfig, Config
from zoo.zonos.speaker import Sizes, SpeakerEncoder

# --- configs ------------------------------------------------------------------------------------------------

CONDITIONERS: list[dict[str, Any]] = [
    {"type": "EspeakPhonemeConditioner", "name": "espeak"},
    {"type": "PassthroughConditioner", "name": "speaker", "cond_dim": 128, "projection": "linear"},
    {"type": "FourierConditioner", "name": "emotion", "input_dim": 8},
    {"type": "FourierConditioner", "name": "fmax", "min_val": 0, "max_val": 24000},
    {"type": "FourierConditioner", "name": "pitch_std", "min_val": 0, "max_val": 400},
    {"type": "FourierConditioner", "name": "speaking_rate", "min_val": 0, "max_val": 40},
    {"type": "IntegerConditioner", "name": "language_id", "min_val": -1, "max_val": 126},
]


def _config(width: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return config.json."""
    attention = {
        "causal": True,
        "num_heads": heads,
        "num_heads_kv": kv_heads,
        "rotary_emb_dim": width // heads,
        "qkv_proj_bias": False,
        "out_proj_bias": False,
        "rotary_emb_interleaved": True,
    }
    backbone = {
        "d_model": width,
        "d_intermediate": 0,
        "attn_mlp_d_intermediate": inner,
        "n_layer": layers,
        "ssm_cfg": {},
        "attn_layer_idx": list(range(layers)),
        "attn_cfg": attention,
        "rms_norm": False,
        "residual_in_fp32": False,
        "norm_epsilon": 1e-05,
    }
    known = [entry | ({} if i == 0 else {"uncond_type": "learned"}) for i, entry in enumerate(CONDITIONERS)]
    return {
        "backbone": backbone,
        "prefix_conditioner": {"conditioners": known, "projection": "linear"},
        "eos_token_id": END,
        "masked_token_id": MASK,
        "pad_vocab_to_multiple_of": 8,
    }


def _codec(encoder: int, decoder: int, codebook: int) -> dict[str, Any]:
    """Return the codec's config.json."""
    return {
        "architectures": ["DacModel"],
        "codebook_dim": codebook,
        "codebook_loss_weight": 1.0,
        "codebook_size": CODES,
        "commitment_loss_weight": 0.25,
        "decoder_hidden_size": decoder,
        "downsampling_ratios": [2, 4, 8, 8],
        "encoder_hidden_size": encoder,
        "hidden_size": encoder << 4,
        "hop_length": 512,
        "model_type": "dac",
        "n_codebooks": BOOKS,
        "quantizer_dropout": 0.0,
        "sampling_rate": 44100,
        "torch_dtype": "float32",
        "upsampling_ratios": [8, 8, 4, 2],
    }


TINY_SPEAKER = Sizes(planes=4, blocks=(2, 3, 2, 1), attention=8, middle=16)
SPEAKER = Sizes(planes=64, blocks=(10, 20, 64, 3), attention=128, middle=256)
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        "config.json": _config(64, 128, 2, 4, 2),
        "codec": _codec(2, 48, 5),
        "speaker": TINY_SPEAKER,
    },
    "mid": {
        "config.json": _config(768, 3072, 14, 12, 4),
        "codec": _codec(64, 1536, 8),
        "speaker": TINY_SPEAKER,
    },
    "full": {
        "config.json": _config(2048, 8192, 26, 16, 4),
        "codec": _codec(64, 1536, 8),
        "speaker": SPEAKER,
    },
}
SIZES = tuple(CONFIGS)

# --- values -------------------------------------------------------------------------------------------------

MODEL_RULES: tuple[Rule, ...] = (
    (r"norm\w*\.weight$", 1.0, 0.1, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"uncond_vector$", 0.0, 1.0, False),
    (r"conditioners\.\d\.weight$", 0.0, 1.0, False),  # multiples of the Fourier features
    (r"(phoneme|int)_embedder\.weight$", 0.0, 1.0, False),
    (r"conditioners\.\d\.project\.weight$", 0.0, 1.0, True),
    (r"^embeddings\.", 0.0, 0.3, False),
    (r"^heads\.", 0.0, 3.0, True),
    (r"\.in_proj\.weight$", 0.0, 2.0, True),  # so that attention tells positions apart
    (r"\.weight$", 0.0, 1.0, True),
)
CODEC_RULES: tuple[Rule, ...] = (
    (r"\.alpha$", 1.0, 0.2, False),
    (r"\.codebook\.weight$", 0.0, 1.0, False),
    (r"^decoder\.conv2\.bias$", 0.0, 0.001, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"^decoder\.conv2\.weight$", 0.0, 0.05, True),  # quiet audio
    (r"out_proj\.weight$", 0.0, 0.5, True),
    (r"\.res_unit\d\.conv2\.weight$", 0.0, 0.5, True),
    (r"\.conv_t1\.weight$", 0.0, 1.4, True),  # transposed: its real fan-in is at most two thirds of this
    (r"\.weight$", 0.0, 1.0, True),
)
SPEAKER_RULES: tuple[Rule, ...] = (
    (r"running_var$", 1.0, 0.1, False),
    (r"running_mean$", 0.0, 0.1, False),
    (r"(\.bn\d|downsample\.1|attention\.2)\.weight$", 1.0, 0.1, False),
    (r"\.?bias$", 0.0, 0.1, False),
    (r"^weight$", 0.0, 0.5, True),
    (r"\.weight$", 0.0, 1.0, True),
)
ENDS = 1.5  # times the deviation of another code, so that some speeches end after a few dozen frames


def fill(name: str, shape: tuple[int, ...], seed: int, rules: tuple[Rule, ...] = MODEL_RULES) -> np.ndarray:
    """Return random float32 values for the tensor with that published name. Raises ValueError if no rule
    matches."""
    values = synthetic.fill(name, shape, f"zonos:{seed}", rules)
    if name == "heads.0.weight":
        values[END] *= ENDS
    return values


# --- writing ------------------------------------------------------------------------------------------------


def write(
    directory: str | Path,
    size: str = "tiny",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    codec: dict[str, Any] | None = None,
    has_speaker: bool = True,
    **config: Any,
) -> Path:
    """Write a checkpoint with every file of the published layout and return its directory.

    config: changes to config.json; codec: to the codec's. has_speaker: with the speaker encoder. Raises
    ValueError for an unknown size, key or dtype, and if the directory is not empty.
    """
    from zoo.checkpoint.loading import published
    from zoo.zonos import build, describe, weights

    synthetic.check_dtype(dtype)
    directory = write_texts(directory, size, codec, **config)
    if has_speaker:
        write_speaker(directory / speaker.FOLDER, CONFIGS[size]["speaker"], seed)
    model, codec_config, _ = describe(directory)
    backbone, dac = build(model, codec_config)
    shapes = published(backbone, weights.model(model))
    synthetic.write_tensors(
        directory / "model.safetensors", shapes, lambda name, shape: fill(name, shape, seed), dtype
    )
    shapes = published(dac, weights.codec(codec_config))
    file = directory / CODEC_FOLDER / "model.safetensors"
    synthetic.write_tensors(
        file, shapes, lambda name, shape: fill(name, shape, seed, CODEC_RULES), torch.float32
    )
    return directory


def write_texts(directory: str | Path, size: str, codec: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write the JSON files of a checkpoint, without its tensors. Arguments and errors are those of
    `write`."""
    directory, content = synthetic.begin(directory, size, CONFIGS)
    change(content["config.json"], config, "config.json")
    change(content["codec"], codec or {}, f"{CODEC_FOLDER}/config.json")
    Config.read(content["config.json"])  # raises an error before anything is written
    CodecConfig.read(content["codec"], f"{CODEC_FOLDER}/config.json")
    (directory / CODEC_FOLDER).mkdir(parents=True, exist_ok=True)
    synthetic.write_json(directory / "config.json", content["config.json"])
    synthetic.write_json(directory / CODEC_FOLDER / "config.json", content["codec"])
    return directory


def write_speaker(folder: Path, sizes: Sizes, seed: int) -> None:
    """Write the two files of a speaker encoder."""
    folder.mkdir()
    with torch.device("meta"):
        encoder = SpeakerEncoder(sizes, 128)
    for part, file in ((encoder.net, speaker.NET_FILE), (encoder.projection, speaker.PROJECTION_FILE)):
        tensors = {name: _speaker_tensor(name, tensor, seed) for name, tensor in part.state_dict().items()}
        torch.save(tensors, folder / file)


def _speaker_tensor(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    if not tensor.is_floating_point():
        return torch.tensor(1000)  # the steps of training; nothing reads them
    return torch.from_numpy(fill(name, tuple(tensor.shape), seed, SPEAKER_RULES))
