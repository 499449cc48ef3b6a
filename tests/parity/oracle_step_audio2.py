"""Make the Step-Audio 2 fixtures; see README.md in this folder.

The reference's LM is transformers' Qwen2ForCausalLM, with its tokenizer. Flow and vocoder are the files of Step-Audio 2 in
stepaudio2-minicpmo. The loop around them, with its cuts of the past, is that of stepfun-ai/Step-Audio2 at 7c58630; the
encoder's past is cut as in minicpmo-utils 1.0.7. The audio encoder is no package: it is written here, as in the
published modeling_step_audio_2.py. All requests are greedy.

It runs in the reference environment that environments.sh builds:
    PYTHONPATH=. .venv-parity-step_audio2/bin/python tests/parity/oracle_step_audio2.py
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import librosa
import numpy as np
import torch
import torchaudio
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2TokenizerFast

from zoo.nn.sampling import normal
from zoo.step_audio2 import demo
from zoo.step_audio2.config import FOLDER, Config
from zoo.step_audio2.flow import fixed_noise
from zoo.step_audio2.model import NOISE_STEP
from zoo.step_audio2.prompt import CHAT, PLAIN

HERE = Path(__file__).parent
FIXTURES = HERE / "step_audio2"
SITE = Path(torchaudio.__file__).parents[1] / "stepaudio2"
SEED, STEPS, STRIDE, MEL_SAMPLES = 0, 10, 7, 480
# odd and even numbers of mel frames, another rate, and two pieces
CLIPS = {
    "short": (16_000, 40_961),
    "even": (16_000, 31_841),
    "other_rate": (24_000, 30_000),
    "pieces": (16_000, 25 * 16_000 + 2_560),
}
TEXT = "Tell me about the river, 12345 times."
MAX_TOKENS = 90
PENALTY = 1.05
NUM_CODES = (3, 25, 28, 51, 53, 150)  # of the streamed answers; 51 codes end with a cell of 26


def stub(name: str, path: Path | None = None) -> None:
    """Register an empty package, so that its own __init__, which imports a client, is not run."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if path is not None:
        module.__path__ = [str(path)]
    sys.modules[name] = module


stub("onnxruntime")
stub("stepaudio2", SITE)
stub("stepaudio2.flashcosyvoice", SITE / "flashcosyvoice")

from stepaudio2.cosyvoice2.flow.decoder_dit import DiT  # noqa: E402
from stepaudio2.cosyvoice2.flow.flow import CausalMaskedDiffWithXvec  # noqa: E402
from stepaudio2.cosyvoice2.flow.flow_matching import CausalConditionalCFM  # noqa: E402
from stepaudio2.cosyvoice2.transformer.upsample_encoder_v2 import UpsampleConformerEncoderV2  # noqa: E402
from stepaudio2.flashcosyvoice.modules.hifigan import ConvRNNF0Predictor, HiFTGenerator  # noqa: E402
from stepaudio2.flashcosyvoice.utils.audio import mel_spectrogram  # noqa: E402

# --- the language model ---


class Lm:
    def __init__(self, directory: Path, config: Config):
        stack = config.lm.stack
        self.model = Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=stack.hidden,
                intermediate_size=stack.inner,
                num_hidden_layers=stack.layers,
                num_attention_heads=stack.heads,
                num_key_value_heads=stack.kv_heads,
                vocab_size=config.lm.vocab,
                rms_norm_eps=stack.eps,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": stack.rope_theta},
            )
        ).eval()
        found = load_file(directory / "model.safetensors")
        own = {n: v.float() for n, v in found.items() if not n.startswith(("encoder.", "adapter."))}
        self.model.load_state_dict(own)
        self.tokenizer = Qwen2TokenizerFast.from_pretrained(directory)
        self.num_tokens = self.id("<audio_6561>") + 1

    def id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)

    def ids(self, pieces: list[str | list[int]]) -> list[int]:
        """Return the ids of pieces: texts, each tokenized by itself, and ids."""
        found: list[int] = []
        for piece in pieces:
            found += self.tokenizer(piece)["input_ids"] if isinstance(piece, str) else piece
        return found

    def answer(self, ids: list[int], heard: list[Tensor]) -> list[int]:
        """Return the greedy tokens of an answer, without the one that ends it. heard: the rows behind each
        <audio_start>."""
        embedded = self.model.model.embed_tokens(torch.tensor(ids)).clone()
        starts = [at for at, token in enumerate(ids) if token == self.id("<audio_start>")]
        for at, rows in zip(starts, heard, strict=True):
            embedded[at + 1 : at + 1 + len(rows)] = rows
        said: list[int] = []
        while len(said) < MAX_TOKENS:
            more = self.model.model.embed_tokens(torch.tensor(said, dtype=torch.int64))
            logits = self.model(inputs_embeds=torch.cat((embedded, more))[None]).logits[0, -1]
            seen = torch.tensor(sorted({*ids, *said}))
            scores = logits[seen]
            logits[seen] = torch.where(scores < 0, scores * PENALTY, scores / PENALTY)
            token = int(logits[: self.num_tokens].argmax())
            if token == self.id("<|EOT|>"):
                break
            said.append(token)
        return said


def piece_of(rows: Tensor) -> str:
    return f"<audio_start>{'<audio_patch>' * len(rows)}<audio_end>"


# --- the audio encoder ---


class Listener:
    def __init__(self, directory: Path, config: Config):
        self.config = config.listener
        self.tensors = {
            name: value.float() for name, value in load_file(directory / "model.safetensors").items()
        }
        filters = librosa.filters.mel(sr=16_000, n_fft=400, n_mels=self.config.mels)
        self.filters = torch.from_numpy(filters)

    def __call__(self, samples: Tensor, rate_hz: int) -> list[Tensor]:
        """samples [N] -> the rows of each piece"""
        if rate_hz != 16_000:
            samples = torchaudio.transforms.Resample(rate_hz, 16_000)(samples)
        return [self._piece(self._mel(piece)) for piece in samples.split(25 * 16_000)]

    def _mel(self, samples: Tensor) -> Tensor:
        bins = torch.stft(
            F.pad(samples, (0, 479)), 400, 160, window=torch.hann_window(400), return_complex=True
        )
        logs = (self.filters @ bins[..., :-1].abs() ** 2).clamp(min=1e-10).log10()
        return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _conv(self, x: Tensor, name: str, stride: int) -> Tensor:
        return F.gelu(F.conv1d(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], stride, 1))

    def _piece(self, mel: Tensor) -> Tensor:
        num_frames = mel.shape[1]
        is_there = torch.arange(num_frames) < num_frames - 2
        x = self._conv(self._conv(mel[None], "encoder.conv1", 1), "encoder.conv2", 2)[0].mT
        x = x + self.tensors["encoder.positional_embedding.weight"][: len(x)]
        mask = torch.where(is_there[(num_frames + 1) % 2 :: 2], 0.0, -1e10)
        for i in range(self.config.layers):
            x = x + self._attention(x, f"encoder.blocks.{i}", mask)
            y = F.gelu(self._linear(self._norm(x, f"encoder.blocks.{i}.mlp_ln"), f"encoder.blocks.{i}.mlp.0"))
            x = x + self._linear(y, f"encoder.blocks.{i}.mlp.2")
        x = self._norm(F.avg_pool1d(x.mT[None], 2, 2)[0].mT, "encoder.after_norm")
        num = (num_frames - 2 + 1) // 2 // 2
        y = F.conv1d(x.mT[None], self.tensors["adapter.conv.weight"], self.tensors["adapter.conv.bias"], 2, 1)
        y = F.relu(self._linear(F.gelu(y)[0].mT, "adapter.linear1"))
        return self._linear(y, "adapter.linear2")[: (num - 1) // 2 + 1]

    def _attention(self, x: Tensor, block: str, mask: Tensor) -> Tensor:
        y = self._norm(x, f"{block}.attn_ln")
        q, k, v = (
            self._linear(y, f"{block}.attn.{part}").unflatten(-1, (self.config.heads, -1)).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        scale = q.shape[-1] ** -0.25
        scores = (q * scale) @ (k * scale).mT + mask
        return self._linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{block}.attn.out")


# --- flow and vocoder ---


def make_flow(directory: Path, config: Config) -> CausalMaskedDiffWithXvec:
    c = config.flow
    encoder = UpsampleConformerEncoderV2(
        input_size=c.width,
        output_size=c.width,
        num_blocks=c.layers,
        attention_heads=c.heads,
        linear_units=c.inner,
    )
    estimator = DiT(320, 80, c.estimator_inner / c.hidden, c.depth, c.estimator_heads, c.head_dim, c.hidden)
    decoder = CausalConditionalCFM(estimator, c.guidance)
    flow = CausalMaskedDiffWithXvec(
        input_size=c.width, spk_embed_dim=c.speaker, vocab_size=c.num_codes, encoder=encoder, decoder=decoder
    )
    flow.load_state_dict(torch.load(directory / FOLDER / "flow.pt", weights_only=True))
    # sized for the published flow
    inner, room = c.head_dim * 2, 2000
    estimator.att_cache_buffer = torch.zeros(c.depth, 2, c.estimator_heads, room, inner)
    estimator.cnn_cache_buffer = torch.zeros(c.depth, 2, 2 * c.hidden, 2)
    decoder.att_cache_buffer = torch.zeros(STEPS, *estimator.att_cache_buffer.shape)
    decoder.cnn_cache_buffer = torch.zeros(STEPS, *estimator.cnn_cache_buffer.shape)
    return flow.eval()


class Stream:
    """The reference's stream of one answer, with the noise of each frame's own place."""

    def __init__(self, flow: CausalMaskedDiffWithXvec, codes: Tensor, mel: Tensor, speaker: Tensor):
        self.flow, self.speaker, self.num_prompt, self.num_frames = flow, speaker[None], len(mel), len(mel)
        self._noise(0)
        ahead = torch.cat((codes, codes[:3]))[None]
        self.past = self._kept(flow.setup_cache(ahead, mel[None], self.speaker, STEPS))

    def _noise(self, held: int) -> None:
        """Let the reference's buffer have the noise of the next frames behind the `held` ones that it counts."""
        noise = torch.zeros(1, 80, 30_000)
        own = fixed_noise().mT[:, self.num_frames - (0 if held else self.num_prompt) :]
        noise[0, :, held : held + own.shape[1]] = own[:, : 30_000 - held]
        self.flow.decoder.rand_noise = noise

    def _kept(self, past: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in past.items()}

    def chunk(self, codes: Tensor, is_last: bool) -> Tensor:
        """codes [N], with lookahead -> mel [T, 80]"""
        self._noise(self.past["estimator_att_cache"].shape[4])
        mel, past = self.flow.inference_chunk(codes[None], self.speaker, self.past, is_last, STEPS)
        self.past, limit = self._kept(past), self.num_prompt + 100
        self.num_frames += mel.shape[2]
        kept = self.past["estimator_att_cache"]
        if kept.shape[4] > limit:
            self.past["estimator_att_cache"] = torch.cat(
                (kept[..., : self.num_prompt, :], kept[..., -100:, :]), 4
            )
        kept = self.past["conformer_att_cache"]
        if kept.shape[3] > limit:
            depth, half = len(self.flow.encoder.encoders), kept.shape[3] // 2
            tokens, frames = kept[:depth, :, :, :half], kept[depth:]
            tokens = torch.cat((tokens[..., : self.num_prompt // 2, :], tokens[..., -50:, :]), 3)
            frames = torch.cat((frames[..., : self.num_prompt, :], frames[..., -100:, :]), 3)
            self.past["conformer_att_cache"] = torch.cat((tokens.repeat(1, 1, 1, 2, 1), frames))
        return mel[0].T

    def all(self, codes: Tensor) -> Tensor:
        """codes [N] of a whole answer -> mel [2 N, 80], as examples-vllm-stream.py cuts them"""
        parts = []
        while len(codes) >= 28:
            parts.append(self.chunk(codes[:28], False))
            codes = codes[25:]
        parts.append(self.chunk(codes, True))
        return torch.cat(parts)


def make_vocoder(directory: Path, config: Config) -> HiFTGenerator:
    c = config.vocoder
    f0 = ConvRNNF0Predictor(num_class=1, in_channels=80, cond_channels=c.f0_channels)
    vocoder = HiFTGenerator(base_channels=c.channels, f0_predictor=f0)
    tensors = torch.load(directory / FOLDER / "hift.pt", weights_only=True)
    newer = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    for older, name in newer.items():
        tensors = {key.replace(older, name): value for key, value in tensors.items()}
    vocoder.load_state_dict(tensors)
    return vocoder.eval()


def samples_of(vocoder: HiFTGenerator, mel: Tensor, seed: int) -> Tensor:
    """mel [T, 80] -> samples [N], with the draws of our own generator."""
    harmonics = vocoder.nb_harmonics + 1
    seeds, frames = torch.full((len(mel),), seed), NOISE_STEP + torch.arange(len(mel))
    noise = normal(seeds, frames, MEL_SAMPLES * harmonics).view(1, -1, harmonics)

    def draw(like: Tensor, *_: Any, **__: Any) -> Tensor:
        return noise.expand_as(like) if like.shape[-1] == harmonics else torch.zeros_like(like)

    with patch.object(torch, "randn_like", draw):
        return vocoder(mel.T[None])[0][0]


# --- fixtures ---


def clip(name: str) -> Tensor:
    """Return the samples [N] of a clip, which follow from its length."""
    rate_hz, num = CLIPS[name]
    t = torch.arange(num, dtype=torch.float64) / rate_hz
    hum = (2 * np.pi * (180 + 40 * torch.sin(3 * t)) * t).sin() * (0.3 + 0.2 * torch.sin(7 * t))
    return (hum * 32767).round().div(32768).float()


def codes_of(num: int) -> Tensor:
    return torch.arange(num) * 1237 % 6561


def voice(name: str, num_codes: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [P], mel [2 P, 80] and speaker of a voice, which follow from its number of codes."""
    at = torch.arange(2 * num_codes)[:, None] + torch.arange(80) / 7
    mel = (at / 5).sin() * 2 - 4
    return codes_of(num_codes) * 3 % 6561, mel, (torch.arange(width) * 0.7 + num_codes).cos()


VOICES = {"long": 83, "short": 31}  # codes; the short one has fewer than 100 frames


@torch.inference_mode()
def make_answers(directory: Path, config: Config) -> None:
    lm, listener = Lm(directory, config), Listener(directory, config)
    heard = {name: listener(clip(name), CLIPS[name][0]) for name in CLIPS}
    user, said = f"<|BOT|>human\n{TEXT}<|EOT|>", "<|BOT|>assistant\n<tts_start>"
    spoken = ["<|BOT|>human\n", *map(piece_of, heard["short"]), "<|EOT|>"]
    cases: dict[str, tuple[list[str | list[int]], list[str], dict[str, Any]]] = {
        "written": (["<|BOT|>system\nBe brief.<|EOT|>", user, said], [], {"system": "Be brief."}),
        "spoken": ([*spoken, said], ["short"], {"clip": "short"}),
        "text": (
            [*spoken[:-1], TEXT, "<|EOT|>", "<|BOT|>assistant\n"],
            ["short"],
            {"clip": "short", "output": "text"},
        ),
        "pieces": (
            ["<|BOT|>human\n", *map(piece_of, heard["pieces"]), "<|EOT|>", said],
            ["pieces"],
            {"clip": "pieces"},
        ),
        "thought": ([user, "<|BOT|>assistant\n\n<think>\n"], [], {"thinks": True}),
        "base": (
            [TEXT, *map(piece_of, heard["short"]), "<tts_start>"],
            ["short"],
            {"template": PLAIN, "clip": "short"},
        ),
    }
    facts: dict[str, Any] = {"seed": SEED, "text": TEXT, "answers": {}}
    for name, (pieces, clips, asked) in cases.items():
        ids = lm.ids(pieces)
        tokens = lm.answer(ids, [rows for each in clips for rows in heard[each]])
        facts["answers"][name] = {"request": {"template": CHAT} | asked, "ids": ids, "said": tokens}
    first = facts["answers"]["written"]
    pieces = [
        first["ids"][: -lm_length(lm, said)],
        "<|BOT|>assistant\n",
        "<tts_start>",
        first["said"],
        "<|EOT|>",
    ]
    ids = lm.ids([*pieces, "<|BOT|>human\nAnd then?<|EOT|>", said])
    facts["answers"]["second"] = {"request": {"template": CHAT}, "ids": ids, "said": lm.answer(ids, [])}
    (FIXTURES / "answers.json").write_text(json.dumps(facts, ensure_ascii=False) + "\n")
    rows = {f"{name}.{i}": part for name, parts in heard.items() for i, part in enumerate(parts)}
    save_file(
        {name: part[:: 5 if len(part) > 60 else 1].contiguous() for name, part in rows.items()},
        FIXTURES / "heard.safetensors",
    )


def lm_length(lm: Lm, text: str) -> int:
    return len(lm.ids([text]))


@torch.inference_mode()
def make_speech(directory: Path, config: Config) -> None:
    flow, vocoder = make_flow(directory, config), make_vocoder(directory, config)
    found: dict[str, Tensor] = {}
    for name, num_prompt in VOICES.items():
        codes, mel, speaker = voice(name, num_prompt, config.flow.speaker)
        for num in NUM_CODES:
            made = Stream(flow, codes, mel, speaker).all(codes_of(num))
            found[f"{name}.{num}.mel"] = made[:: 5 if num > 60 else 1]
            if num in (25, 51):
                found[f"{name}.{num}.samples"] = samples_of(vocoder, made, SEED)[::STRIDE]
    rate_hz, num = CLIPS["other_rate"]
    found["mel"] = mel_spectrogram(clip("other_rate")[None])[0].T[::5]
    assert rate_hz == 24_000 and num
    save_file({name: value.contiguous() for name, value in found.items()}, FIXTURES / "speech.safetensors")


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    directory = demo.write(Path(tempfile.mkdtemp()) / "parity", "parity", SEED)
    config = Config.read(directory)
    make_answers(directory, config)
    make_speech(directory, config)


if __name__ == "__main__":
    assert issubclass(DiT, nn.Module)
    main()
