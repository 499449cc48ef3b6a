"""The flow's estimator: the velocity of each mel frame, from its current state, the encoder's output, the
speaker and the prompt's mel.

    [x, mu, speaker, prompt] ─ stage ─┬─ conv ─ stages ... ─┬─ stage ─ conv ─ conv ─> velocity
                                      └─────────────────────┘

All of it runs at 50 Hz. A stage is a resnet block and transformer blocks. Convolutions are causal, attention
is chunked (see stretch.py). Rows come in pairs, with the condition and without it. Source:
FunAudioLLM/CosyVoice, cosyvoice/flow/decoder.py, CausalConditionalDecoder; Matcha-TTS (arXiv 2309.03199),
matcha/models/components.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn.cfm import sinusoid
from zoo.nn.conv import CodecState, Stateful, StateLayout
from zoo.nn.eager import may_follow_values
from zoo.nn.linear import FusedLinear
from zoo.nn.narrow import dtype_of
from zoo.nn.packed import can_be_packed, convolve, linear_add, linear_gelu, packed_convolution
from zoo.nn.residual import ConvFilters, has_kernel
from zoo.nn.s3.sizes import MELS, FlowSizes
from zoo.nn.s3.stretch import PagedLayer, Seen, Whole

KERNEL = 3  # of every convolution
PAIR = 2  # with the condition, and without it


def mish(x: Tensor) -> Tensor:
    """Return x tanh(softplus(x)).

    On a CPU it is computed with one exponential, in a third of the time of torch's version, which also
    computes a logarithm and a tanh.
    """
    if x.device.type != "cpu":
        return F.mish(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    e = wide.clamp(max=20).exp()  # beyond 20 the factor is 1
    e = (e + 2).mul_(e)
    return e.div_(e + 2).mul_(wide).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention [B, H, Q, dim] of q [B, H, Q, dim] over k and v [B, H, K, dim].

    mask [B, 1, Q, K] is added to the scores. On a CPU it is two matrix products, which take half as long as
    torch's own attention there.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    q, k, v = (q * q.shape[-1] ** -0.5).contiguous(), k.contiguous(), v.contiguous()
    return (q @ k.mT).add_(mask).softmax(-1) @ v


def pointwise(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """Apply a convolution of kernel size 1 to rows: x [B, N, C] -> [B, N, Cout]."""
    return F.linear(x, conv.weight[..., 0], conv.bias)


class Conv(Stateful, ConvFilters):
    """A causal convolution over rows: x [B, N, C] -> [B, N, Cout].

    It is one matrix product, or on a CPU a convolution, which is a tenth faster. Norms and attention read rows
    too, so nothing is transposed.
    """

    def __init__(self, channels: int, out_channels: int):
        super().__init__(channels, KERNEL - 1, dim=1)
        self.weight = nn.Parameter(torch.empty(out_channels, channels, KERNEL))
        self.bias, self.groups = nn.Parameter(torch.empty(out_channels)), 1

    def prepare(self) -> None:
        """Lay the weight out in memory as `forward` reads it. Its shape does not change."""
        self.weight.data = self.weight.data.mT.contiguous().mT

    @cached_property
    def packed(self) -> Tensor | None:
        return packed_convolution(self.weight) if can_be_packed(self.weight) else None

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        whole = state.extend(self, x)
        if has_kernel(x, self):
            return kernels.convolve_snake(whole.mT, None, self.filters, self.bias, KERNEL, dilation=1).mT
        if kernels.know(x) and self.packed is not None:
            return convolve(whole, self.packed, self.bias)
        reach = torch.cat([whole[:, i : i + x.shape[1]] for i in range(KERNEL)], -1)  # [B, N, KERNEL * C]
        return F.linear(reach, self.weight.mT.flatten(1), self.bias)


class ConvBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv = Conv(channels, out_channels)
        self.norm = nn.LayerNorm(out_channels)

    def forward(self, x: Tensor, state: CodecState, shift: Tensor | None = None) -> Tensor:
        """Apply convolution, norm and mish to x [B, N, C] and add shift [Cout]. Returns [B, N, Cout]."""
        x = self.conv(x, state)
        if kernels.know(x):
            return kernels.norm_mish(x, self.norm.weight, self.norm.bias, shift, self.norm.eps)
        x = mish(self.norm(x))
        return x if shift is None else x + shift


class Resnet(nn.Module):
    def __init__(self, channels: int, out_channels: int, time_width: int):
        super().__init__()
        self.block1 = ConvBlock(channels, out_channels)
        self.time = nn.Linear(time_width, out_channels)
        self.block2 = ConvBlock(out_channels, out_channels)
        self.shortcut = nn.Conv1d(channels, out_channels, 1)

    def forward(self, x: Tensor, shift: Tensor, state: CodecState) -> Tensor:
        """Apply the block to x [B, N, C]. shift [Cout]: the embedding of the solver's time."""
        y = self.block1(x, state, shift)
        return self.block2(y, state) + pointwise(x, self.shortcut)


class TransformerBlock(nn.Module):
    reads_many_rows = True  # all rows of a stretch

    def __init__(self, channels: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        self.attention_norm = nn.LayerNorm(channels)
        self.qkv = FusedLinear(channels, (inner,) * 3)
        self.out = nn.Linear(inner, channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)

    def forward(
        self,
        x: Tensor,
        seen: Seen,
        mask: Tensor | None,
        caches: Tensor | PagedLayer,
        layers: Tensor,
        block: int,
    ) -> Tensor:
        """Apply the block to x [2B, Q, C].

        mask [2B, 1, Q, K]: -inf at unseen positions; caches [_, S, capacity + 1, PAIR, 2 * inner]: of several
        layers, of which this block has number `block`. Without a mask, caches are pages, with layer 0 where
        they begin, and this block has number `layers[block]`.
        """
        if not isinstance(caches, PagedLayer):
            assert mask is not None, "a cache of rows needs a mask"
            return self.in_rows(x, seen, mask, caches[block])
        q, k, v = self.qkv(self.attention_norm(x))
        paged = caches.arena, caches.pages, layers, block, caches.first
        where = seen.index, seen.start, seen.count, seen.num_kept, seen.grid
        capacity = caches.num_chunks * seen.grid
        y = torch.ops.zoo.stretch_attention.default(q, k, v, None, *paged, *where, capacity, self.heads)
        return self._add(x, y)

    def in_rows(self, x: Tensor, seen: Seen, mask: Tensor, cache: Tensor) -> Tensor:
        """Apply the block to x [B * L, Q, C] with a cache of rows [S, _, L, 2 * inner], of which `seen` has B."""
        q, k, v = self.qkv(self.attention_norm(x))
        return self._add(x, self._attend(q, k, v, seen, mask, cache))

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add what attention gave, y [2B, Q, inner], and then the MLP's output, to x [2B, Q, C]."""
        x = linear_add(self.out, y, x)
        return linear_add(self.narrow, linear_gelu(self.widen, self.mlp_norm(x)), x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, mask: Tensor, cache: Tensor) -> Tensor:
        """Return attention [2B, Q, inner] of q, k, v [2B, Q, inner] and the cache, and update the cache."""
        if may_follow_values(q) and kernels.know(q, k, v, cache):
            return kernels.attend_stretch(q, k, v, cache, seen.slots, seen.index, seen.mask, self.heads)
        if not isinstance(seen, Whole):
            new = torch.cat((k, v), -1).unflatten(0, (-1, cache.shape[2]))  # [B, L, Q, 2 inner]
            held = seen.exchange(cache, new.transpose(1, 2))  # [B, K, L, 2 inner]
            k, v = held.transpose(1, 2).flatten(0, 1).chunk(2, -1)  # [B * L, K, inner]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        return attend(q, k, v, mask).transpose(1, 2).flatten(2)


class Stage(nn.Module):
    def __init__(self, config: FlowSizes, channels: int):
        super().__init__()
        out_channels = config.channels
        self.resnet = Resnet(channels, out_channels, 4 * out_channels)
        blocks = (
            TransformerBlock(out_channels, config.estimator_heads, config.head_dim)
            for _ in range(config.num_blocks)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Tensor,
        shift: Tensor,
        state: CodecState,
        seen: Seen,
        mask: Tensor | None,
        caches: Tensor | PagedLayer,
        layers: Tensor,
    ) -> Tensor:
        return self._transform(self.resnet(x, shift, state), seen, mask, caches, layers)

    # A region holds four blocks instead of one because each region begins and ends with its own kernels.
    @torch.compiler.nested_compile_region
    def _transform(
        self, x: Tensor, seen: Seen, mask: Tensor | None, caches: Tensor | PagedLayer, layers: Tensor
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, seen, mask, caches, layers, i)
        return x


class Estimator(nn.Module):
    shifts: Tensor  # [steps, stages, channels], the embeddings of the solver's times
    numbers: Tensor  # [steps, layers], the numbers of the transformer blocks of each step

    def __init__(self, config: FlowSizes):
        super().__init__()
        channels = config.channels
        self.time1 = nn.Linear(4 * MELS, 4 * channels)
        self.time2 = nn.Linear(4 * channels, 4 * channels)
        self.time_mixer = nn.Linear(8 * channels, 4 * channels, bias=False) if config.is_meanflow else None
        self.first = Stage(config, 4 * MELS)
        self.first_conv = Conv(channels, channels)
        self.middle = nn.ModuleList(Stage(config, channels) for _ in range(config.num_mid))
        self.last = Stage(config, 2 * channels)
        self.last_conv = Conv(channels, channels)
        self.final = ConvBlock(channels, channels)
        self.out = nn.Conv1d(channels, MELS, 1)
        self.layout = StateLayout(self)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.first, *self.middle, self.last

    @property
    def num_layers(self) -> int:
        """The number of transformer blocks."""
        return len(self.stages) * len(self.first.blocks)

    @torch.no_grad()
    def prepare(self, times: Tensor, ends: Tensor | None = None) -> None:
        """Lay out the weights and embed the solver's times [steps], in fp32 from 0 (noise) to 1.

        ends [steps]: where each step ends, for a mean flow.
        """
        for module in self.modules():
            if isinstance(module, Conv):
                module.prepare()
        time = self._embed(times)  # [steps, 4 * channels]
        if self.time_mixer is not None:
            assert ends is not None, "a mean flow needs the ends of its steps"
            time = self.time_mixer(torch.cat((time, self._embed(ends)), -1))
        time = F.mish(time)
        shifts = torch.stack([stage.resnet.time(time) for stage in self.stages], 1)
        self.register_buffer("shifts", shifts, persistent=False)
        numbers = torch.arange(len(times) * self.num_layers, device=time.device)
        self.register_buffer("numbers", numbers.view(len(times), -1), persistent=False)

    def _embed(self, times: Tensor) -> Tensor:
        time = torch.stack([sinusoid(t, 4 * MELS) for t in times]).to(dtype_of(self.time1))
        return self.time2(F.silu(self.time1(time)))

    def forward(
        self,
        x: Tensor,
        shifts: Tensor,
        state: CodecState,
        seen: Seen,
        mask: Tensor | None,
        caches: Tensor | PagedLayer,
        numbers: Tensor,
    ) -> Tensor:
        """Return the velocity [2B, Q, MELS] of x [2B, Q, 4 * MELS].

        shifts [stages, channels], numbers [layers]: of one step of the solver; mask, caches: as for a block,
        of all layers.
        """
        num = len(self.first.blocks)
        layers = numbers.split(num)
        if isinstance(caches, PagedLayer):
            by_stage: Sequence[Tensor | PagedLayer] = [caches] * len(layers)
        else:
            by_stage = caches.split(num)
        given = [(seen, mask, *one) for one in zip(by_stage, layers, strict=True)]
        added = shifts.unbind(0)
        x = kept = self.first(x, added[0], state, *given[0])
        x = self.first_conv(x, state)
        for stage, shift, rest in zip(self.middle, added[1:-1], given[1:-1], strict=True):
            x = stage(x, shift, state, *rest)
        x = self.last(torch.cat((x, kept), -1), added[-1], state, *given[-1])
        x = self.final(self.last_conv(x, state), state)
        return pointwise(x, self.out)
