"""Tables from published tensor names to ours (see zoo.checkpoint.loading), and the files that hold the
tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zoo.checkpoint.names import decoder_block, qkv
from zoo.nn.s3 import files
from zoo.nn.s3.files import FLOW_FILE, SPEAKER_FILE, VOCODER_FILE, open_speaker, open_vocoder, s3_tokenizer
from zoo.nn.s3.names import both, campplus, flow, folded_norm, is_weight_normed, vocoder

if TYPE_CHECKING:
    from zoo.checkpoint.tensor_files import TensorFile
    from zoo.cosyvoice2.config import LMConfig
    from zoo.nn.s3.tokenizer import S3Config

LM_FILE, TOKENIZER_FILE = "llm.pt", "speech_tokenizer_v2.onnx"
# shared files and tables
__all__ = [
    "FLOW_FILE",
    "SPEAKER_FILE",
    "VOCODER_FILE",
    "campplus",
    "flow",
    "folded_norm",
    "is_weight_normed",
    "open_speaker",
    "open_vocoder",
    "s3_tokenizer",
    "vocoder",
]
TEXT_HEAD = "llm.model.lm_head.weight"  # a copy of the text table; never used


def lm(config: LMConfig) -> dict[str, str]:
    """Return the names of llm.pt -> those of SpeechLM."""
    names = {
        "llm_embedding.weight": "control.weight",
        "speech_embedding.weight": "codes.weight",
        "llm.model.model.embed_tokens.weight": "text.weight",
        "llm.model.model.norm.weight": "norm.weight",
        TEXT_HEAD: "text_head.weight",
    }
    for i in range(config.layers):
        theirs, ours = f"llm.model.model.layers.{i}", f"layers.{i}"
        names |= decoder_block(theirs, ours, has_qk_norm=False) | qkv(theirs, ours, "bias")
    return names | both({"llm_decoder": "head"})


def open_tokenizer(directory: Path) -> tuple[TensorFile, S3Config]:
    """Return the tokenizer's file and the sizes of its tensors. Raises ValueError."""
    return files.open_tokenizer(directory / TOKENIZER_FILE)
