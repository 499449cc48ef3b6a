"""A random XEUS for demo checkpoints, with the files and names of its repository, clusters included."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpoint.loading import published
from zoo.checkpoint.synthetic import Rule
from zoo.opuslm import xeus
from zoo.opuslm.listener import CENTERS, CLUSTERS, CONFIG, FOLDER, WEIGHTS

Fill = Callable[[str, tuple[int, ...], tuple[Rule, ...]], np.ndarray]
PUBLISHED_CONVS = [list(conv) for conv in xeus.CONVS]
RULES: tuple[Rule, ...] = (
    (r"norm\w*\.weight$", 1.0, 0.2, False),
    (r"(conv\.weight_g)$", 1.0, 0.1, False),
    (r"csgu\.conv\.bias$", 1.0, 0.2, False),
    (r"\.bias$", 0.0, 0.1, False),
    (r"linear_[qk]\.weight$", 0.0, 2.0, True),  # so that attention tells positions apart
    (r"\.weight(_v)?$", 0.0, 1.4, True),
    (r"centers$", 0.0, 1.0, False),
    (r"", 0.0, 0.5, False),  # of training
)
PASSENGERS = {"losses.0.final_proj.weight": (3, 4), "mask.mask_emb": (4,)}


def config(hidden: int, heads: int, inner: int, layers: int, convs: list[list[int]]) -> dict[str, Any]:
    """Return config.yaml."""
    return {
        "frontend": "wav2vec_cnn",
        "frontend_conf": {
            "norm_mode": "layer_norm",
            "conv_mode": "standard",
            "bias": True,
            "normalize_audio": True,
            "shapes": convs,
        },
        "preencoder": "linear",
        "preencoder_conf": {"input_size": convs[-1][0], "output_size": hidden},
        "encoder": "e_branchformer",
        "encoder_conf": {
            "output_size": hidden,
            "attention_heads": heads,
            "attention_layer_type": "selfattn",
            "pos_enc_layer_type": "conv",
            "rel_pos_type": "latest",
            "cgmlp_linear_units": inner,
            "cgmlp_conv_kernel": 31,
            "use_linear_after_conv": False,
            "gate_activation": "identity",
            "num_blocks": layers,
            "input_layer": None,
            "linear_units": inner,
            "positionwise_layer_type": "linear",
            "use_ffn": True,
            "macaron_ffn": True,
            "merge_conv_kernel": 31,
        },
    }


TINY = config(32, 2, 48, 2, [[8, *conv[1:]] for conv in PUBLISHED_CONVS])
PUBLISHED = config(1024, 8, 4096, 19, PUBLISHED_CONVS)


def write_texts(
    directory: Path, values: dict[str, Any], write_yaml: Callable[[Path, dict[str, Any]], None]
) -> None:
    """Write config.yaml, and empty files in the places of the others."""
    folder = directory / FOLDER
    (folder / CONFIG).parent.mkdir(parents=True)
    write_yaml(folder / CONFIG, values)
    for name in (WEIGHTS[0], CLUSTERS):
        (folder / name).touch()


def write(directory: Path, values: dict[str, Any], num_clusters: int, fill: Fill, is_old: bool) -> None:
    """Write the weights and the clusters. is_old: under the names of the older file."""
    folder, sizes = directory / FOLDER, xeus.XeusConfig.read(values, CONFIG)
    with torch.device("meta"):
        network = xeus.Xeus(sizes)
    shapes = published(network, xeus.names(network))
    direction = shapes.pop(xeus.EMBED)
    shapes |= {f"{xeus.EMBED}_g": (1, 1, direction[2]), f"{xeus.EMBED}_v": direction} | PASSENGERS
    tensors = {name: torch.from_numpy(fill(name, shape, RULES)) for name, shape in shapes.items()}
    if not is_old:
        tensors = {newer(name): value for name, value in tensors.items()}
    else:
        (folder / WEIGHTS[0]).unlink()
    torch.save(tensors, folder / WEIGHTS[is_old])
    centers = fill("centers", (num_clusters, sizes.hidden), RULES)
    (folder / CLUSTERS).write_bytes(clustering(centers))


def newer(name: str) -> str:
    """Return a tensor's name in the newer file."""
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        name = name.replace(
            f"{xeus.CONVS_OF_EMBED[0]}{old}", f"{xeus.CONVS_OF_EMBED[1]}parametrizations.weight.{new}"
        )
    return name.replace(*xeus.CONVS_OF_EMBED)


def clustering(centers: np.ndarray) -> bytes:
    """Return a file as joblib writes it for scikit-learn's clustering, whose array follows its description."""
    out = BytesIO()
    array = np.ascontiguousarray(centers, np.float32)

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def made(module: str, name: str) -> bytes:
        return f"c{module}\n{name}\n".encode() + b")\x81"

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    out.write(b"\x80\x03" + made("sklearn.cluster._kmeans", "MiniBatchKMeans") + b"}(")
    out.write(text("n_clusters") + number(len(array)) + text(CENTERS))
    out.write(made("joblib.numpy_pickle", "NumpyArrayWrapper") + b"}(")
    out.write(text("shape") + number(array.shape[0]) + number(array.shape[1]) + b"\x86")
    out.write(text("order") + text("C") + text("dtype") + b"cnumpy\ndtype\n" + text("f4") + b"\x89\x88\x87R")
    out.write(b"(" + number(3) + text("<") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb")
    out.write(text("allow_mmap") + b"\x88" + text("numpy_array_alignment_bytes") + number(16) + b"ub")
    padding = 16 - (out.tell() + 1) % 16
    out.write(bytes([padding]) + b"\xff" * padding + array.tobytes())
    out.write(text("_sklearn_version") + text("1.5.0") + b"ub.")
    return out.getvalue()
