"""The tables from published tensor names to ours (see zoo.checkpoint.loading), and what is taken out of the
files on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zoo.checkpoint.names import gate_up, qkv
from zoo.checkpoint.tensor_files import Header, TensorFile
from zoo.nn import llama
from zoo.opuslm.config import BOOKS, STREAMS, CodecConfig, Config

HEAD = "corelm.lm_head.weight"
UNUSED = "criterion."  # the loss: a copy of the head, and a head of an earlier recipe
DECODER = "codec.generator.decoder.model"
BOOK = "codec.generator.quantizer.vq.layers"
CODEBOOK_LEAVES = ("inited", "cluster_size", "embed_avg")  # of training


def lm(config: Config) -> dict[str, str]:
    """Return the table for the model's file, whose tensors go to `Backbone`."""
    theirs = "corelm.decoders.model"
    names = {"corelm.emb.weight": "ids.weight", "corelm.head_emb.weight": "streams.weight"}
    names |= {f"{HEAD}[{s}]": f"heads.weight[{s}]" for s in range(STREAMS)}
    if not config.is_olmo:
        return names | llama.names(config.body, theirs, "stack")
    names[f"{theirs}.norm.weight"] = "stack.norm.weight"
    for i in range(config.body.layers):
        names |= _olmo_block(f"{theirs}.layers.{i}", f"stack.layers.{i}")
    return names


def _olmo_block(theirs: str, ours: str) -> dict[str, str]:
    pairs = {
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "self_attn.o_proj": "out",
        "post_attention_layernorm": "norm",
        "mlp.down_proj": "mlp.down",
        "post_feedforward_layernorm": "mlp_norm",
    }
    names = {f"{theirs}.{a}.weight": f"{ours}.{b}.weight" for a, b in pairs.items()}
    return names | qkv(theirs, ours) | gate_up(theirs, ours)


def drawn(config: Config, stream: int) -> Tensor:
    """Return the ids that a stream may draw [N]: its codes, then in the first stream the end and the marker of
    audio, and in the others the pad."""
    known = config.vocabulary
    if stream == 0:
        return torch.cat(
            (known.ssl + torch.arange(known.num_clusters), torch.tensor([known.end, known.audio]))
        )
    codes = known.codec + known.num_codes * (stream - 1) + torch.arange(known.num_codes)
    return torch.cat((codes, torch.tensor([0])))


def shapes(config: Config, expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the published file, from those that `lm` names."""
    whole = {name: shape for name, shape in expected.items() if not name.startswith(f"{HEAD}[")}
    return whole | {HEAD: (config.vocabulary.size, config.body.hidden)}


def trimmed(file: TensorFile, config: Config) -> TensorFile:
    """Return the model's file without the loss, and with the rows of the head that each stream draws instead of
    the whole head. Raises ValueError."""
    headers = {name: header for name, header in file.headers.items() if not name.startswith(UNUSED)}
    head, size = headers.pop(HEAD, None), [config.vocabulary.size, config.body.hidden]
    if head is None or list(head.shape) != size:
        what = "lacks" if head is None else f"has another shape, {list(head.shape)}, of"
        raise ValueError(f"{file.path} {what} {HEAD} {size}")
    rows = {f"{HEAD}[{s}]": drawn(config, s) for s in range(STREAMS)}
    headers |= {
        name: Header((len(ids), config.body.hidden), head.dtype, file.path) for name, ids in rows.items()
    }
    return TensorFile(file.path, headers, _reader(file, rows))


def _reader(file: TensorFile, rows: dict[str, Tensor]) -> Callable[[str], Tensor]:
    return lambda name: file.read(HEAD)[rows[name]] if name in rows else file.read(name)


def codec(config: CodecConfig) -> dict[str, str]:
    """Return the table for the codec's file, whose tensors go to `Decoder`."""
    names = {f"{BOOK}.{k}._codebook.embed": f"tables.{k}.weight" for k in range(BOOKS)}
    names |= _conv("0", "stem")
    for i in range(config.lstm):
        for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            names[f"{DECODER}.1.lstm.{leaf}_l{i}"] = f"lstm.layers.{i}.{leaf}"
    at = 2
    for i in range(len(config.rates)):
        names[f"{DECODER}.{at}.alpha"] = f"levels.{i}.wave.alpha"
        for leaf in ("weight", "bias"):
            names[f"{DECODER}.{at + 1}.convtr.convtr.{leaf}"] = f"levels.{i}.up.{leaf}"
        for j in range(config.residuals):
            names |= _unit(str(at + 2 + j), f"levels.{i}.units.{j}")
        at += 2 + config.residuals
    names[f"{DECODER}.{at}.alpha"] = "wave.alpha"
    return names | _conv(str(at + 1), "tail")


def _unit(theirs: str, ours: str) -> dict[str, str]:
    names = {
        f"{DECODER}.{theirs}.block.{at}.alpha": f"{ours}.{wave}.alpha"
        for at, wave in ((0, "wave1"), (2, "wave2"))
    }
    names |= _conv(f"{theirs}.block.1", f"{ours}.conv1") | _conv(f"{theirs}.block.3", f"{ours}.conv2")
    return names | _conv(f"{theirs}.shortcut", f"{ours}.shortcut")


def _conv(theirs: str, ours: str) -> dict[str, str]:
    return {f"{DECODER}.{theirs}.conv.conv.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")}


def is_normed(name: str) -> bool:
    """Return whether a tensor's convolution is weight-normed: all of them are."""
    return name.startswith(DECODER)


def codec_unused(path: Path, file: TensorFile) -> frozenset[str]:
    """Return the codec's tensors that decoding does not read: encoder, discriminators, statistics of training.
    Raises ValueError if there is nothing else."""
    kept = [name for name in file.headers if name.startswith((DECODER, BOOK))]
    if not kept:
        raise ValueError(f"{path} is not a codec of ESPnet: no tensor begins with {DECODER} or {BOOK}")
    return frozenset(
        name
        for name in file.headers
        if not name.startswith((DECODER, BOOK)) or name.rpartition(".")[2] in CODEBOOK_LEAVES
    )
