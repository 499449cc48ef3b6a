"""The tables from published tensor names to ours (see zoo.checkpoint.loading), and how one file becomes those
of the modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zoo.bagpiper.config import CODEC, EOS, EOT, FIRST_WORD, STREAMS, TOWER, Config, TowerConfig
from zoo.checkpoint.tensor_files import Header, TensorFile, contents, open_file
from zoo.nn import dac, qwen3
from zoo.nn.deferred import Shape

HEAD = "lm_head.weight"
UNUSED = ("vocab_weight",)  # of training
# Parts of X-Codec that only its encoder or its training needs
CODEC_UNUSED = tuple(
    f"{CODEC}.{part}."
    for part in ("fc", "fc1", "decoder_semantic", "encoder_semantic", "acoustic_encoder", "semantic_model")
)
CODEBOOK_UNUSED = ("inited", "cluster_size", "embed_avg")
ADAPTOR = "adaptor.continuous_audio"


def lm(config: Config) -> dict[str, str]:
    """Return the table of the LM, whose tensors go to `Backbone`."""
    names = {"model.embed_tokens.weight": "ids.weight", "stream_emb.weight": "streams.weight"}
    names |= {f"{HEAD}[text]": "words.weight"}
    names |= {f"{HEAD}[{s}]": f"heads.weight[{s}]" for s in range(STREAMS)}
    return names | qwen3.names(config.body, "model", "stack")


def drawn(config: Config) -> dict[str, Tensor]:
    """Return the ids that each head scores, by the name of its part: words or codes, then in text and in the
    first stream the two ends. The first id of a stream is its pad."""
    ends, size = torch.tensor([EOS, EOT]), config.codec.num_codes + 1
    streams = [config.first_pad + size * s + torch.arange(size) for s in range(STREAMS)]
    streams[0] = torch.cat((streams[0], ends))
    rows = {f"{HEAD}[{s}]": ids for s, ids in enumerate(streams)}
    return rows | {f"{HEAD}[text]": torch.cat((FIRST_WORD + torch.arange(config.num_words), ends))}


def codec(config: Config) -> dict[str, str]:
    """Return the table of the codec, whose tensors go to `Decoder`."""
    names = {f"{CODEC}.quantizer.quantizers.{k}.codebook.embed": f"books.{k}.weight" for k in range(STREAMS)}
    names |= {f"{CODEC}.fc2.{leaf}": f"project.{leaf}" for leaf in ("weight", "bias")}
    return names | dac.names(f"{CODEC}.acoustic_decoder", "decoder", len(config.codec.rates), dac.UP)


def ear(config: TowerConfig) -> dict[str, str]:
    """Return the table of the audio encoder, whose tensors go to `Ear`."""
    names = {f"{TOWER}.{name}": f"tower.{name}" for name in tower_shapes(config)}
    return names | {f"{ADAPTOR}.{leaf}": f"adaptor.{leaf}" for leaf in ("weight", "bias")}


def tower_shapes(config: TowerConfig) -> dict[str, Shape]:
    """Return the names and shapes of the audio encoder's tensors."""
    width, inner, channels = config.width, config.inner, config.channels
    found: dict[str, Shape] = {}

    def both(name: str, *shape: int) -> None:
        found.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    for i in (1, 2, 3):
        both(f"conv2d{i}", channels, 1 if i == 1 else channels, 3, 3)
    found["conv_out.weight"] = (width, channels * config.bands)
    for i in range(config.layers):
        layer = f"layers.{i}"
        for part in ("q", "k", "v", "out"):
            both(f"{layer}.self_attn.{part}_proj", width, width)
        both(f"{layer}.self_attn_layer_norm", width)
        both(f"{layer}.fc1", inner, width)
        both(f"{layer}.fc2", width, inner)
        both(f"{layer}.final_layer_norm", width)
    both("ln_post", width)
    both("proj1", width, width)
    both("proj2", config.out, width)
    return found


def is_unused(name: str) -> bool:
    """Return whether a tensor is known, and nothing reads it."""
    is_count = name.startswith(f"{CODEC}.quantizer.") and name.rpartition(".")[2] in CODEBOOK_UNUSED
    return name in UNUSED or name.startswith(CODEC_UNUSED) or is_count


class Files:
    """The tensors of a checkpoint, in one pickle or in shards, by module. Raises ValueError."""

    def __init__(self, path: Path, config: Config):
        self.path, self.config, self.headers = path, config, contents(path)
        self._open: dict[Path, TensorFile] = {}

    def codec(self) -> TensorFile:
        names = {name for name in self.headers if name.startswith(f"{CODEC}.") and not is_unused(name)}
        return self._part(names)

    def ear(self) -> TensorFile:
        return self._part({name for name in self.headers if name.startswith((f"{TOWER}.", f"{ADAPTOR}."))})

    def lm(self) -> TensorFile:
        """Return all other tensors, with the rows of the head that are drawn instead of the whole head."""
        others = {*self.codec().headers, *(self.ear().headers if self.config.tower is not None else ())}
        found = {
            name: header
            for name, header in self.headers.items()
            if name not in others and not is_unused(name)
        }
        head, size = found.pop(HEAD, None), (self.config.num_ids, self.config.body.hidden)
        if head is None or head.shape != size:
            what = "lacks" if head is None else f"has another shape, {list(head.shape)}, of"
            raise ValueError(f"{self.path} {what} {HEAD} {list(size)}")
        rows = drawn(self.config)
        found |= {name: Header((len(ids), size[1]), head.dtype, head.path) for name, ids in rows.items()}
        return TensorFile(self.path, found, self._head_reader(rows))

    def _part(self, names: set[str]) -> TensorFile:
        return TensorFile(self.path, {name: self.headers[name] for name in sorted(names)}, self.read)

    def _head_reader(self, rows: dict[str, Tensor]) -> Callable[[str], Tensor]:
        return lambda name: self.read(HEAD)[rows[name]] if name in rows else self.read(name)

    def read(self, name: str) -> Tensor:
        path = self.headers[name].path
        if path not in self._open:
            self._open = {path: open_file(path)}  # one at a time, since what is read leaves memory with it
        return self._open[path].read(name)


def shapes(config: Config, expected: dict[str, Shape]) -> dict[str, Shape]:
    """Return the tensors of the published file, from those that `lm` names."""
    whole = {name: shape for name, shape in expected.items() if not name.startswith(f"{HEAD}[")}
    return whole | {HEAD: (config.num_ids, config.body.hidden)}
