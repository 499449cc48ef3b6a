"""Write the voices in the published layout: a custom_voice model with two voices, and bytes as its text."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from train_a_voice.codes import SIZE
from train_a_voice.flite import SPEAKERS
from train_a_voice.settings import Settings, codec_config
from zoo.nn.linear import Parted
from zoo.qwen3_tts import demo, describe, weights
from zoo.qwen3_tts.codec import Codec
from zoo.qwen3_tts.vocabulary import SPECIAL, tokenizer_config
from zoo.text.bpe import byte_symbols

FIRST_ID, LANGUAGE = 3000, "english"  # the speakers' ids count up from the first
ASSISTANT = 256 + len(SPECIAL)  # has its own text row: the vocabulary has single bytes only
MAX_FRAMES = 375  # a third of it is the longest piece of a text: 10 s, about the longest in training
CONTROL_SHIFT = 2048 - SIZE  # offset of the published ids that are not codes
SAMPLING = {
    "temperature": 0.4,
    "top_k": 5,
    "repetition_penalty": 1.0,
    "subtalker_temperature": 0.1,
    "subtalker_top_k": 5,
    "max_new_tokens": MAX_FRAMES,
    "interleaved_text": False,  # training only uses complete texts
}


def _stack(stack: Mapping[str, int]) -> dict[str, int]:
    return {
        "head_dim": stack["head_dim"],
        "hidden_size": stack["hidden"],
        "intermediate_size": stack["inner"],
        "num_attention_heads": stack["heads"],
        "num_hidden_layers": stack["layers"],
        "num_key_value_heads": stack["heads"] // 2,
    }


def root_config(settings: Settings) -> dict[str, Any]:
    """Return config.json: the published 0.6B one with smaller sizes."""
    config = copy.deepcopy(demo.CONFIGS["0.6b"]["config.json"])
    ids = {token: 256 + i for i, token in enumerate(SPECIAL)}
    config |= {
        "assistant_token_id": ASSISTANT,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
    }
    talker = config["talker_config"]
    third = settings.talker["head_dim"] // 6
    talker |= _stack(settings.talker) | {
        "num_code_groups": settings.codebooks,
        "text_hidden_size": settings.talker["hidden"],
        "text_vocab_size": ASSISTANT + 1,
        "vocab_size": SIZE + 1024,
        "codec_language_id": {LANGUAGE: talker["codec_language_id"][LANGUAGE] - CONTROL_SHIFT},
        "spk_id": {name: FIRST_ID - CONTROL_SHIFT + i for i, name in enumerate(SPEAKERS)},
        "spk_is_dialect": dict.fromkeys(SPEAKERS, False),
    }
    talker["rope_scaling"]["mrope_section"] = [settings.talker["head_dim"] // 2 - 2 * third, third, third]
    for name in demo.CONTROL:
        talker[f"codec_{name}_id"] -= CONTROL_SHIFT
    talker["code_predictor_config"] |= _stack(settings.depth) | {
        "num_code_groups": settings.codebooks,
        "vocab_size": SIZE,
    }
    return config


def write_texts(directory: Path, settings: Settings) -> None:
    """Write all files except the tensors."""
    files = copy.deepcopy(demo.CONFIGS["0.6b"])
    files |= {"config.json": root_config(settings), "speech_tokenizer/config.json": codec_config(settings)}
    files["generation_config.json"] |= SAMPLING
    files["tokenizer_config.json"] = tokenizer_config(256)
    (directory / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    symbols = {symbol: byte for byte, symbol in byte_symbols().items()}
    (directory / "vocab.json").write_text(json.dumps(symbols, ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def write_talker(directory: Path, talker: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write the talker's tensors. tensors: by the talker's names, for example a running average."""
    config = describe(directory)[0]
    _write(directory / "model.safetensors", talker, weights.root(config), tensors)


def write_decoder(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the codec's tensors. tensors: by the decoder's names.

    The layout requires an encoder, which is never run and stays random."""
    _, _, configs, _ = describe(directory)
    codec = Codec(*configs)
    table = weights.codec(*configs)
    ours = {f"decoder.{name}": tensor for name, tensor in tensors.items()}
    beside = {name: part for name, part in table.items() if not part.startswith("decoder.")}
    _write(directory / "speech_tokenizer" / "model.safetensors", codec, table, ours, beside)


def read(directory: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of "talker" and "decoder" by the names of their modules."""
    config, _, configs, _ = describe(directory)
    talker = _read(directory / "model.safetensors", weights.root(config))
    codec = _read(directory / "speech_tokenizer" / "model.safetensors", weights.codec(*configs))
    kept = {name: tensor for name, tensor in codec.items() if name.startswith("decoder.")}
    return {"talker": talker, "decoder": {name.removeprefix("decoder."): x for name, x in kept.items()}}


def _read(path: Path, table: Mapping[str, str]) -> dict[str, Tensor]:
    found = load_file(path)
    parts: dict[str, list[Tensor]] = {}
    for theirs, ours in table.items():  # in the order of the parts
        parts.setdefault(ours.partition("[")[0], []).append(found[theirs])
    return {name: some[0] if len(some) == 1 else torch.cat(some) for name, some in parts.items()}


def _write(
    path: Path,
    module: nn.Module,
    table: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    random: Mapping[str, str] | None = None,
) -> None:
    shapes = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found: dict[str, Tensor] = {}
    for theirs, ours in table.items():
        if random is not None and theirs in random:
            part = pick(module, shapes, ours)
            found[theirs] = torch.from_numpy(demo.fill(theirs, part.shape, 0)).bfloat16()
        else:
            found[theirs] = pick(module, tensors, ours).detach().bfloat16().contiguous()
    save_file(found, path, metadata={"format": "pt"})


def pick(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor by its name in the tables of `weights`: "qkv.weight[1]" is the second part."""
    name, _, part = name.partition("[")
    tensor = tensors[name]
    if not part:
        return tensor
    owner = module.get_submodule(name.rpartition(".")[0])
    assert isinstance(owner, Parted), f"{name} is not a fused matrix, so it has no parts"
    return tensor.split(owner.parts)[int(part[:-1])]
