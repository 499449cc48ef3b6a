"""CSM's codec in moshi's file: its names, its packed matrices, and its size as published."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange
from models import family
from safetensors.torch import load_file, save_file

import zoo
from zoo.csm import demo, moshi
from zoo.request import AudioClip, Reference, Request

MANIFEST = Path(__file__).parents[2] / "manifests" / "csm.txt"
PUBLISHED_BYTES = 384_644_900  # of the file in kyutai/moshiko-pytorch-bf16, which has 318 tensors
CLIP = AudioClip(np.sin(np.arange(4000) ** 1.5 / 30).astype(np.float32) / 4, 24_000)
ASKED = Request(text="Good morning.", max_frames=5, references=(Reference(CLIP, "Hm."),))
QUERIES, OTHERS = "self_attn.q_proj.weight", ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
# Source: kyutai-labs/moshi, the attributes of its classes (seanet.py, conv.py, transformer.py, vq.py, core_vq.py).
REPLACED = (
    (r"^(encoder|decoder)_transformer\.", r"\1_transformer.transformer."),
    (r"^(encoder|decoder)\.layers\.", r"\1.model."),
    (r"mlp\.fc", "linear"),
    (r"self_attn\.o_proj", "self_attn.out_proj"),
    (r"self_attn\.q_proj\.weight", moshi.PACKED),
    (r"input_layernorm", "norm1"),
    (r"post_attention_layernorm", "norm2"),
    (r"self_attn_layer_scale", "layer_scale_1"),
    (r"mlp_layer_scale", "layer_scale_2"),
    (r"semantic_residual_vector_quantizer\.", "rvq_first."),
    (r"acoustic_residual_vector_quantizer\.", "rvq_rest."),
    (r"(rvq_\w+)\.layers", r"\1.vq.layers"),
    (r"\.codebook\.", "._codebook."),
    (r"\.initialized", "._initialized"),
    (r"embed_sum", "embedding_sum"),
    (r"^(encoder\.model.*\.|decoder\.model\.\d+\.block\.\d+\.)conv\.", r"\1conv.conv."),
    (r"^decoder\.model\.(0|14)\.conv\.", r"decoder.model.\1.conv.conv."),
    (r"^(decoder\.model\.\d+\.)conv\.(?!conv)", r"\1convtr.convtr."),
    (r"^downsample\.conv\.", "downsample.conv.conv.conv."),
    (r"^upsample\.conv\.", "upsample.convtr.convtr.convtr."),
)


def of_moshi(name: str) -> str:
    """Return moshi's name of a tensor; that of a packed matrix for its queries."""
    for ours, theirs in REPLACED:
        name = re.sub(ours, theirs, name)
    return name


def in_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    return rearrange(rows, "(h b a) d -> (h a b) d", b=2, a=head_dim // 2)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The original layout, with the codec in moshi's file instead of a folder."""
    path = demo.write(tmp_path_factory.mktemp("csm") / "original", layout="original")
    head_dim = json.loads((path / "config.json").read_text())["codec_config"]["head_dim"]
    tensors = load_file(path / "mimi" / "model.safetensors")
    packed = {}
    for name, value in tensors.items():
        if name.endswith(QUERIES):
            keys, values = (tensors[name.replace(QUERIES, other)] for other in OTHERS)
            value = torch.cat((in_pairs(value, head_dim), in_pairs(keys, head_dim), values))
        if not name.endswith(OTHERS):
            packed[of_moshi(name)] = value
    shutil.rmtree(path / "mimi")
    save_file(packed, path / moshi.FILE)
    return path


def test_moshis_file_gives_the_codec_of_transformers(original):
    loaded, expected = zoo.load(original, "cpu", "float32"), family("csm")
    state = loaded.decoder.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.decoder.state_dict().items())
    assert torch.equal(loaded.writer.cloner(CLIP), expected.writer.cloner(CLIP))
    assert torch.equal(zoo.generate(loaded, ASKED).samples, zoo.generate(expected, ASKED).samples)


def published_shapes() -> dict[str, list[int]]:
    """Return the shapes of the codec's tensors by transformers' names."""
    rows = [row.split("|") for row in MANIFEST.read_text().splitlines() if row.startswith("codec_model.")]
    return {name.removeprefix("codec_model."): [*map(int, shape.split("x"))] for name, _, shape in rows}


def test_the_names_fill_the_header_of_the_published_file():
    """A safetensors file is a length of 8 bytes, a JSON header filled up to a multiple of 8, and the values."""
    header, at = {}, 0
    for name, shape in sorted(published_shapes().items(), key=lambda row: of_moshi(row[0])):
        if name.endswith(OTHERS):
            continue
        if name.endswith(QUERIES):
            shape = [3 * shape[0], shape[1]]
        stop = at + 4 * math.prod(shape)
        header[of_moshi(name)] = {"dtype": "F32", "shape": shape, "data_offsets": [at, stop]}
        at = stop
    size = len(json.dumps(header, separators=(",", ":")))
    assert len(header) == 318 and 8 + -(-size // 8) * 8 + at == PUBLISHED_BYTES


def test_names_of_the_published_size_come_back():
    names = [name for name in published_shapes() if not name.endswith((QUERIES, *OTHERS))]
    assert [moshi.renamed(of_moshi(name)) for name in names] == names


def test_a_tensor_that_moshis_file_lacks_is_named(original, tmp_path):
    path = Path(shutil.copytree(original, tmp_path / "model"))
    tensors = load_file(path / moshi.FILE)
    del tensors["decoder.model.0.conv.conv.bias"]
    save_file(tensors, path / moshi.FILE)
    with pytest.raises(ValueError, match=r"missing decoder\.layers\.0\.conv\.bias"):
        zoo.load(path, "cpu", "float32")
