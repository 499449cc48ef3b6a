"""Tables from published tensor names to ours (see zoo.checkpoint.loading), and views of the files that hold
the tensors: parts of a file, matrices turned around, and normalisations folded into the convolution before
them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.checkpoint.tensor_files import Header, TensorFile
from zoo.nn import llama
from zoo.nn.s3 import names
from zoo.nn.s3.names import both

if TYPE_CHECKING:
    from zoo.chatterbox.config import Config, T3Config
    from zoo.nn.s3.tokenizer import S3Config

# In the files, and never read: tables of training, filters that we compute, counters.
UNREAD = ("tfmr.embed_tokens.weight", "tfmr.wte.weight", "text_head.weight")
UNREAD_OF_VOICE = ("similarity_weight", "similarity_bias")
UNREAD_OF_TOKENIZER = ("window", "_mel_filters")
PARTS = ("tokenizer.", "speaker_encoder.", "flow.", "mel2wav.")
EPS = 1e-5  # of the folded normalisations


def t3(config: T3Config) -> dict[str, str]:
    """Return the names of the language model's file, without UNREAD -> those of T3."""
    table = {
        "text_emb.weight": "text.weight",
        "speech_emb.weight": "codes.weight",
        "speech_head.weight": "head.weight",
    } | both({"cond_enc.spkr_enc": "speaker"})
    if config.is_gpt2:
        return table | {"speech_head.bias": "head.bias"} | _gpt2(config)
    perceiver = "cond_enc.perceiver"
    pairs = {
        f"{perceiver}.attn.{theirs}": f"perceiver.{ours}"
        for theirs, ours in (
            ("norm", "norm"),
            ("to_q", "q"),
            ("to_k", "k"),
            ("to_v", "v"),
            ("proj_out", "out"),
        )
    }
    table |= {
        "text_pos_emb.emb.weight": "text_positions.weight",
        "speech_pos_emb.emb.weight": "speech_positions.weight",
        "cond_enc.emotion_adv_fc.weight": "emotion.weight",
        f"{perceiver}.pre_attention_query": "perceiver.queries",
    }
    return table | both(pairs) | llama.names(config.llama, "tfmr", "stack")


def _gpt2(config: T3Config) -> dict[str, str]:
    pairs = {"tfmr.ln_f": "stack.norm"}
    table = {"tfmr.wpe.weight": "stack.positions.weight"}
    for i in range(config.layers):
        theirs, ours = f"tfmr.h.{i}", f"stack.layers.{i}"
        pairs |= {f"{theirs}.ln_1": f"{ours}.norm", f"{theirs}.ln_2": f"{ours}.mlp_norm"}
        pairs |= {f"{theirs}.attn.c_proj": f"{ours}.out"}
        pairs |= {f"{theirs}.mlp.c_fc": f"{ours}.widen", f"{theirs}.mlp.c_proj": f"{ours}.narrow"}
        table |= {f"{theirs}.attn.c_attn.{kind}": f"{ours}.qkv.{kind}" for kind in ("weight", "bias")}
    return table | both(pairs)


def voice_encoder() -> dict[str, str]:
    """Return the names of ve.safetensors, without UNREAD_OF_VOICE -> those of VoiceEncoder."""
    kinds = [f"{kind}_{side}_l{i}" for i in range(3) for kind in ("weight", "bias") for side in ("ih", "hh")]
    return {f"lstm.{kind}": f"lstm.{kind}" for kind in kinds} | both({"proj": "proj"})


def tokenizer(config: S3Config) -> dict[str, str]:
    """Return the names of the part `tokenizer.` -> those of S3Tokenizer."""
    table = both({"encoder.conv1": "conv1", "encoder.conv2": "conv2"})
    table |= both({"quantizer._codebook.project_down": "digits"})
    return table | names.tokenizer_layers(config.layers, "encoder.")


def flow(config: Config) -> dict[str, str]:
    """Return the names of the part `flow.` -> those of Flow."""
    table = names.flow(config.flow)
    if config.flow.is_meanflow:
        table["decoder.estimator.time_embed_mixer.weight"] = "estimator.time_mixer.weight"
    return table


def vocoder(config: Config) -> dict[str, str]:
    """Return the names of the part `mel2wav.` without weight norm -> those of Vocoder."""
    return names.vocoder(config.vocoder)


# views of files


def without(file: TensorFile, unread: Collection[str]) -> TensorFile:
    return file._replace(
        headers={name: header for name, header in file.headers.items() if name not in unread}
    )


def part(file: TensorFile, prefix: str) -> TensorFile:
    """Return the tensors whose names begin with a prefix, by the rest of the name."""
    headers = {
        name.removeprefix(prefix): header for name, header in file.headers.items() if name.startswith(prefix)
    }
    return TensorFile(file.path, headers, lambda name: file.read(prefix + name))


def check_parts(file: TensorFile) -> None:
    """Raise ValueError for a tensor that belongs to no part."""
    for name in file.headers:
        if not name.startswith(PARTS):
            raise ValueError(f"{file.path} has a tensor {name}; known parts: {', '.join(PARTS)}")


def turned(file: TensorFile, is_turned: Callable[[str], bool]) -> TensorFile:
    """Return a file whose matrices [in, out] are [out, in]."""
    headers = {
        name: header._replace(shape=header.shape[::-1]) if is_turned(name) else header
        for name, header in file.headers.items()
    }
    return TensorFile(
        file.path, headers, lambda name: file.read(name).T if is_turned(name) else file.read(name)
    )


def is_gpt2_matrix(name: str) -> bool:
    """Return whether a tensor is a matrix [in, out] of GPT-2."""
    return name.startswith("tfmr.h.") and ".c_" in name and name.endswith(".weight")


def folded(file: TensorFile) -> TensorFile:
    """Return CAM++ with the normalisation that follows a convolution folded into it, as its exporter does."""
    convolutions = (
        name.removesuffix(".weight") for name, header in file.headers.items() if len(header.shape) > 2
    )
    found = {owner: names.folded_norm(owner) for owner in convolutions}
    owners = {owner: norm for owner, norm in found.items() if norm is not None}
    gone = {f"{norm}.{kind}" for norm in owners.values() for kind in ("weight", "bias", *names.STATISTICS)}
    headers = {
        name: header
        for name, header in file.headers.items()
        if name not in gone and not name.endswith("num_batches_tracked")
    }
    for owner in owners:
        weight = headers[f"{owner}.weight"]
        headers[f"{owner}.bias"] = Header(weight.shape[:1], weight.dtype, file.path)

    def read(name: str) -> Tensor:
        owner, _, kind = name.rpartition(".")
        if owner not in owners:
            return file.read(name)
        scale, shift = _affine(file, owners[owner])
        if kind == "weight":
            weight = file.read(name).double()
            return weight * scale.view(-1, *[1] * (weight.dim() - 1))
        return shift + (scale * file.read(name).double() if name in file.headers else 0)

    return TensorFile(file.path, headers, read)


def _affine(file: TensorFile, norm: str) -> tuple[Tensor, Tensor]:
    """Return what a normalisation multiplies by, and what it adds, in fp64. Raises ValueError."""
    for kind in ("weight", "bias", *names.STATISTICS):
        if f"{norm}.{kind}" not in file.headers:
            raise ValueError(f"{file.path} has no tensor {norm}.{kind}")
    gain, shift, mean, variance = (
        file.read(f"{norm}.{kind}").double() for kind in ("weight", "bias", *names.STATISTICS)
    )
    scale = gain / torch.sqrt(variance + EPS)
    return scale, shift - mean * scale
