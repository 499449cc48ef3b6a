"""Recordings as frames of nine codes: the cluster, then the eight codes of the codec. A clip is encoded once, in
fp32, and kept.

    clip ─ mono, 16 kHz ─┬─ XEUS ─ nearest of 5,000 centers ─ cluster [T]  ┐ as many frames as both have
                         └─ the codec's encoder ───────────── codes [F, 8] ┘

XEUS and the centers have their own repository, under CC BY-NC-SA 4.0. The family uses the files if they lie
next to the model or in the cache of the Hugging Face Hub. Source: ESPnet's SpeechLM at 5f0a39a,
egs2/TEMPLATE/asr1/scripts/feats/codec_ssl_tokenization.sh.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from zoo.checkpoint.joblib_files import read_array
from zoo.hub import cached_directory
from zoo.opuslm.config import BOOKS, SAMPLE_RATE_HZ
from zoo.opuslm.encoder import Encoder, nearest, quantized
from zoo.opuslm.xeus import Xeus
from zoo.request import AudioClip
from zoo.voices.encoded_files import Codes, EncodedFiles, encoder_key
from zoo.voices.references import References, content, mono

FAMILY = "opuslm"
FOLDER, REPOSITORY = "xeus", "espnet/xeus"
CONFIG = "model/config.yaml"
WEIGHTS = ("model/xeus_checkpoint_new.pth", "model/xeus_checkpoint_old.pth", "model/xeus_checkpoint.pth")
CLUSTERS = "model/km_opus_lm.mdl"
CENTERS = "cluster_centers_"  # in that file
CLIP_S = (0.2, 120.0)
MISSING = (
    f"recordings need XEUS, which is not here: run `hf download {REPOSITORY}` (CC BY-NC-SA 4.0), "
    f"or put that repository into MODEL/{FOLDER}"
)


@dataclass(frozen=True)
class XeusFiles:
    """The paths of the parts of the encoder of clusters."""

    config: Path
    weights: Path
    clusters: Path

    @classmethod
    def find(cls, directory: Path) -> XeusFiles | None:
        """Return the files of DIRECTORY/xeus, DIRECTORY/../xeus or the Hub's cache, None without one. Raises
        ValueError for a directory that lacks a file."""
        places = [parent / FOLDER for parent in (directory, directory.parent)]
        folder = next((place for place in places if place.is_dir()), None) or cached_directory(REPOSITORY)
        if folder is None:
            return None
        weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), folder / WEIGHTS[0])
        files = cls(folder / CONFIG, weights, folder / CLUSTERS)
        for path in (files.config, files.weights, files.clusters):
            if not path.is_file():
                raise ValueError(f"{path} is missing; the directory needs the files of {REPOSITORY}")
        return files


class Encoders(nn.Module):
    """The networks that read a recording, and the centers of the clusters."""

    centers: Tensor  # [clusters, D]

    def __init__(self, encoder: Encoder, xeus: Xeus):
        super().__init__()
        self.encoder, self.xeus = encoder, xeus

    def read_centers(self, path: Path, num_clusters: int) -> None:
        """Raises ValueError."""
        array = read_array(path, CENTERS)
        wanted = (num_clusters, self.xeus.config.hidden)
        if array.shape != wanted or array.dtype.kind != "f":
            came = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{path}: {CENTERS} is {came}; floats {list(wanted)} are needed")
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {CENTERS} has NaN or infinity")
        centers = torch.from_numpy(array.astype("float32"))
        self.register_buffer("centers", centers.to(self.xeus.norm.weight.device), persistent=True)


class Ear:
    """AudioClip -> codes [F, 9] on the CPU. May be called from several threads."""

    def __init__(self, encoders: Encoders, tables: nn.ModuleList, device: torch.device):
        self.encoders, self.tables, self.device = encoders, tables, device
        self.heard: References[Codes] = References()
        self.files = EncodedFiles(FAMILY, encoder_key(FAMILY, BOOKS, encoders, tables))

    def __call__(self, clip: AudioClip, field: str = "references") -> Tensor:
        """field: of the request, for errors. Raises RequestError for audio that cannot be encoded."""
        name = content(clip, field=field)
        file = self.files.of(clip, name, lambda tensors: Codes(**tensors))
        return self.heard.get(name, lambda: Codes(self._encode(clip, field)), file).codes

    @torch.inference_mode()
    def _encode(self, clip: AudioClip, field: str) -> Tensor:
        samples = torch.tensor(mono(clip, SAMPLE_RATE_HZ, CLIP_S, field), device=self.device)
        clusters = nearest(self.encoders.xeus(samples), self.encoders.centers)
        codes = quantized(self.encoders.encoder(samples), self.tables)
        num = min(len(clusters), len(codes))
        return torch.cat((clusters[:num, None], codes[:num]), 1).cpu()
