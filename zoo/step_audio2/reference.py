"""Run the reference implementation of Step-Audio 2, for `zoo bench --against reference` and `zoo parity`.

serving/tools/reference.py starts this file as a script, in a separate environment that tests/parity/environments.sh
builds. The language model is transformers' Qwen2ForCausalLM, with its tokenizer. Flow and vocoder are the files of
Step-Audio 2 in stepaudio2-minicpmo. The loop around them, with its cuts of the past, is that of
stepfun-ai/Step-Audio2 at 7c58630; the encoder's past is cut as in minicpmo-utils 1.0.7. No package has the
audio encoder: it is written here, as in the published modeling_step_audio_2.py.

A recording is encoded as a voice by this project: both of its networks are CosyVoice 2's, whose parity has its own tests.
Answers run one after the other, as in the original.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import librosa
import numpy as np
import torch
import torchaudio
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from zoo.checkpoint.tensor_files import contents, open_file
from zoo.nn.s3.sizes import NUM_UP_LAYERS
from zoo.nn.sampling import normal
from zoo.reference_script import answer, speed
from zoo.request import AudioClip
from zoo.step_audio2 import voices
from zoo.step_audio2.config import FOLDER, TOKENIZER_FILE, Config
from zoo.step_audio2.flow import fixed_noise
from zoo.step_audio2.model import NOISE_STEP
from zoo.step_audio2.prompt import PLAIN, ROLES, TRANSCRIBE
from zoo.voices.recordings import read_clip

NAME = "stepaudio2-minicpmo 0.1.1"
SITE = Path(torchaudio.__file__).parents[1] / "stepaudio2"
RATE_HZ, SEED, STEPS, MEL_SAMPLES = 24_000, 0, 10, 480
PENALTY = 1.05


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


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the model's shards, in fp32."""
    files = {header.path for header in contents(directory).values()}
    return {name: file.read(name).float() for file in map(open_file, sorted(files)) for name in file.headers}


# --- the language model ---


class Lm:
    def __init__(self, directory: Path, config: Config, tensors: dict[str, Tensor]):
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
        own = {name: v for name, v in tensors.items() if not name.startswith(("encoder.", "adapter."))}
        self.model.load_state_dict(own)
        self.tokenizer = Qwen2Tokenizer.from_pretrained(directory)
        self.first_code, self.num_codes = self.id("<audio_0>"), config.flow.num_codes
        self.num_tokens = self.id("<audio_6561>") + 1

    def id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)

    def ids(self, pieces: list[str | list[int]]) -> list[int]:
        """Return the ids of pieces: texts, which are tokenized separately, and lists of ids."""
        found: list[int] = []
        for piece in pieces:
            found += self.tokenizer(piece)["input_ids"] if isinstance(piece, str) else piece
        return found

    def answer(
        self,
        ids: list[int],
        heard: list[Tensor],
        max_tokens: int,
        penalty: float = PENALTY,
        max_codes: int = sys.maxsize,
    ) -> list[int]:
        """Return the greedy tokens of an answer, without the one that ends it. heard: the rows behind each
        <audio_start>."""
        rows = self.model.model.embed_tokens(torch.tensor(ids)).clone()
        starts = [at for at, token in enumerate(ids) if token == self.id("<audio_start>")]
        for at, given in zip(starts, heard, strict=True):
            rows[at + 1 : at + 1 + len(given)] = given
        said: list[int] = []
        past, end, num_spoken = DynamicCache(), self.id("<|EOT|>"), 0
        while len(said) < max_tokens and num_spoken < max_codes:
            logits = self.model(inputs_embeds=rows[None], past_key_values=past, use_cache=True).logits[0, -1]
            seen = torch.tensor(sorted({*ids, *said}))
            scores = logits[seen]
            logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
            token = int(logits[: self.num_tokens].argmax())
            if token == end:
                break
            said.append(token)
            num_spoken += 0 <= token - self.first_code < self.num_codes
            rows = self.model.model.embed_tokens(torch.tensor([token]))
        return said


def piece_of(rows: Tensor) -> str:
    return f"<audio_start>{'<audio_patch>' * len(rows)}<audio_end>"


# --- the audio encoder ---


class Listener:
    def __init__(self, config: Config, tensors: dict[str, Tensor]):
        self.config, self.tensors = config.listener, tensors
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
    if c.layers < NUM_UP_LAYERS:  # it makes a cache for each of these, and reads one for each upper layer
        sys.exit(
            f"its flow needs an encoder of {NUM_UP_LAYERS} layers or more, and this one has {c.layers}; "
            "`zoo demo-checkpoint step_audio2 DIR --size parity` writes a small one"
        )
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
    """The reference's stream of one answer after the other in a voice, with the noise of each frame's own place."""

    def __init__(self, flow: CausalMaskedDiffWithXvec, codes: Tensor, mel: Tensor, speaker: Tensor):
        self.flow, self.speaker, self.num_prompt, self.num_frames = flow, speaker[None], len(mel), len(mel)
        self._noise(0)
        ahead = torch.cat((codes, codes[:3]))[None]
        self.prompt = self.past = self._kept(flow.setup_cache(ahead, mel[None], self.speaker, STEPS))

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
        self.past, self.num_frames = self._kept(self.prompt), self.num_prompt
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


# --- whole answers ---


class Model:
    """A directory, loaded by the reference's classes."""

    def __init__(self, directory: Path):
        self.config = Config.read(directory)
        tensors = tensors_of(directory)
        self.lm, self.listener = Lm(directory, self.config, tensors), Listener(self.config, tensors)
        self.flow, self.vocoder = make_flow(directory, self.config), make_vocoder(directory, self.config)
        self.cloner, self.voices = make_cloner(directory), voices.find(directory)
        self.first_hidden = self.lm.id("<audio_start>")

    def prompt(self, request: dict[str, Any]) -> tuple[list[int], list[Tensor]]:
        """Return the ids of a request, and the rows of its clips."""
        turns = [*request["turns"]]
        if request["output"] == "transcript":
            turns.insert(0, {"role": "system", "text": TRANSCRIBE, "clip": None})
        if request["text"]:
            turns.append({"role": "user", "text": request["text"], "clip": None})
        is_plain = request["options"].get("template") == PLAIN
        heard: list[Tensor] = []
        pieces: list[str | list[int]] = []
        for turn in turns:
            head, end = (
                ("", "") if is_plain else (f"<|BOT|>{ROLES.get(turn['role'], turn['role'])}\n", "<|EOT|>")
            )
            if turn["clip"] is None:
                pieces.append(f"{head}{turn['text'] or ''}{end}")
                continue
            clip = np.load(turn["clip"])
            rows = self.listener(torch.from_numpy(np.atleast_2d(clip["samples"])[0]), int(clip["rate_hz"]))
            heard += rows
            said = [head, *map(piece_of, rows)]
            pieces += [turn["text"] or "", *said[1:]] if is_plain else [*said, turn["text"] or "", end]
        opening = "" if is_plain else "<|BOT|>assistant\n"
        if request["options"].get("thinks"):
            opening += "\n<think>\n"
        elif request["output"] == "speech":
            opening += "<tts_start>"
        return self.lm.ids([*pieces, opening]), heard

    def voice(self, request: dict[str, Any]) -> voices.Voice:
        """Return the voice of a request."""
        if request["references"]:
            found = np.load(request["references"][0]["clip"])
            return self.cloner(AudioClip(found["samples"], int(found["rate_hz"])))[1]
        name = (request["voice"] or next(iter(self.voices))).lower()
        return self.cloner(read_clip(self.voices[name]))[1]

    def codes_of(self, tokens: list[int]) -> list[int]:
        codes = (token - self.lm.first_code for token in tokens)
        return [code for code in codes if 0 <= code < self.lm.num_codes]

    def text_of(self, tokens: list[int]) -> str:
        """Return the text among the tokens; special tokens are their names."""
        return self.lm.tokenizer.decode([token for token in tokens if token < self.first_hidden])

    def stream(self, request: dict[str, Any]) -> Stream:
        """Return a stream in the voice of a request."""
        voice = self.voice(request)
        return Stream(self.flow, voice.codes, voice.mel, voice.speaker)

    def samples(self, codes: list[int], stream: Stream) -> np.ndarray:
        """Return the samples [N] of codes."""
        mel = stream.all(torch.tensor(codes))
        return samples_of(self.vocoder, mel, SEED).numpy()


def make_cloner(directory: Path) -> voices.Cloner:
    """Return this project's encoder of voices."""
    from zoo.checkpoint import loading
    from zoo.nn.s3 import files
    from zoo.nn.s3.campplus import CamPlus
    from zoo.nn.s3.names import campplus
    from zoo.nn.s3.tokenizer import S3Tokenizer

    folder, device = directory / FOLDER, torch.device("cpu")
    file, config = files.open_tokenizer(folder / TOKENIZER_FILE)
    with torch.device("meta"):
        tokenizer, speaker = S3Tokenizer(config), CamPlus()
    loading.load_file(tokenizer, files.s3_tokenizer(config), file, device, torch.float32)
    loading.load_file(speaker, campplus(), files.open_speaker(folder), device, torch.float32)
    return voices.Cloner(tokenizer.eval(), speaker.eval(), device)


@torch.inference_mode()
def speak(model: Model, request: dict[str, Any]) -> tuple[np.ndarray, str] | str:
    """Answer a request greedily. Return its samples [N] and its text, or its text alone if it has no audio."""
    ids, heard = model.prompt(request)
    tokens = model.lm.answer(ids, heard, request["options"]["max_tokens"])
    thinks = bool(request["options"].get("thinks")) and request["output"] == "speech"
    assert not thinks or "</think>" not in model.text_of(tokens), (
        "the plain loop does not go on behind a thought"
    )
    text = "" if thinks else model.text_of(tokens)
    codes = model.codes_of(tokens) if request["output"] == "speech" else []
    return (model.samples(codes, model.stream(request)), text) if codes else text


@torch.inference_mode()
def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Time the reference on a greedy request. The voice is encoded before the clock starts."""
    (ids, heard), stream = model.prompt(request), model.stream(request)
    max_tokens = request["options"]["max_tokens"]

    def spoken(frames: int) -> int:
        codes = model.codes_of(model.lm.answer(ids, heard, max_tokens, max_codes=frames))
        return len(model.samples(codes, stream)) if codes else 0

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
