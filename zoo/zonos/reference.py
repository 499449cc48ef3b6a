"""Zonos by its own code, Zyphra/Zonos at bc40d98, as serving/tools/reference.py orders it: for `zoo bench
--against reference` and `zoo parity`. It runs as a script in a separate environment, which
tests/parity/environments.sh builds.

transformers' DacModel and the speaker encoder come from the checkpoint's directory, not from a download.
Japanese is read by Sudachi's core dictionary instead of the full one. The reference decodes the codes of a
continued recording together with those of the speech; here the recording is cut off, as `zoo` does. Its limit
garbles the last eight columns, so it makes more columns than are asked for, and the first ones are kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import espeakng_loader
import numpy as np
import sudachipy
import torch
from safetensors.torch import load_file
from transformers import DacConfig, DacModel

from zoo.reference_script import answer, speed
from zoo.zonos.clone import SILENT_FRAMES

_Dictionary = sudachipy.Dictionary
sudachipy.Dictionary = lambda dict: _Dictionary(dict="core")
os.environ.setdefault("PHONEMIZER_ESPEAK_LIBRARY", espeakng_loader.get_library_path())
os.environ.setdefault("ESPEAK_DATA_PATH", espeakng_loader.get_data_path())

import zonos.model  # noqa: E402
from zonos import conditioning, speaker_cloning  # noqa: E402
from zonos.backbone._torch import TorchZonosBackbone  # noqa: E402
from zonos.config import ZonosConfig  # noqa: E402

NAME = "Zyphra/Zonos bc40d98"
RATE_HZ, BOOKS, FRAME_SAMPLES = 44100, 9, 512
MORE = 20  # columns behind the last one that is needed
EMOTIONS = ("happiness", "sadness", "disgust", "fear", "surprise", "anger", "other", "neutral")
EMOTION = (0.3077, 0.0256, 0.0256, 0.0256, 0.0256, 0.0256, 0.2564, 0.3077)
NUMBERS = ("fmax", "pitch_std", "speaking_rate")
LEFT = ("emotion", *NUMBERS)  # conditions that a request may leave to the model
LANGUAGES = conditioning.supported_language_codes
SPEAKER = "Zonos-v0.1-speaker-embedding"
NETS = ("ResNet293_SimAM_ASP_base.pt", "ResNet293_SimAM_ASP_base_LDA-128.pt")


class CODEC(DacModel):
    """DAC from a directory."""

    @classmethod
    def from_config(cls, directory: Path) -> DacModel:
        return DacModel(DacConfig(**json.loads((directory / "config.json").read_text())))

    @classmethod
    def of(cls, directory: Path) -> DacModel:
        codec = cls.from_config(directory)
        codec.load_state_dict(load_file(directory / "model.safetensors"))
        return codec.eval()


class NoCodec:
    """Takes the place of the reference's codec, which would be downloaded."""

    num_codebooks = BOOKS


class tokens:
    """The reference's phonemes and their ids."""

    @staticmethod
    def phonemes(text: str, language: str) -> str:
        return conditioning.phonemize([text], [language])[0]

    @classmethod
    def ids(cls, text: str, language: str) -> list[int]:
        found, _ = conditioning.tokenize_phonemes([cls.phonemes(text, language)])
        return found[0].tolist()


@dataclass
class Prompt:
    prefix: torch.Tensor  # [2, T, D]: the conditional row, then the other
    codes: torch.Tensor | None  # [P, 9] of the recording that the speech continues


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype):
        self.model = self.empty(directory)
        tensors = load_file(directory / "model.safetensors")
        self.model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
        self.model.setup_cache = partial(self.model.setup_cache, dtype=dtype)
        self.codec = CODEC.of(directory / "dac_44khz")
        self.directory = directory
        self.seen: list[torch.Tensor] = []  # logits after guidance, [9, 1025] for each step
        self.is_endless = False
        self.compute = self.model._compute_logits
        self.model._compute_logits = self.logits

    @staticmethod
    def empty(directory: Path) -> zonos.model.Zonos:
        zonos.model.DACAutoencoder = NoCodec
        config = ZonosConfig.from_dict(json.loads((directory / "config.json").read_text()))
        return zonos.model.Zonos(config, TorchZonosBackbone).eval()

    @classmethod
    def published(cls, directory: Path) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the model's file."""
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in cls.empty(directory).state_dict().items()}

    def logits(self, *given: Any) -> torch.Tensor:
        found = self.compute(*given)
        if self.is_endless:
            found[..., 1024] = -torch.inf
        self.seen.append(found[0, :, :1025].clone())
        return found

    @torch.inference_mode()
    def prompt(self, request: dict[str, Any]) -> Prompt:
        options, text, codes, voice = request["options"], request["text"], None, None
        for reference in request["references"]:
            clip = np.load(reference["clip"])
            samples, hz = torch.from_numpy(clip["samples"]), int(clip["rate_hz"])
            voice = load_speaker(self.directory)(torch.atleast_2d(samples), hz)[0].bfloat16()[None, None]
            if reference["transcript"] and not options.get("x_vector_only_mode"):
                text = f"{reference['transcript'].strip()} {text}"
                codes = self.encode(wide(samples, hz))
        if options.get("silence_first") and codes is None:
            codes = self.encode(torch.zeros(SILENT_FRAMES * FRAME_SAMPLES))
        language = request.get("language") or "auto"
        emotion = [
            options.get(f"emotion_{name}", value) for name, value in zip(EMOTIONS, EMOTION, strict=True)
        ]
        values = {name: options[name] for name in NUMBERS if name in options}
        dtype = self.model.embeddings[0].weight.dtype
        made = conditioning.make_cond_dict(
            text=text,
            language=language if language in LANGUAGES else "en-us",
            speaker=None if voice is None else voice.to(dtype),
            emotion=emotion,
            device="cpu",
            unconditional_keys=[name for name in LEFT if options.get(f"unconditional_{name}")],
            **values,
        )
        return Prompt(self.model.prepare_conditioning(made), codes)

    @torch.inference_mode()
    def generate(
        self, prompt: Prompt, frames: int, scale: float, more: int = MORE, **how: float
    ) -> tuple[torch.Tensor, bool]:
        """Return codes [F, 9] and whether the model ended them. more: columns made behind the last frame."""
        before = None if prompt.codes is None else prompt.codes.T[None]
        codes = self.model.generate(
            prompt.prefix,
            before,
            frames + more,
            scale,
            1,
            how or {"temperature": 0.0},
            progress_bar=False,
            disable_torch_compile=True,
        )[0].T
        codes = codes[0 if before is None else before.shape[2] :]
        return codes[:frames], len(codes) < frames

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """codes [F, 9] behind those of a recording -> samples [512 F]"""
        whole = codes if before is None else torch.cat((before, codes))
        samples = self.codec.decode(audio_codes=whole.T[None]).audio_values.flatten()
        return samples[len(samples) - FRAME_SAMPLES * len(codes) :]

    @torch.inference_mode()
    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [N] at 44.1 kHz -> codes [P, 9]"""
        padded = torch.nn.functional.pad(samples, (0, -len(samples) % FRAME_SAMPLES))
        return self.codec.encode(padded[None, None]).audio_codes[0].T


def load_speaker(directory: Path | None) -> Any:
    """Return the reference's speaker encoder, filled from a directory, as samples [C, N] and a rate -> voices
    [1, 128]. The reference's class has one size; the files say which one is needed. None: the class's own,
    without values."""
    encoder = speaker_cloning.SpeakerEmbedding.__new__(speaker_cloning.SpeakerEmbedding)
    torch.nn.Module.__init__(encoder)
    encoder.device = "cpu"
    if directory is None:
        encoder.model = speaker_cloning.ResNet293_based()
        return encoder
    net, projection = (torch.load(directory / SPEAKER / name, weights_only=True) for name in NETS)
    planes, middle = len(net["front.conv1.weight"]), len(net["bottleneck.weight"])
    encoder.model = speaker_cloning.ResNet293_based(planes, middle)
    counts = [sum(f"front.layer{i}.{j}.conv1.weight" in net for j in range(1000)) for i in range(1, 5)]
    encoder.model.front = speaker_cloning.ResNet(planes, speaker_cloning.SimAMBasicBlock, counts)
    inside = len(net["pooling.attention.0.weight"])
    attention = encoder.model.pooling.attention
    attention[0] = torch.nn.Conv1d(attention[0].in_channels, inside, 1)
    attention[2] = torch.nn.BatchNorm1d(inside)
    attention[3] = torch.nn.Conv1d(inside, attention[3].out_channels, 1)
    encoder.model.load_state_dict(net)
    encoder.model.featCal = speaker_cloning.logFbankCal()
    encoder.eval()
    return lambda samples, hz: torch.nn.functional.linear(
        encoder(samples, hz), projection["weight"], projection["bias"]
    ).detach()


def wide(samples: torch.Tensor, hz: int) -> torch.Tensor:
    """Return a clip at 44.1 kHz, by the resampler that the autoencoder's `preprocess` calls, for one channel or the
    mean of several."""
    from torchaudio.functional import resample

    mean: torch.Tensor = resample(torch.atleast_2d(samples).mean(0), hz, RATE_HZ)
    return mean


def speak(model: Model, request: dict[str, Any]) -> np.ndarray:
    """Return the samples [N] of a greedy request."""
    prompt = model.prompt(request)
    codes, _ = model.generate(prompt, request["max_frames"], float(request["options"].get("cfg_scale", 2.0)))
    return model.decode(codes, prompt.codes).numpy()


def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Streams run one after the other, because the reference cannot begin a batch with guidance. The end is
    never drawn, since the length of a benchmark is fixed; so garbled columns do not matter, and none are
    added."""
    model.is_endless, prompt = True, model.prompt(request)
    model.generate(prompt, 2, 2.0, more=0, min_p=0.1)
    began_s, frames = time.perf_counter(), 0
    for _ in range(rounds * streams):
        codes, _ = model.generate(prompt, request["max_frames"], 2.0, more=0, min_p=0.1)
        model.decode(codes, None)
        frames += len(codes)
    return speed(streams, time.perf_counter() - began_s, frames * FRAME_SAMPLES / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    print(json.dumps(answer(order, NAME, partial(speak, model), partial(measure, model))))


if __name__ == "__main__":
    main()
