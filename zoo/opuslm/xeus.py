"""XEUS: 16 kHz audio to one vector per 20 ms, whose nearest cluster is the first stream's code. In fp32.

    samples [N] ─ to mean 0 and deviation 1 ─ 7 strided convs ─ linear ─ wide conv (position) ─ 19 blocks ─ norm ─ [T, 1024]

    block:   x ─ + MLP / 2 ─┬─ norm ─ attention ──────────────────────┬─ + conv over both ─ linear ─ + x ─ + MLP / 2 ─ norm ─>
                            └─ norm ─ up ─ half times conv of half ─ down ┘

A block is an E-Branchformer's. The clusters are of the last block's output, after the last norm: ESPnet counts the
19 outputs from 0, and its recipe names number 18. Source: espnet 202611, espnet2/ssl/espnet_model.py,
espnet2/asr/encoder/e_branchformer_encoder.py and espnet2/asr/frontend/cnn.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.checkpoint.config import HEADS, KERNEL, LAYERS, STRIDE, WIDTH, ConfigBlock
from zoo.checkpoint.tensor_files import Header, TensorFile

EPS = 1e-12  # of the blocks' norms
POSITION_KERNEL, POSITION_GROUPS = 128, 16
CONVS = ((512, 10, 5), (512, 3, 2), (512, 3, 2), (512, 3, 2), (512, 3, 2), (512, 2, 2), (512, 2, 2))
# ESPnet's own, of keys that a file may lack
FRONTEND = {"conv_mode": "standard", "shapes": [list(conv) for conv in CONVS], "normalize_audio": False}
FRONTEND |= {"normalize_output": False}
ENCODER: dict[str, Any] = {
    "attention_heads": 4,
    "cgmlp_linear_units": 2048,
    "cgmlp_conv_kernel": 31,
    "use_linear_after_conv": False,
    "gate_activation": "identity",
    "num_blocks": 12,
    "use_ffn": False,
    "macaron_ffn": False,
    "ffn_activation_type": "swish",
    "linear_units": 2048,
    "merge_conv_kernel": 3,
    "qk_norm": False,
}
PARTS = ("frontend.", "preencoder.", "encoder.")  # of the published file; the rest serves training
CONVS_OF_EMBED = ("encoder.embed.0.conv.", "encoder.embed.0.convs.0.")  # in the older and the newer file
EMBED = "encoder.embed.0.conv.weight"


@dataclass(frozen=True)
class XeusConfig:
    convs: tuple[tuple[int, int, int], ...]  # channels, kernel and stride of each
    normalizes: bool  # whether samples are brought to mean 0 and deviation 1
    hidden: int
    heads: int
    inner: int
    layers: int
    gate_inner: int
    gate_kernel: int
    merge_kernel: int

    @classmethod
    def read(cls, values: dict[str, Any], file: str) -> XeusConfig:
        """Raises ValueError."""
        root = ConfigBlock(values, file=file)
        root.expect(encoder="e_branchformer", preencoder="linear")
        front = root.block("frontend_conf").with_defaults(FRONTEND)
        front.expect(norm_mode="layer_norm", conv_mode="standard", bias=True, normalize_output=False)
        block = root.block("encoder_conf").with_defaults(ENCODER)
        block.expect(
            attention_layer_type="selfattn",
            pos_enc_layer_type="conv",
            input_layer=None,
            use_linear_after_conv=False,
            gate_activation="identity",
            use_ffn=True,
            macaron_ffn=True,
            ffn_activation_type="swish",
            qk_norm=False,
        )
        heads = block.integer("attention_heads", *HEADS)
        hidden = block.integer("output_size", *WIDTH, step=POSITION_GROUPS)
        block.integer("output_size", *WIDTH, step=heads)
        gate_kernel, merge_kernel = (_odd(block, name) for name in ("cgmlp_conv_kernel", "merge_conv_kernel"))
        return cls(
            convs=_convs(front),
            normalizes=front.flag("normalize_audio"),
            hidden=hidden,
            heads=heads,
            inner=block.integer("linear_units", *WIDTH),
            layers=block.integer("num_blocks", *LAYERS),
            gate_inner=block.integer("cgmlp_linear_units", *WIDTH, step=2),
            gate_kernel=gate_kernel,
            merge_kernel=merge_kernel,
        )


def _odd(block: ConfigBlock, name: str) -> int:
    value = block.integer(name, 1, 255)
    if value % 2 == 0:
        raise block.refuse(name, "an odd number is possible")
    return value


def _convs(front: ConfigBlock) -> tuple[tuple[int, int, int], ...]:
    shapes = front.get("shapes")
    ranges = (WIDTH, KERNEL, STRIDE)

    def is_conv(shape: Any) -> bool:
        is_triple = isinstance(shape, list | tuple) and len(shape) == 3
        return is_triple and all(
            type(value) is int and low <= value <= high
            for value, (low, high) in zip(shape, ranges, strict=True)
        )

    if not isinstance(shapes, list) or not 1 <= len(shapes) <= 16 or not all(map(is_conv, shapes)):
        raise front.refuse("shapes", "a list of channels, kernel and stride for each convolution is possible")
    return tuple((shape[0], shape[1], shape[2]) for shape in shapes)


class StridedConv(nn.Module):
    """A convolution, a norm over the channels, and GELU."""

    def __init__(self, channels: int, out_channels: int, kernel: int, stride: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, out_channels, kernel, stride)
        self.layer_norm = nn.LayerNorm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, N] -> [B, Cout, N']"""
        return F.gelu(self.layer_norm(self.conv(x).mT).mT)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.silu(self.w_1(x)))


class Attention(nn.Module):
    """Every position sees every other one."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        for name in ("q", "k", "v", "out"):
            self.add_module(f"linear_{name}", nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.get_submodule(f"linear_{name}")(x) for name in "qkv")
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # [B, H, T, dim]
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.get_submodule("linear_out")(mixed.transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """Half of the channels, times a convolution over the other half."""

    def __init__(self, inner: int, kernel: int):
        super().__init__()
        half = inner // 2
        self.norm = nn.LayerNorm(half, EPS)
        self.conv = nn.Conv1d(half, half, kernel, padding=kernel // 2, groups=half)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, -1)
        return x * self.conv(self.norm(gate).mT).mT


class GatedMLP(nn.Module):
    def __init__(self, config: XeusConfig):
        super().__init__()
        inner = config.gate_inner
        self.channel_proj1 = nn.Sequential(nn.Linear(config.hidden, inner), nn.GELU())
        self.csgu = Gate(inner, config.gate_kernel)
        self.channel_proj2 = nn.Linear(inner // 2, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.channel_proj2(self.csgu(self.channel_proj1(x)))


class Block(nn.Module):
    """Attention and a gated MLP next to each other, between two halves of an MLP."""

    def __init__(self, config: XeusConfig):
        super().__init__()
        width, kernel = config.hidden, config.merge_kernel
        self.attn, self.cgmlp = Attention(width, config.heads), GatedMLP(config)
        self.feed_forward, self.feed_forward_macaron = (MLP(width, config.inner) for _ in range(2))
        for name in ("ff", "ff_macaron", "mha", "mlp", "final"):
            self.add_module(f"norm_{name}", nn.LayerNorm(width, EPS))
        wide = 2 * width
        self.depthwise_conv_fusion = nn.Conv1d(wide, wide, kernel, padding=kernel // 2, groups=wide)
        self.merge_proj = nn.Linear(wide, width)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(f"norm_{name}")(x)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]"""
        x = x + 0.5 * self.feed_forward_macaron(self.norm("ff_macaron", x))
        both = torch.cat((self.attn(self.norm("mha", x)), self.cgmlp(self.norm("mlp", x))), -1)
        x = x + self.merge_proj(both + self.depthwise_conv_fusion(both.mT).mT)
        x = x + 0.5 * self.feed_forward(self.norm("ff", x))
        return self.norm("final", x)


class Xeus(nn.Module):
    """The network, with the published names below each of the three parts."""

    def __init__(self, config: XeusConfig):
        super().__init__()
        self.config = config
        channels = [1, *(channels for channels, _, _ in config.convs)]
        self.convs = nn.ModuleList(StridedConv(channels[i], *conv) for i, conv in enumerate(config.convs))
        self.project = nn.Linear(channels[-1], config.hidden)
        width = config.hidden
        self.position = nn.Conv1d(
            width, width, POSITION_KERNEL, padding=POSITION_KERNEL // 2, groups=POSITION_GROUPS
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, EPS)

    def forward(self, samples: Tensor) -> Tensor:
        """samples [N] -> [T, D], about N / 320 vectors"""
        x = F.layer_norm(samples, samples.shape) if self.config.normalizes else samples
        x = x[None, None]
        for conv in self.convs:
            x = conv(x)
        x = self.project(x.mT).mT
        x = F.gelu(self.position(x)[..., :-1]).mT  # the kernel is even, so one position is too many
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[0]


def names(xeus: Xeus) -> dict[str, str]:
    """Return the table of published names, in the older notation, for a file that `of_parts` has opened."""
    theirs = {
        "convs.": "frontend.layers.",
        "blocks.": "encoder.encoders.",
        "project.": "preencoder.linear_out.",
    }
    theirs |= {"position.": CONVS_OF_EMBED[0], "norm.": "encoder.after_norm."}
    ours = [name for name, _ in xeus.named_parameters()]
    found = {}
    for name in ours:
        prefix = name[: name.index(".") + 1]
        found[theirs[prefix] + name.removeprefix(prefix)] = name
    return found


def of_parts(file: TensorFile) -> TensorFile:
    """Return the published file with the names of the older release, without the tensors of training. The
    position's convolution, which has weight norm's two parts for each of its positions, is whole. Raises
    ValueError."""
    named = {_older(name): name for name in file.headers if name.startswith(PARTS)}
    headers = {older: file.headers[name] for older, name in named.items()}
    size, direction = (headers.pop(f"{EMBED}_{part}", None) for part in "gv")
    if size is not None and direction is not None:
        headers[EMBED] = Header(direction.shape, direction.dtype, file.path)

    def read(name: str) -> Tensor:
        if name != EMBED or EMBED in named:
            return file.read(named[name])
        norm, v = (file.read(named[f"{EMBED}_{part}"]).float() for part in "gv")
        if norm.shape != (1, 1, v.shape[2]):
            raise ValueError(f"{file.path}: {named[f'{EMBED}_g']} has shape {list(norm.shape)}")
        return v * (norm / v.norm(dim=(0, 1), keepdim=True))

    return TensorFile(file.path, headers, read)


def _older(name: str) -> str:
    name = name.replace(CONVS_OF_EMBED[1], CONVS_OF_EMBED[0])
    for newer, older in (("original0", "weight_g"), ("original1", "weight_v")):
        name = name.replace(f"parametrizations.weight.{newer}", older)
    return name
