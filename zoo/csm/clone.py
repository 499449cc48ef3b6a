"""A segment's audio as codes, which the backbone reads as speech that belongs to the segment's text. A clip is
encoded once, in fp32, and kept.

    clip ─ mono, 24 kHz, zeros up to a whole frame ─ Mimi's encoder ─> codes [F, K]

The encoder is transformers' own. It is imported, and its weights are read, when the first clip comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.checkpoint.tensor_files import Header, open_file
from zoo.nn.mimi import FIXED, MimiConfig
from zoo.request import AudioClip, RequestError
from zoo.voices.encoded_files import EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "csm"
REFERENCE_S = (0.1, 120.0)  # the model has positions for 163 s of speech and text
MAX_REFERENCES = 16
DECODER_ONLY = ("decoder", "upsample")  # how the names begin that an encoder does not need


@dataclass(frozen=True)
class EncodedReference:
    codes: Tensor  # [F, K] on the CPU

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes}

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes


@dataclass(frozen=True)
class EncoderFiles:
    """Where Mimi's tensors are: their headers, and the prefix of their names."""

    headers: Mapping[str, Header]
    prefix: str

    def read(self) -> dict[str, Tensor]:
        """Return the tensors that an encoder needs, by their names without the prefix."""
        tensors: dict[str, Tensor] = {}
        unneeded = tuple(self.prefix + name for name in DECODER_ONLY)
        for path in dict.fromkeys(header.path for header in self.headers.values()):
            file = open_file(path)
            for name in file.headers:
                if name.startswith(self.prefix) and not name.startswith(unneeded):
                    tensors[name.removeprefix(self.prefix)] = file.read(name).float()
        return tensors


class Encoder:
    """Samples -> codes, by `transformers.MimiModel`."""

    def __init__(self, config: MimiConfig, rate_hz: int, files: EncoderFiles, device: torch.device):
        self.config, self.rate_hz = config, rate_hz
        self.files, self.device = files, device
        self._model: Any = None

    def __deepcopy__(self, memo: object) -> Encoder:
        """Return an encoder that is not loaded yet, for a copy of a family."""
        return Encoder(self.config, self.rate_hz, self.files, self.device)

    @torch.inference_mode()
    def __call__(self, samples: Tensor) -> Tensor:
        """samples [N] in whole frames -> codes [F, K] on the CPU. Raises RequestError if transformers is not
        installed."""
        if self.device.type == "meta":
            raise RequestError("references", "MimiModel reads values, and a model on device meta has none")
        if self._model is None:
            self._model = self._load()
        codes = self._model.encode(samples.to(self.device)[None, None]).audio_codes  # [1, K, F]
        return codes[0].T.cpu()

    def _load(self) -> Any:
        try:
            from transformers import MimiConfig as TheirConfig
            from transformers import MimiModel
        except ImportError:
            needed = "CSM encodes audio with transformers, which is not installed"
            raise RequestError("references", f"{needed}: pip install 'speechzoo[mimi]'") from None
        config = TheirConfig(**settings(self.config, self.rate_hz))
        model: Any = MimiModel(config)
        tensors = self.files.read()
        model.load_state_dict({name: tensors[published(name)] for name in model.state_dict()})
        return model.to(self.device, torch.float32).eval()


def published(name: str) -> str:
    """Return the published name of one of MimiModel's tensors, which has other names in memory."""
    name = re.sub(r"^encoder\.(encoder_seanet|encoder)\.layers\.", "encoder.layers.", name)
    return re.sub(r"^encoder\.(encoder_transformer|downsample)\.", r"\1.", name)


def settings(config: MimiConfig, rate_hz: int) -> dict[str, Any]:
    """Return the arguments of transformers' MimiConfig."""
    return FIXED | {
        "sampling_rate": rate_hz,
        "frame_rate": rate_hz / config.frame_samples,
        "num_filters": config.filters,
        "kernel_size": config.kernel,
        "residual_kernel_size": config.residual_kernel,
        "last_kernel_size": config.last_kernel,
        "compress": config.compress,
        "upsampling_ratios": list(config.strides[::-1]),
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "norm_eps": config.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_window": config.window,
        "num_quantizers": config.codebooks,
        "codebook_size": config.codebook_size,
        "codebook_dim": config.codebook_dim,
        "vector_quantization_hidden_dimension": config.codebook_dim,
        "upsample_groups": config.hidden,
        "decoder_config": None,  # the encoder alone
    }


class Cloner:
    """AudioClip -> codes [F, K] on the CPU. May be called from several threads."""

    def __init__(self, encoder: Encoder, codec: nn.Module):
        """codec: identifies the encoder's weights."""
        self.encoder = encoder
        self.references: References[EncodedReference] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, (encoder.config, encoder.rate_hz), codec))

    def __call__(self, clip: AudioClip) -> Tensor:
        """Raises ValueError (`param` "references") for unusable audio."""
        name = content(clip)
        file = self.files.of(clip, name, lambda tensors: EncodedReference(tensors["codes"]))
        return self.references.get(name, lambda: self._encode(clip), file).codes

    def _encode(self, clip: AudioClip) -> EncodedReference:
        samples = torch.tensor(mono(clip, self.encoder.rate_hz, REFERENCE_S))  # [N]
        samples = F.pad(samples, (0, -len(samples) % self.encoder.config.frame_samples))
        return EncodedReference(self.encoder(samples))
