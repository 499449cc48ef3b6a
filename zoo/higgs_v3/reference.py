"""Runs Higgs Audio V3 as a plain loop around transformers' classes, for `zoo bench --against reference` and
`zoo parity`. serving/tools/reference.py starts this script in a separate environment, which
tests/parity/remake.sh builds. No package runs the whole model outside a server.

Backbone and codec are Qwen3Model and HiggsAudioV2TokenizerModel. `streams` requests form one static batch;
each step draws for all of them, and the codec decodes each one at the end. The benchmark has a fixed length
and ignores the stop rule; parity follows it.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    Qwen3Config,
    Qwen3Model,
)

from zoo.reference_script import answer, speed

NAME = "transformers 5.23"
RATE_HZ = 24000
TEXT = "tied.embedding.text_embedding.weight"
# The config of bosonai/higgs-audio-v2-tokenizer. The checkpoint does not include it.
PUBLISHED = {
    "codebook_size": 1024,
    "codebook_dim": 64,
    "acoustic_model_config": {"encoder_hidden_size": 64, "decoder_hidden_size": 1024, "hidden_size": 256},
    "semantic_model_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype):
        config = json.loads((directory / "config.json").read_text())
        audio = config["audio_encoder_config"]
        self.books, self.size = audio["num_codebooks"], audio["vocab_size"]
        self.begin, self.end = self.size - 2, self.size - 1
        files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        tensors = {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118  (not a dict)
        prefix = "tied.embedding.modality_embeddings.0."
        codes = next(
            name
            for name in tensors
            if name.startswith(prefix) and tensors[name].shape[0] == self.books * self.size
        )
        self.table = tensors[codes].to(dtype)  # [K * V, D]
        with torch.device("meta"):
            self.backbone = Qwen3Model(Qwen3Config(**config["text_config"])).eval()
            self.codec = HiggsAudioV2TokenizerModel(
                codec_config(audio.get("codec_config", PUBLISHED), self.books)
            ).eval()
        own = {
            name.removeprefix("body."): value.to(dtype)
            for name, value in tensors.items()
            if name.startswith("body.")
        }
        fill(self.backbone, own | {"embed_tokens.weight": tensors[TEXT].to(dtype)})
        codec = prefix + "model."
        fill(
            self.codec,
            {
                name.removeprefix(codec): value.float()
                for name, value in tensors.items()
                if name.startswith(codec)
            },
        )
        self.backbone.rotary_emb = type(self.backbone.rotary_emb)(config=self.backbone.config)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Embed rows of codes [..., K] as [..., D]."""
        return F.embedding(rows + torch.arange(self.books) * self.size, self.table).sum(-2)

    def prompt(
        self, text: str, rows: torch.Tensor | None = None, reference_text: str | None = None
    ) -> torch.Tensor:
        """Return the prompt [1, T, D]."""
        parts = [self.words("<|tts|>")]
        if rows is not None:
            parts += [self.words("<|ref_text|>" + reference_text)] if reference_text else []
            parts += [self.words("<|ref_audio|>"), self.read(rows)]
        return torch.cat([*parts, self.words("<|text|>" + text + "<|audio|>")])[None]

    def words(self, text: str) -> torch.Tensor:
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return F.embedding(ids, self.backbone.embed_tokens.weight)

    @torch.inference_mode()
    def speak(self, prompt: torch.Tensor, frames: int, greedy: bool) -> list[torch.Tensor]:
        """Speak prompts [B, T, D]. Return the samples [N] of each."""
        cache, x, end = DynamicCache(), prompt, frames
        rows: list[torch.Tensor] = []  # of [B, K]
        book = torch.arange(self.books)
        while len(rows) < min(frames, end) + self.books - 1:
            hidden = self.backbone(inputs_embeds=x, past_key_values=cache).last_hidden_state[:, -1]
            logits = F.linear(hidden, self.table).float().unflatten(-1, (self.books, self.size))  # [B, K, V]
            drawn = logits.argmax(-1) if greedy else draw(logits)
            if greedy and int(drawn[0, 0]) == self.end:
                end = min(end, len(rows))
            rows.append(torch.where(book > len(rows), self.begin, drawn))
            x = self.read(rows[-1])[:, None]
        tape = torch.stack(rows, 1)  # [B, R, K]
        codes = torch.stack([tape[:, k : len(rows) - self.books + 1 + k, k] for k in range(self.books)], -1)[
            :, :end
        ]
        codes = torch.where(codes >= self.begin, 0, codes)
        return (
            [self.codec.decode(one.T[None]).audio_values[0, 0] for one in codes]
            if codes.shape[1]
            else [torch.zeros(0)] * len(codes)
        )


def draw(logits: torch.Tensor, temperature: float = 0.8, top_k: int = 30, top_p: float = 0.8) -> torch.Tensor:
    best, index = (logits / temperature).topk(top_k, -1)
    mass = best.softmax(-1)
    mass = mass.masked_fill(mass.cumsum(-1) - mass > top_p, 0)
    return index.gather(-1, torch.multinomial(mass.flatten(0, 1), 1).view(*mass.shape[:-1], 1))[..., 0]


def codec_config(codec: dict, books: int) -> HiggsAudioV2TokenizerConfig:
    codec = copy.deepcopy(codec)
    bits = (codec["codebook_size"] - 1).bit_length()
    ratios = codec["acoustic_model_config"].setdefault("downsampling_ratios", [8, 5, 4, 2, 3])
    return HiggsAudioV2TokenizerConfig(
        target_bandwidths=[books * 25 * bits / 1000],
        sample_rate=24000,
        semantic_sample_rate=16000,
        downsample_factor=320,
        codebook_size=codec["codebook_size"],
        codebook_dim=codec["codebook_dim"],
        acoustic_model_config={
            "model_type": "dac",
            **codec["acoustic_model_config"],
            "upsampling_ratios": ratios,
            "hop_length": 960,
        },
        semantic_model_config={
            "model_type": "hubert",
            "mask_time_prob": 0.0,
            **codec["semantic_model_config"],
        },
    )


def fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    missing, unexpected = module.load_state_dict(tensors, strict=False, assign=True)
    assert not missing and all("masked_spec_embed" in name for name in unexpected), (missing, unexpected)


def prompt_of(model: Model, request: dict[str, Any]) -> torch.Tensor:
    """Return the request's prompt [1, T, D]."""
    if not request["references"]:
        return model.prompt(request["text"])
    [reference] = request["references"]
    transcript = None if request["options"].get("x_vector_only_mode") else reference["transcript"]
    return model.prompt(request["text"], reference_rows(model, reference["clip"]), transcript)


@torch.inference_mode()
def reference_rows(model: Model, path: str) -> torch.Tensor:
    """Return the codes of a clip as rows [F + K - 1, K]: each codebook starts one row after the previous
    one."""
    clip = np.load(path)
    rate_hz = int(clip["rate_hz"])
    assert rate_hz == RATE_HZ, f"the clip has {rate_hz} Hz; the plain loop needs {RATE_HZ} Hz"
    codes = model.codec.encode(torch.from_numpy(clip["samples"])[None, None]).audio_codes[0].T  # [F, K]
    rows = torch.full((len(codes) + model.books - 1, model.books), model.end)
    for k in range(model.books):
        rows[:k, k], rows[k : k + len(codes), k] = model.begin, codes[:, k]
    return rows


def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    prompt = prompt_of(model, request).repeat(streams, 1, 1)
    model.speak(prompt, 4, greedy=False)
    began_s, samples = time.perf_counter(), 0
    for _ in range(rounds):
        samples += sum(map(len, model.speak(prompt, request["max_frames"], greedy=False)))
    return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def speak(model: Model, request: dict[str, Any]) -> np.ndarray:
    """Return the samples [N] of a greedy request."""
    return model.speak(prompt_of(model, request), request["max_frames"], greedy=True)[0].numpy()


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    print(json.dumps(answer(order, NAME, partial(speak, model), partial(measure, model))))


if __name__ == "__main__":
    main()
