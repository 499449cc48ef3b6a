"""Run the reference implementation of GLM-4-Voice, for `zoo bench --against reference` and `zoo parity`.

serving/tools/reference.py starts this file as a script, in a separate environment that tests/parity/environments.sh
builds. No package has the reference. Its language model is transformers' GlmForCausalLM, and its speech tokenizer has
transformers' Whisper layers. Flow and vocoder have the classes of cosyvoice-minicpmo. Their forward passes are changed
as the original changed them: one mask, one norm's eps, and nearest interpolation.

The flow renders cells as zoo/glm4_voice/model.py says, not the growing chunks of the original. Texts are tokenized by
this project. Answers run one after the other, as in the original.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import math
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torchaudio
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GlmConfig, GlmForCausalLM, WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from zoo.checkpoint.tensor_files import contents, open_file
from zoo.glm4_voice.config import DECODER, TOKENIZER, Config, find
from zoo.glm4_voice.model import LEAST_PAST, NOISE_STEP, PHASE_STEP
from zoo.glm4_voice.prompt import OPENING, SPOKEN, WRITTEN
from zoo.glm4_voice.strategy import CELL, LOOKAHEAD
from zoo.glm4_voice.vocabulary import ASSISTANT, AUDIO_BEGIN, AUDIO_END, BEGIN, SYSTEM, USER, Vocabulary
from zoo.nn.s3.sizes import GRID
from zoo.nn.sampling import normal, uniform_noise
from zoo.reference_script import answer, speed

NAME = "transformers 5.23"
SITE = Path(torchaudio.__file__).parents[1]
RATE_HZ, MEL_SAMPLES, STEPS, SEED = 22_050, 256, 10, 0


def stub(name: str, path: Path | None = None, **values: Any) -> None:
    """Register an empty package, so that its own __init__, which imports training code, is not run."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(values)
    sys.modules[name] = module


for package in (
    *("cosyvoice", "cosyvoice.utils", "cosyvoice.flow", "cosyvoice.hifigan", "cosyvoice.transformer"),
    *("matcha", "matcha.utils", "matcha.models", "matcha.models.components", "matcha.hifigan"),
):
    stub(package, SITE / package.replace(".", "/"))
stub("matcha.utils.pylogger", get_pylogger=logging.getLogger)

from cosyvoice.flow.decoder import ConditionalDecoder  # noqa: E402
from cosyvoice.flow.length_regulator import InterpolateRegulator  # noqa: E402
from cosyvoice.hifigan.f0_predictor import ConvRNNF0Predictor  # noqa: E402
from cosyvoice.hifigan.generator import HiFTGenerator  # noqa: E402
from cosyvoice.transformer.encoder import ConformerEncoder  # noqa: E402


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a model's shards."""
    files = {header.path for header in contents(directory).values()}
    return {name: file.read(name) for file in map(open_file, sorted(files)) for name in file.headers}


# --- the language model ---


def make_lm(directory: Path, config: Config) -> GlmForCausalLM:
    stack = config.lm.stack
    values: dict[str, Any] = {
        "hidden_size": stack.hidden,
        "intermediate_size": stack.inner,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "num_key_value_heads": stack.kv_heads,
        "head_dim": stack.head_dim,
        "vocab_size": config.lm.vocab,
        "rms_norm_eps": stack.eps,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    model = GlmForCausalLM(GlmConfig(**values))
    found = tensors_of(directory)
    sizes = [heads * stack.head_dim for heads in (stack.heads, stack.kv_heads, stack.kv_heads)]
    tensors = {
        "model.embed_tokens.weight": found["transformer.embedding.word_embeddings.weight"],
        "model.norm.weight": found["transformer.encoder.final_layernorm.weight"],
        "lm_head.weight": found["transformer.output_layer.weight"],
    }
    for i in range(stack.layers):
        theirs, ours = f"transformer.encoder.layers.{i}", f"model.layers.{i}"
        for kind in ("weight", "bias"):
            fused = found[f"{theirs}.self_attention.query_key_value.{kind}"].split(sizes)
            tensors |= {
                f"{ours}.self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", fused, strict=True)
            }
        tensors |= {
            f"{ours}.self_attn.o_proj.weight": found[f"{theirs}.self_attention.dense.weight"],
            f"{ours}.mlp.gate_up_proj.weight": found[f"{theirs}.mlp.dense_h_to_4h.weight"],
            f"{ours}.mlp.down_proj.weight": found[f"{theirs}.mlp.dense_4h_to_h.weight"],
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{ours}.{norm}.weight"] = found[f"{theirs}.{norm}.weight"]
    model.load_state_dict({name: value.float() for name, value in tensors.items()})
    return model.eval()


# --- the speech tokenizer ---


class Listener(nn.Module):
    def __init__(self, directory: Path, config: Config):
        super().__init__()
        c = config.listener
        self.block, self.tensors = c.block, tensors_of(find(directory, TOKENIZER))
        whisper = WhisperConfig(
            d_model=c.width, encoder_attention_heads=c.heads, encoder_ffn_dim=c.inner, num_mel_bins=c.mels
        )
        whisper._attn_implementation = "eager"
        self.layers = nn.ModuleList(WhisperEncoderLayer(whisper) for _ in range(c.layers))
        layers = {name: value for name, value in self.tensors.items() if name.startswith("layers.")}
        self.load_state_dict(layers)
        self.features = WhisperFeatureExtractor(feature_size=c.mels)

    def forward(self, samples: Tensor) -> Tensor:
        """samples [N] at 16 kHz -> codes [F]"""
        pieces = [piece.numpy() for piece in samples.split(30 * 16_000)]
        how: dict[str, Any] = {
            "sampling_rate": 16_000,
            "return_attention_mask": True,
            "return_tensors": "pt",
            "device": "cpu",
        }
        made = self.features(pieces, padding="longest", pad_to_multiple_of=1280, **how)
        codes = []
        for mel, mask in zip(made.input_features, made.attention_mask, strict=True):
            found, token_mask = self._piece(mel, mask.bool()[::2]), mask.bool()[::8]
            codes.append(found[token_mask])
        return torch.cat(codes)

    def _piece(self, mel: Tensor, is_there: Tensor) -> Tensor:
        t = self.tensors
        x = F.gelu(F.conv1d(F.pad(mel, (2, 0))[None], t["conv1.weight"], t["conv1.bias"]))
        x = F.gelu(F.conv1d(F.pad(x, (2, 0)), t["conv2.weight"], t["conv2.bias"], stride=2)).mT
        num = x.shape[1]
        x = x + t["embed_positions.weight"][:num]
        at = torch.arange(num)
        sees = (at <= at[:, None]) | (at // self.block == at[:, None] // self.block)
        mask = torch.zeros(num, num).masked_fill(~(sees & is_there), torch.finfo(torch.float32).min)
        for layer in self.layers:
            made = layer(x, mask[None, None])
            x = made[0] if isinstance(made, tuple) else made
        x = F.avg_pool1d(x.mT, 4)[0].mT
        rows = t["codebook.weight"]
        return (rows.square().sum(1) + x.square().sum(1, keepdim=True) - 2 * x @ rows.T).argmin(1)


# --- flow and vocoder ---


class Flow:
    def __init__(self, directory: Path, config: Config):
        c = config.flow
        self.guidance, self.block = c.guidance, c.block
        tensors = torch.load(find(directory, DECODER) / "flow.pt", weights_only=True)
        self.codes, self.speaker = tensors["input_embedding.weight"], tensors["spk_embed_affine_layer.bias"]
        self.encoder = ConformerEncoder(
            output_size=c.width, attention_heads=c.heads, linear_units=c.inner, num_blocks=c.layers,
            normalize_before=True, input_layer="linear", pos_enc_layer_type="rel_pos_espnet",
            selfattention_layer_type="rel_selfattn", input_size=c.width, use_cnn_module=False, macaron_style=False,
        ).eval()  # fmt: skip
        for module in self.encoder.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-5
        self.project = nn.Linear(c.width, 80)
        self.regulator = InterpolateRegulator(80, (1, 1, 1, 1)).eval()
        self.estimator = ConditionalDecoder(
            320,
            80,
            (c.channels, c.channels),
            0.0,
            c.head_dim,
            c.num_blocks,
            c.num_mid,
            c.estimator_heads,
            "gelu",
        ).eval()
        parts = {
            "encoder.": self.encoder,
            "encoder_proj.": self.project,
            "length_regulator.": self.regulator,
            "decoder.estimator.": self.estimator,
        }
        for prefix, module in parts.items():
            own = {
                name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
            }
            module.load_state_dict(own)

    def __call__(self, codes: Tensor, prompt: Tensor) -> Tensor:
        """codes [N], prompt [P, 80]: the mel of the first frames -> mel [T, 80]"""
        num = int(len(codes) / 12.5 * RATE_HZ / MEL_SAMPLES)
        mu = self.project(self._encoded(self.codes[codes][None])).mT
        mu = self.regulator.model(F.interpolate(mu, size=num, mode="nearest"))
        given = torch.zeros(1, 80, num)
        given[..., : len(prompt)] = prompt.T
        generator = torch.Generator().manual_seed(42)
        x = torch.randn(1, 80, num, generator=generator)
        times = 1 - torch.cos(torch.linspace(0, 1, STEPS + 1) * 0.5 * math.pi)
        mask, speaker = torch.ones(1, 1, num), self.speaker[None]
        for t, stride in zip(times[:-1], times.diff(), strict=True):
            velocity = self.estimator(x, mask, mu, t[None], speaker, given)
            zeros = torch.zeros_like(mu)
            null = self.estimator(x, mask, zeros, t[None], torch.zeros_like(speaker), zeros)
            x = x + stride * ((1 + self.guidance) * velocity - self.guidance * null)
        return x[0].T

    def _encoded(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        sees = (at <= at[:, None]) | (at // self.block == at[:, None] // self.block)
        x, position, _ = self.encoder.embed(x, torch.ones(1, 1, x.shape[1], dtype=torch.bool))
        for layer in self.encoder.encoders:
            x = layer(x, sees[None], position)[0]
        return self.encoder.after_norm(x)

    def cells(self, codes: Tensor) -> Tensor:
        """Return the mel [T, 80] of an answer, cell by cell as zoo/glm4_voice/model.py says."""
        mel = torch.zeros(0, 80)
        for start in (0, *range(GRID, len(codes), CELL)):
            first = max(start - LEAST_PAST, 0) // 64 * 64
            stop = min(start + (CELL if start else GRID), len(codes))
            made = self(codes[first : min(stop + LOOKAHEAD, len(codes))], mel[441 * first // 64 :])
            at, end = (441 * n // 64 - 441 * first // 64 for n in (start, stop))
            mel = torch.cat((mel, made[at:end]))
        return mel


def make_vocoder(directory: Path, config: Config) -> HiFTGenerator:
    c = config.vocoder
    vocoder = HiFTGenerator(
        base_channels=c.channels,
        sampling_rate=RATE_HZ,
        f0_predictor=ConvRNNF0Predictor(num_class=1, in_channels=80, cond_channels=c.f0_channels),
    )
    tensors = torch.load(find(directory, DECODER) / "hift.pt", weights_only=True)
    newer = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    for older, name in newer.items():
        tensors = {key.replace(older, name): value for key, value in tensors.items()}
    vocoder.load_state_dict(tensors)
    return vocoder.eval()


def samples_of(vocoder: HiFTGenerator, mel: Tensor, seed: int) -> Tensor:
    """mel [T, 80] -> samples [N], with the draws of our own generator."""
    harmonics = vocoder.nb_harmonics + 1
    seeds, frames = torch.full((len(mel),), seed), NOISE_STEP + torch.arange(len(mel))
    noise = normal(seeds, frames, MEL_SAMPLES * harmonics).view(-1, harmonics)  # [N, H]
    phase = uniform_noise(torch.tensor([seed]), torch.tensor([PHASE_STEP]), range(1), harmonics)[0, 0]

    def draw_phases(self: object, sample_shape: tuple[int, ...]) -> Tensor:
        return (2 * np.pi * phase)[None, :, None]

    def draw_noise(like: Tensor) -> Tensor:
        return (
            noise.T[None]
            if like.shape[1] == harmonics
            else noise[None]
            if like.shape[-1] == harmonics
            else like
        )

    with (
        patch("cosyvoice.hifigan.generator.Uniform.sample", draw_phases),
        patch("cosyvoice.hifigan.generator.torch.randn_like", draw_noise),
    ):
        return vocoder.inference(speech_feat=mel.T[None])[0][0]


# --- whole answers ---


class Model:
    """A directory with its tokenizer and decoder, loaded by the reference's classes."""

    def __init__(self, directory: Path):
        self.config = config = Config.read(directory)
        self.vocabulary = Vocabulary(directory, config.lm.vocab, config.flow.codes)
        self.lm, self.listener = make_lm(directory, config), Listener(directory, config)
        self.flow, self.vocoder = Flow(directory, config), make_vocoder(directory, config)
        self.first_code = self.vocabulary.first_code
        self.num_tokens = self.first_code + config.flow.codes

    def heard(self, path: str) -> list[int]:
        """Return the ids of a clip."""
        clip, special = np.load(path), self.vocabulary.special
        samples, rate_hz = torch.from_numpy(np.atleast_2d(clip["samples"])[0]), int(clip["rate_hz"])
        if rate_hz != 16_000:
            samples = torchaudio.transforms.Resample(rate_hz, 16_000)(samples)
        codes = self.listener(samples).tolist()
        return [special[AUDIO_BEGIN], *(self.first_code + code for code in codes), special[AUDIO_END]]

    def prompt(self, request: dict[str, Any]) -> list[int]:
        """Return the ids of a request."""
        special, text_ids = self.vocabulary.special, self.vocabulary
        turns = [*request["turns"]]
        if request["text"]:
            turns.append({"role": "user", "text": request["text"], "clip": None})
        line = WRITTEN if turns[0]["clip"] is None else SPOKEN
        ids = [*(special[token] for token in BEGIN), special[SYSTEM], *text_ids("\n"), *text_ids(line)]
        for turn in turns:
            if turn["role"] == "assistant":
                ids += text_ids(turn["text"])
                continue
            said = text_ids(turn["text"]) if turn["clip"] is None else self.heard(turn["clip"])
            ids += [special[USER], *text_ids("\n"), *said, special[ASSISTANT], *text_ids(OPENING)]
        return ids

    def answer(self, ids: list[int], max_tokens: int, max_codes: int = sys.maxsize) -> list[int]:
        """Return the greedy tokens of an answer, without the one that ends it."""
        said: list[int] = []
        past, given = DynamicCache(), ids
        while len(said) < max_tokens and len(self.codes_of(said)) < max_codes:
            logits = self.lm(torch.tensor([given]), past_key_values=past, use_cache=True).logits[0, -1]
            token = int(logits[: self.num_tokens].argmax())
            if token in self.config.lm.stops:
                break
            said.append(token)
            given = [token]
        return said

    def codes_of(self, tokens: list[int]) -> list[int]:
        return [token - self.first_code for token in tokens if token >= self.first_code]

    def text_of(self, tokens: list[int]) -> str:
        """Return the text among the tokens; special tokens are their names."""
        words = (self.vocabulary.bytes_of(token) for token in tokens if token < self.first_code)
        return b"".join(words).decode(errors="replace")

    def samples(self, codes: list[int]) -> np.ndarray:
        """Return the samples [N] of codes."""
        return samples_of(self.vocoder, self.flow.cells(torch.tensor(codes)), SEED).numpy()


@torch.inference_mode()
def speak(model: Model, request: dict[str, Any]) -> tuple[np.ndarray, str] | str:
    """Answer a request greedily. Return its samples [N] and its text, or its text alone if it has no audio."""
    tokens = model.answer(model.prompt(request), request["options"]["max_tokens"])
    codes, text = model.codes_of(tokens), model.text_of(tokens)
    return (model.samples(codes), text) if codes else text


@torch.inference_mode()
def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Time the reference on a greedy request."""
    ids, max_tokens = model.prompt(request), request["options"]["max_tokens"]

    def spoken(frames: int) -> int:
        codes = model.codes_of(model.answer(ids, max_tokens, frames))
        return len(model.samples(codes)) if codes else 0

    spoken(4)
    began_s = time.perf_counter()
    samples = sum(spoken(request["max_frames"]) for _ in range(rounds * streams))
    return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]))
    print(json.dumps(answer(order, NAME, partial(speak, model), partial(measure, model))))


if __name__ == "__main__":
    main()
