"""A whole family on one screen: it reads bytes and hums. That it keeps every promise shows that the engine knows no model.

A frame is two codes; the first may be the end. A frame's codes set the speed of an oscillator whose phase runs on from frame to frame, so
a window that is rendered out of order, or from a past of its own, is heard.

`Guided` is the same with guidance: a second lane hums without having read the text.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from compile_cache.strategy import Strategy
from zoo.contract import KV, Batch, Family, Lane, Prompt, Request, Spec, State, View, Window, refuse
from zoo.nn.attention import Paged, attend
from zoo.nn.guidance import merge
from zoo.nn.linear import FusedLinear
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table, rotate
from zoo.nn.sampling import draw, gumbel

CODES, END = 32, 0
HEADS, WIDTH = 4, 16
FRAME_SAMPLES = 4
HUM = KV(num_layers=2, num_heads=2, head_dim=8)
TURN = 1 << 15  # one turn of the oscillator, in steps of its phase
NULL = (7,) * 38  # what a lane without the text reads: more than two pages of it


class ToyState(State):
    """Adds: sampling values, how far guidance goes, and the oscillator's phase [S+1] int64, so that adding up is exact."""

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype):
        super().__init__(spec, slots, max_frames, dtype, torch.device("cpu"))
        self.temperature = torch.zeros(slots + 1)
        self.top_k = torch.zeros(slots + 1, dtype=torch.int64)
        self.top_p = torch.ones(slots + 1)
        self.guidance = torch.ones(slots + 1)
        self.phase = torch.zeros(slots + 1, dtype=torch.int64)


class Layer(nn.Module):
    def __init__(self, kv: KV):
        super().__init__()
        self.dim = kv.head_dim
        self.norm = RMSNorm(WIDTH, 1e-6)
        self.qkv = FusedLinear(WIDTH, (HEADS * kv.head_dim, kv.row_values, kv.row_values))
        self.out = nn.Linear(HEADS * kv.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv(self.norm(x)))  # [T, H, dim]
        return x + self.out(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, paged, self.dim**-0.5).flatten(1))


class Toy(Family):
    def __init__(self, max_frames: int = 60, seed: int = 5, kv: KV = HUM, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.device, self.dtype, self.strategy = torch.device("cpu"), dtype, Strategy()
        self.spec = Spec(
            family="toy",
            variant="hum",
            frame_shape=(2,),
            frame_dtype=torch.int64,
            frame_samples=FRAME_SAMPLES,
            sample_rate_hz=50,
            kv=kv,
            width=WIDTH,
            max_frames=max_frames,
            max_positions=256,
            window=Window(new=(1, 4, 25)),
        )
        self.bytes = nn.Embedding(256, WIDTH)
        self.codes = nn.Embedding(2 * CODES, WIDTH)
        self.layers = nn.ModuleList(Layer(kv) for _ in range(kv.num_layers))
        self.heads = nn.Linear(WIDTH, 2 * CODES, bias=False)
        self.after = nn.Embedding(CODES, CODES)  # what the second code owes to the first
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.25
        self.to(dtype).eval().requires_grad_(False)

    def prompt(self, request: Request) -> Prompt:
        if request.guidance is not None and self.spec.lanes == 1:
            raise refuse("guidance", "toy takes no guidance: it has one lane")
        keys = tuple(request.text.encode())
        most = self.spec.max_frames if request.max_frames is None else min(request.max_frames, self.spec.max_frames)
        if not keys or len(keys) + most > self.spec.max_positions:
            raise ValueError(f"text has {len(keys)} bytes; 1 to {self.spec.max_positions - most} are possible")
        defaults = {"seed": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "guidance": 1.0}
        given = {name: getattr(request, name) for name in defaults}
        slot = defaults | {name: value for name, value in given.items() if value is not None}
        return Prompt(self.bytes(torch.tensor(keys)), keys, most, slot, usage={"input_tokens": len(keys)})

    def state(self, slots: int, max_frames: int | None = None) -> ToyState:
        return ToyState(self.spec, slots, max_frames or self.spec.max_frames, self.dtype)

    def admit(self, state: ToyState, slot: int, prompt: Prompt) -> None:  # type: ignore[override]
        state.open(slot, prompt)
        for name, value in prompt.slot.items():
            getattr(state, name)[slot] = value
        state.phase[slot] = 0

    def embed(self, state: ToyState, slots: Tensor) -> Tensor:  # type: ignore[override]
        frame = state.tape[slots, (state.ready[slots] - 1).clamp(min=0)]  # [B, 2]
        return self.codes(frame + torch.tensor((0, CODES))).sum(1)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        cos, sin = rope_table(batch.positions, self.spec.kv.head_dim, 1e4, inputs.dtype)
        for i, layer in enumerate(self.layers):
            inputs = layer(inputs, cos[:, None], sin[:, None], Paged(batch, i))
        return inputs

    def emit(self, state: ToyState, slots: Tensor, h: Tensor) -> None:  # type: ignore[override]
        how = state.temperature[slots], state.top_k[slots], state.top_p[slots]
        logits = self.scores(state, slots, h)
        noise = gumbel(state.seed[slots], state.steps[slots], range(2), CODES)
        first = draw(logits[:, 0], *how, noise[:, 0])
        second = draw(logits[:, 1] + self.after(first), *how, noise[:, 1])
        state.append(slots, torch.stack((first, second), 1), first == END)

    def scores(self, state: ToyState, slots: Tensor, h: Tensor) -> Tensor:
        """h [B, D] -> [B, 2, V]"""
        return self.heads(h).unflatten(-1, (2, CODES)).float()

    def render(self, state: ToyState, view: View) -> Tensor:  # type: ignore[override]
        frame = torch.arange(view.frames)
        at = (view.start[:, None] + frame).clamp(max=state.tape.shape[1] - 1)
        codes = state.tape[view.slots[:, None], at]  # [B, F, K]
        speed = (codes * CODES ** torch.arange(codes.shape[-1])).sum(-1) * (frame < view.count[:, None])  # [B, F], no two frames alike
        phase = state.phase[view.slots][:, None] + speed[..., None].expand(-1, -1, FRAME_SAMPLES).flatten(1).cumsum(1)  # [B, N]
        state.phase[view.slots] = phase[:, -1]
        return (phase % TURN * (2 * math.pi / TURN)).sin()


class Guided(Toy):
    """Two lanes: the second reads NULL where the first reads the text, so their prompts differ in length, and then the same frames."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, variant="guided", lanes=2)

    def prompt(self, request: Request) -> Prompt:
        prompt = super().prompt(request)
        prompt.null = Lane(self.bytes(torch.tensor(NULL)), NULL)
        return prompt

    def embed(self, state: ToyState, slots: Tensor) -> Tensor:  # type: ignore[override]
        return super().embed(state, slots).repeat(2, 1)

    def scores(self, state: ToyState, slots: Tensor, h: Tensor) -> Tensor:
        """h [2 B, D] -> [B, 2, V]"""
        return merge(super().scores(state, slots, h), state.guidance[slots])
