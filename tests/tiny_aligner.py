"""A tiny random CTC model in transformers' layout."""

import json
import string

import torch
from transformers import HubertConfig, HubertForCTC, Wav2Vec2Config, Wav2Vec2ForCTC

TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_uppercase, "'"]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "conv_dim": (8,) * 7,
}


def write(directory, kind="wav2vec2", norm="layer", do_normalize=True, seed=0):
    """Write a checkpoint and return its directory. norm: "layer" or "group"."""
    config, model = {
        "wav2vec2": (Wav2Vec2Config, Wav2Vec2ForCTC),
        "hubert": (HubertConfig, HubertForCTC),
    }[kind]
    torch.manual_seed(seed)
    is_layer = norm == "layer"
    settings = config(feat_extract_norm=norm, do_stable_layer_norm=is_layer, conv_bias=is_layer, **SIZES)
    model(settings).save_pretrained(directory)
    vocabulary = {token: id for id, token in enumerate(TOKENS)}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    audio = {"do_normalize": do_normalize, "sampling_rate": 16000}
    (directory / "preprocessor_config.json").write_text(json.dumps(audio))
    return directory
