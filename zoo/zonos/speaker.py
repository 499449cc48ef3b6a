"""The speaker encoder: a recording to the vector of its voice. It runs once per recording, in fp32.

    samples [1, N] ─ 16 kHz ─ log mel [1, 80, T] ─ ResNet of SimAM blocks ─ statistics, weighted by attention ─ linear ─ linear ─> [128]

A SimAM block weights each position by how far it is from the mean of its channel, without parameters. The
file gives the sizes: its names and shapes say how many blocks there are and how wide they are. Source:
Zyphra/Zonos at bc40d98, speaker_cloning.py; SimAM: Yang et al. 2021.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.checkpoint import loading
from zoo.checkpoint.tensor_files import Header, open_file
from zoo.nn.resample import resampled

FOLDER, REPOSITORY = "Zonos-v0.1-speaker-embedding", "Zyphra/Zonos-v0.1-speaker-embedding"
NET_FILE, PROJECTION_FILE = "ResNet293_SimAM_ASP_base.pt", "ResNet293_SimAM_ASP_base_LDA-128.pt"
RATE_HZ = 16_000
FFT, WINDOW, HOP, MELS = 512, 400, 160, 80
LAYERS = 4
SIZED = ("front.conv1.weight", "pooling.attention.0.weight", "bottleneck.weight")
LEAST_VARIANCE, LAMBDA = 1e-5, 1e-4


@dataclass(frozen=True)
class Sizes:
    """The sizes of the network, from its file."""

    planes: int  # channels of the first layer; each further one has twice as many
    blocks: tuple[int, ...]  # of each layer
    attention: int  # channels inside the pooling
    middle: int  # width of the vector before its last projection

    @classmethod
    def read(cls, path: Path) -> Sizes:
        """Raises ValueError for a file that is not a speaker encoder."""
        headers = open_file(path).headers
        blocks = tuple(_count(headers, layer) for layer in range(1, LAYERS + 1))
        first, attention, middle = (_rows(headers, name, path) for name in SIZED)
        if not all(blocks):
            raise ValueError(
                f"{path} is not a speaker encoder of Zonos: it has {blocks} blocks in its layers"
            )
        return cls(first, blocks, attention, middle)


def _count(headers: Mapping[str, Header], layer: int) -> int:
    found = (re.match(rf"front\.layer{layer}\.(\d+)\.conv1\.weight$", name) for name in headers)
    return sum(match is not None for match in found)


def _rows(headers: Mapping[str, Header], name: str, path: Path) -> int:
    if name not in headers or not headers[name].shape:
        raise ValueError(f"{path} is not a speaker encoder of Zonos: it has no {name}")
    return headers[name].shape[0]


class Block(nn.Module):
    """x [B, C, M, T] -> [B, planes, M / stride, T / stride]"""

    def __init__(self, channels: int, planes: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Sequential()
        if stride != 1 or channels != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(weighted(y) + self.downsample(x))


def weighted(x: Tensor) -> Tensor:
    """SimAM: x [B, C, M, T], each position weighted by its distance from its channel's mean."""
    distance = (x - x.mean((2, 3), keepdim=True)).square()
    variance = distance.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3] - 1)
    return x * torch.sigmoid(distance / (4 * (variance + LAMBDA)) + 0.5)


class Front(nn.Module):
    """The convolutions: log mel [B, 80, T] -> [B, 8 planes, 10, T / 8]."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, sizes.planes, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(sizes.planes)
        channels = sizes.planes
        for i, count in enumerate(sizes.blocks):
            planes = sizes.planes << i
            strides = [1 if i == 0 else 2] + [1] * (count - 1)
            blocks = [Block(planes if j else channels, planes, stride) for j, stride in enumerate(strides)]
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
            channels = planes

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x[:, None])))
        for i in range(LAYERS):
            x = getattr(self, f"layer{i + 1}")(x)
        return x


class Pooling(nn.Module):
    """Mean and deviation over time, weighted by attention: [B, C, T] -> [B, 2 C]."""

    def __init__(self, channels: int, middle: int):
        super().__init__()
        self.attention = nn.Sequential(
            nn.Conv1d(channels, middle, 1), nn.ReLU(), nn.BatchNorm1d(middle), nn.Conv1d(middle, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        share = self.attention(x).softmax(2)
        mean = (x * share).sum(2)
        variance = (x.square() * share).sum(2) - mean.square()
        return torch.cat((mean, variance.clamp(min=LEAST_VARIANCE).sqrt()), 1)


class Net(nn.Module):
    """The network of the first file: log mel [B, 80, T] -> [B, middle]."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        channels = (sizes.planes << LAYERS - 1) * (MELS >> LAYERS - 1)
        self.front = Front(sizes)
        self.pooling = Pooling(channels, sizes.attention)
        self.bottleneck = nn.Linear(2 * channels, sizes.middle)

    def forward(self, x: Tensor) -> Tensor:
        return self.bottleneck(self.pooling(self.front(x).flatten(1, 2)))


class SpeakerEncoder(nn.Module):
    """Both files. Samples [N] at any rate -> the voice's vector [width], float32."""

    filters: Tensor  # [80, 257]
    window: Tensor  # [400]

    def __init__(self, sizes: Sizes, width: int):
        super().__init__()
        self.net = Net(sizes)
        self.projection = nn.Linear(sizes.middle, width)

    def prepare(self) -> None:
        """Make what does not depend on the weights. Call once after loading them."""
        device = self.projection.weight.device
        self.register_buffer("filters", htk_filters().to(device), persistent=False)
        self.register_buffer("window", torch.hann_window(WINDOW, device=device), persistent=False)

    def forward(self, samples: Tensor, rate_hz: int) -> Tensor:
        samples = resampled(samples, rate_hz, RATE_HZ)
        samples = F.pad(samples, (0, max(0, FFT - len(samples))))  # the mirrored edges need that many
        bins = torch.stft(samples, FFT, HOP, WINDOW, self.window, center=True, return_complex=True)
        energy = torch.view_as_real(bins).square().sum(-1)  # [257, T]
        mel = (self.filters @ energy + 1e-6).log()
        return self.projection(self.net((mel - mel.mean(1, keepdim=True))[None]))[0]


def htk_filters() -> Tensor:
    """Return mel filters [80, 257]: triangles of height 1, evenly spaced in HTK's mel, from 0 to 8000 Hz.
    They are computed in fp32 as in the reference, because the logarithm of a quiet band shows the
    difference."""
    top = 2595 * math.log10(1 + RATE_HZ / 2 / 700)
    mel = torch.linspace(0, top, MELS + 2, dtype=torch.float32)
    edges = 700 * (10 ** (mel / 2595) - 1)
    width = edges.diff()[:, None]
    hz = torch.linspace(0, RATE_HZ / 2, FFT // 2 + 1, dtype=torch.float32)
    rising = (hz - edges[:-2, None]) / width[:-1]
    falling = (edges[2:, None] - hz) / width[1:]
    return torch.minimum(rising, falling).clamp(min=0)


def table(net: nn.Module) -> dict[str, str]:
    """Return the published names of a file's tensors -> ours: they are the same."""
    tensors = (*net.named_parameters(), *net.named_buffers())
    return {name: name for name, _ in tensors}


def find(directory: Path, codec: Path) -> Path | None:
    """Return the directory of the speaker encoder, or None: MODEL/FOLDER or MODEL/../FOLDER, or the Hub's
    copy if the codec came from there, too. Raises ValueError if the Hub's copy cannot be fetched."""
    from zoo.hub import local_directory

    for parent in (directory, directory.parent):
        if (parent / FOLDER / NET_FILE).is_file():
            return parent / FOLDER
    if codec.parent in (directory, directory.parent):
        return None
    return local_directory(REPOSITORY)


def build(folder: Path, width: int) -> SpeakerEncoder:
    """Return the encoder on `meta`. width: of the voice's vector."""
    sizes = Sizes.read(folder / NET_FILE)
    with torch.device("meta"):
        return SpeakerEncoder(sizes, width)


def load(encoder: SpeakerEncoder, folder: Path, device: torch.device) -> SpeakerEncoder:
    """Fill the encoder from its two files, in fp32. Raises ValueError."""
    for part, name in ((encoder.net, NET_FILE), (encoder.projection, PROJECTION_FILE)):
        loading.load_file(part, table(part), open_file(folder / name), device, torch.float32)
    encoder.prepare()
    return encoder.eval().requires_grad_(False)
