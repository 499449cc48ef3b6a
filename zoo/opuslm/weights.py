"""The tables from published tensor names to ours (see zoo.checkpoint.loading), and what is taken out of the
files on the way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.checkpoint.names import gate_up, qkv
from zoo.checkpoint.tensor_files import Header, TensorFile, contents, open_file
from zoo.nn import llama
from zoo.opuslm.config import CodecConfig, Config
from zoo.opuslm.ids import BOOKS, PAD, STREAMS

UNUSED = "criterion."  # the loss: a copy of the head, and a head of an earlier recipe
AUXILIARY = "criterion.aux_lm_head.weight"  # that earlier head, of the codes alone
DECODER = "codec.generator.decoder.model"
ENCODER = "codec.generator.encoder.model"
BOOK = "codec.generator.quantizer.vq.layers"
CODEBOOK_LEAVES = ("inited", "cluster_size", "embed_avg")  # of training
log = logging.getLogger(__name__)


class Names(NamedTuple):
    """How a layout names the LM's tensors."""

    ids: str
    streams: str
    head: str
    body: str


ESPNET = Names(
    "corelm.emb.weight", "corelm.head_emb.weight", "corelm.lm_head.weight", "corelm.decoders.model"
)
CONVERTED = Names("model.embed_tokens.weight", "head_emb.weight", "lm_head.weight", "model")


def names_of(config: Config) -> Names:
    return CONVERTED if config.is_converted else ESPNET


def lm(config: Config) -> dict[str, str]:
    """Return the table for the model's files, whose tensors go to `Backbone`."""
    own = names_of(config)
    theirs = own.body
    names = {own.ids: "ids.weight", own.streams: "streams.weight"}
    names |= {f"{own.head}[{s}]": f"heads.weight[{s}]" for s in range(STREAMS + 1)}
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
    audio, and in the others the pad. Behind the last stream: the words, the end and the marker of text."""
    known = config.vocabulary
    if stream == STREAMS:
        words = known.first_word + torch.arange(known.num_words)
        return torch.cat((words, torch.tensor([known.end, known.text])))
    if stream == 0:
        return torch.cat(
            (known.ssl + torch.arange(known.num_clusters), torch.tensor([known.end, known.audio]))
        )
    codes = known.codec + known.num_codes * (stream - 1) + torch.arange(known.num_codes)
    return torch.cat((codes, torch.tensor([PAD])))


def shapes(config: Config, expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the published file, from those that `lm` names."""
    head = names_of(config).head
    whole = {name: shape for name, shape in expected.items() if not name.startswith(f"{head}[")}
    return whole | {head: (config.vocabulary.size, config.body.hidden)}


def open_converted(directory: Path) -> TensorFile:
    """Open the files of a converted checkpoint as one. Raises ValueError."""
    headers = contents(directory)
    files = {path: open_file(path) for path in {header.path for header in headers.values()}}
    return TensorFile(directory, headers, lambda name: files[headers[name].path].read(name))


def trimmed(file: TensorFile, config: Config) -> TensorFile:
    """Return the model's file without the loss, and with the rows of the head that each stream draws instead of
    the whole head. Raises ValueError."""
    theirs = names_of(config).head
    headers = {name: header for name, header in file.headers.items() if not name.startswith(UNUSED)}
    head, size = headers.pop(theirs, None), [config.vocabulary.size, config.body.hidden]
    if head is None or list(head.shape) != size:
        what = "lacks" if head is None else f"has another shape, {list(head.shape)}, of"
        raise ValueError(f"{file.path} {what} {theirs} {size}")
    _compare_heads(file, config, theirs)
    rows = {f"{theirs}[{s}]": drawn(config, s) for s in range(STREAMS + 1)}
    headers |= {
        name: Header((len(ids), config.body.hidden), head.dtype, head.path) for name, ids in rows.items()
    }
    return TensorFile(
        file.path, headers, lambda name: file.read(theirs)[rows[name]] if name in rows else file.read(name)
    )


def _compare_heads(file: TensorFile, config: Config, head: str) -> None:
    """Warn if the file has a second head whose rows differ: this code, like ESPnet's today, draws from the first."""
    known = config.vocabulary
    if AUXILIARY not in file.headers:
        return
    other, own = file.read(AUXILIARY), file.read(head)[known.codec : known.codec + BOOKS * known.num_codes]
    if other.shape != own.shape or not torch.equal(other, own):
        log.warning("%s: %s differs from the rows of %s, which are used", file.path, AUXILIARY, head)


def codec(config: CodecConfig) -> dict[str, str]:
    """Return the table for the codec's file, whose tensors go to `Decoder`."""
    names = {f"{BOOK}.{k}._codebook.embed": f"tables.{k}.weight" for k in range(BOOKS)}
    names |= _conv(f"{DECODER}.0", "stem") | _lstm(f"{DECODER}.1", config)
    at = 2
    for i in range(len(config.rates)):
        names[f"{DECODER}.{at}.alpha"] = f"levels.{i}.wave.alpha"
        for leaf in ("weight", "bias"):
            names[f"{DECODER}.{at + 1}.convtr.convtr.{leaf}"] = f"levels.{i}.up.{leaf}"
        for j in range(config.residuals):
            names |= _unit(f"{DECODER}.{at + 2 + j}", f"levels.{i}.units.{j}")
        at += 2 + config.residuals
    names[f"{DECODER}.{at}.alpha"] = "wave.alpha"
    return names | _conv(f"{DECODER}.{at + 1}", "tail")


def encoder(config: CodecConfig) -> dict[str, str]:
    """Return the table for the codec's file, whose tensors go to `Encoder`."""
    names, at = _conv(f"{ENCODER}.0", "stem"), 1
    for i in range(len(config.rates)):
        for j in range(config.residuals):
            names |= _unit(f"{ENCODER}.{at + j}", f"levels.{i}.units.{j}")
        at += config.residuals
        names[f"{ENCODER}.{at}.alpha"] = f"levels.{i}.wave.alpha"
        names |= _conv(f"{ENCODER}.{at + 1}", f"levels.{i}.down")
        at += 2
    names |= _lstm(f"{ENCODER}.{at}", config) | {f"{ENCODER}.{at + 1}.alpha": "wave.alpha"}
    return names | _conv(f"{ENCODER}.{at + 2}", "tail")


def _lstm(theirs: str, config: CodecConfig) -> dict[str, str]:
    leaves = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return {
        f"{theirs}.lstm.{leaf}_l{i}": f"lstm.layers.{i}.{leaf}" for i in range(config.lstm) for leaf in leaves
    }


def _unit(theirs: str, ours: str) -> dict[str, str]:
    names = {
        f"{theirs}.block.{at}.alpha": f"{ours}.{wave}.alpha" for at, wave in ((0, "wave1"), (2, "wave2"))
    }
    names |= _conv(f"{theirs}.block.1", f"{ours}.conv1") | _conv(f"{theirs}.block.3", f"{ours}.conv2")
    return names | _conv(f"{theirs}.shortcut", f"{ours}.shortcut")


def _conv(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.conv.conv.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")}


def is_normed(name: str) -> bool:
    """Return whether a tensor's convolution is weight-normed: all of them are."""
    return name.startswith((DECODER, ENCODER))


def encoder_unused(file: TensorFile) -> frozenset[str]:
    """Return the codec's tensors that do not belong to its encoder."""
    return frozenset(name for name in file.headers if not name.startswith(ENCODER))


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
