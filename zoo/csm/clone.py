"""A segment's audio as codes, which the backbone reads as speech that belongs to the segment's text. A clip
is encoded once, in fp32, and kept.

    clip ─ mono, 24 kHz, zeros up to a whole frame ─ Mimi's encoder ─> codes [F, K]

The encoder's weights are read when the first clip comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.checkpoint import loading
from zoo.checkpoint.tensor_files import TensorFile, open_file
from zoo.nn import mimi_encoder
from zoo.nn.mimi import MimiConfig
from zoo.request import AudioClip
from zoo.voices.encoded_files import Codes, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono_by_sinc

FAMILY = "csm"
REFERENCE_S = (0.1, 120.0)  # the model has positions for 163 s of speech and text
MAX_REFERENCES = 16
DECODER_ONLY = ("decoder", "upsample")  # how the names begin that an encoder does not need


@dataclass(frozen=True)
class EncoderFiles:
    """The files of Mimi's tensors, the prefix of their names, and how a file is seen once it is open."""

    paths: tuple[Path, ...]
    prefix: str = ""
    view: Callable[[TensorFile], TensorFile] = lambda file: file

    def read(self) -> dict[str, Tensor]:
        """Return the tensors that an encoder needs, by their names without the prefix."""
        tensors: dict[str, Tensor] = {}
        unneeded = tuple(self.prefix + name for name in DECODER_ONLY)
        for path in self.paths:
            file = self.view(open_file(path))
            for name in file.headers:
                if name.startswith(self.prefix) and not name.startswith(unneeded):
                    tensors[name.removeprefix(self.prefix)] = file.read(name).float()
        return tensors


class Encoder:
    """Samples -> codes. Its weights are read when the first clip comes."""

    def __init__(self, config: MimiConfig, rate_hz: int, files: EncoderFiles, device: torch.device):
        self.config, self.rate_hz = config, rate_hz
        self.files, self.device = files, device
        self._model: mimi_encoder.Encoder | None = None

    def __deepcopy__(self, memo: object) -> Encoder:
        """Return an encoder that is not loaded yet, for a copy of a family."""
        return Encoder(self.config, self.rate_hz, self.files, self.device)

    @torch.inference_mode()
    def __call__(self, samples: Tensor) -> Tensor:
        """samples [N] in whole frames -> codes [F, K] on the CPU."""
        if self._model is None:
            self._model = self._load()
        return self._model(samples.to(self.device)[None])[0].cpu()

    def _load(self) -> mimi_encoder.Encoder:
        with torch.device("meta"):
            model = mimi_encoder.Encoder(self.config, self.rate_hz)
        if self.device.type != "meta":
            tensors, names = self.files.read(), mimi_encoder.encoder_names(self.config)
            loading.fill(model, names, tensors.__getitem__, self.device, self.files.paths[0])
        return model.eval().requires_grad_(False)


class Cloner:
    """AudioClip -> codes [F, K] on the CPU. May be called from several threads."""

    def __init__(self, encoder: Encoder, codec: nn.Module):
        """codec: identifies the encoder's weights."""
        self.encoder = encoder
        self.references: References[Codes] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, (encoder.config, encoder.rate_hz), codec))

    def __call__(self, clip: AudioClip) -> Tensor:
        """Raises ValueError (`param` "references") for unusable audio."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: Codes(**tensors))
        return self.references.get(name, lambda: self._encode(clip), file).codes

    def _encode(self, clip: AudioClip) -> Codes:
        samples = mono_by_sinc(clip, self.encoder.rate_hz, REFERENCE_S)  # [N]
        samples = F.pad(samples, (0, -len(samples) % self.encoder.config.frame_samples))
        return Codes(self.encoder(samples))
