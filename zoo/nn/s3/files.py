"""The published files of the networks around S3 codes: the tokenizer and CAM++ in ONNX, and hift.pt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zoo.checkpoint.tensor_files import TensorFile, open_file, open_onnx_parameters
from zoo.nn.s3.names import tokenizer_layers

if TYPE_CHECKING:
    from zoo.nn.s3.tokenizer import S3Config

SPEAKER_FILE, FLOW_FILE, VOCODER_FILE = "campplus.onnx", "flow.pt", "hift.pt"
# Tensors of the tokenizer to which the exporter gave numbers.
# Source: xingchensong/S3Tokenizer, s3tokenizer/utils.py, onnx2torch.
NUMBERED = {
    "onnx::Conv_2216": "conv1.weight",
    "onnx::Conv_2217": "conv1.bias",
    "onnx::Conv_2218": "conv2.weight",
    "onnx::Conv_2219": "conv2.bias",
    "onnx::MatMul_2536": "digits.weight",
    "quantizer.project_in.bias": "digits.bias",
}


def s3_tokenizer(config: S3Config) -> dict[str, str]:
    """Return the names of the tokenizer's ONNX file -> those of S3Tokenizer."""
    return NUMBERED | tokenizer_layers(config.layers)


def open_tokenizer(path: Path) -> tuple[TensorFile, S3Config]:
    """Return the tokenizer's file and the sizes of its tensors. Raises ValueError."""
    from zoo.nn.s3.tokenizer import HEAD_DIM, S3Config

    file = open_onnx_parameters(path, frozenset(NUMBERED))
    first = file.headers.get("onnx::Conv_2216")
    if first is None or len(first.shape) != 3 or first.shape[0] % HEAD_DIM:
        what = "nothing" if first is None else f"{list(first.shape)}"
        needed = f"a convolution whose output channels are a multiple of {HEAD_DIM} is needed"
        raise ValueError(f"{file.path} has {what} as onnx::Conv_2216; {needed}")
    layers = sum(name.endswith(".attn_ln.weight") for name in file.headers)
    return file, S3Config(mels=first.shape[1], width=first.shape[0], layers=layers)


def open_speaker(directory: Path) -> TensorFile:
    return open_onnx_parameters(directory / SPEAKER_FILE)


def open_vocoder(directory: Path) -> tuple[TensorFile, str]:
    """Return hift.pt and the prefix of its names, which is empty unless its trainer saved it."""
    file, prefix = open_file(directory / VOCODER_FILE), "generator."
    return file, prefix if any(name.startswith(prefix) for name in file.headers) else ""
