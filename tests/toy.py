"""A whole family on one screen: it reads bytes and hums. It keeps every promise, which shows that the engine
knows no model.

A frame is two codes; the first may be the end. A frame's codes set the speed of an oscillator whose phase
continues from frame to frame. So a window that is rendered out of order, or from the wrong past, changes the
samples.

`Guided` is the same with guidance: a second lane hums without having read the text. `Echoing` hums a long
text in the voice of its beginning.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from compile_cache.strategy import Strategy
from zoo.check import check
from zoo.contract import KV, Batch, Family, Lane, Prompt, Said, Spec, State, View, Window, frame_cap
from zoo.nn.attention import Paged, Turn, attend
from zoo.nn.guidance import merge
from zoo.nn.keys import prefix_key
from zoo.nn.linear import FusedLinear
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table
from zoo.nn.sampling import draw, gumbel
from zoo.request import Option, Request, sampling_options

CODES, END = 32, 0
HEADS, WIDTH = 4, 16
FRAME_SAMPLES = 4
HUM = KV(num_layers=2, num_heads=2, head_dim=8)
TURN = 1 << 15  # one turn of the oscillator, in steps of its phase
NULL = tuple(b"n" * 38)  # the unconditional prompt of the second lane; it fills more than two pages


class ToyState(State):
    """Adds the sampling values, the strength of guidance, and the oscillator's phase [S+1], int64 so that
    sums are exact."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    cfg_scale: Tensor
    phase: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype):
        super().__init__(spec, slots, max_frames, dtype, torch.empty(0).device)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)
        self.add("cfg_scale", default=1)
        self.add("phase", dtype=torch.int64)


class Layer(nn.Module):
    def __init__(self, kv: KV):
        super().__init__()
        self.dim = kv.head_dim
        self.norm = RMSNorm(WIDTH, 1e-6)
        self.qkv = FusedLinear(WIDTH, (HEADS * kv.head_dim, kv.row_values, kv.row_values))
        self.out = nn.Linear(HEADS * kv.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv(self.norm(x)))  # [T, H, dim]
        return x + self.out(attend(q, k, v, paged, self.dim**-0.5, Turn(cos, sin)).flatten(1))


class Toy(Family[ToyState]):
    def __init__(self, max_frames: int = 60, seed: int = 5, kv: KV = HUM, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.device, self.dtype, self.strategy = torch.empty(0).device, dtype, Strategy()
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
            window=Window(sizes=(1, 4, 25)),
            options=sampling_options(temperature=1.0, top_k=0, top_p=1.0),
            piece_s=6,
        )
        self.bytes = nn.Embedding(256, WIDTH)
        self.codes = nn.Embedding(2 * CODES, WIDTH)
        self.layers = nn.ModuleList(Layer(kv) for _ in range(kv.num_layers))
        self.heads = nn.Linear(WIDTH, 2 * CODES, bias=False)
        self.after = nn.Embedding(CODES, CODES)  # first code -> logits that are added for the second code
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.25
        self.to(dtype).eval().requires_grad_(False)

    def prompt(self, request: Request) -> Prompt:
        values = check(request, self.spec)
        keys = tuple(request.text.encode())
        cap = frame_cap(self.spec, request, len(keys), self.spec.max_frames)
        slot = {"seed": request.seed, **values}
        return Prompt(self.bytes(torch.tensor(keys)), keys, cap, slot, usage={"input_tokens": len(keys)})

    def state(self, slots: int, max_frames: int | None = None) -> ToyState:
        return ToyState(self.spec, slots, max_frames or self.spec.max_frames, self.dtype)

    def embed(self, state: ToyState, slots: Tensor) -> Tensor:
        return self.codes(state.last_frame(slots) + CODES * torch.arange(2)).sum(1)

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        cos, sin = rope_table(batch.positions, self.spec.kv.head_dim, 1e4, inputs.dtype)
        for i, layer in enumerate(self.layers):
            inputs = layer(inputs, cos, sin, Paged(batch, i))
        return inputs

    def emit(self, state: ToyState, slots: Tensor, h: Tensor) -> None:
        how = state.temperature[slots], state.top_k[slots], state.top_p[slots]
        logits = self.scores(state, slots, h)
        noise = gumbel(state.seed[slots], state.steps[slots], range(2), CODES)
        first = draw(logits[:, 0], *how, noise[:, 0])
        second = draw(logits[:, 1] + self.after(first), *how, noise[:, 1])
        state.append(slots, torch.stack((first, second), 1), first == END)

    def scores(self, state: ToyState, slots: Tensor, h: Tensor) -> Tensor:
        """h [B, D] -> [B, 2, V]"""
        return self.heads(h).unflatten(-1, (2, CODES)).float()

    def render(self, state: ToyState, view: View) -> tuple[Tensor, Tensor]:
        codes, frame = state.window(view), torch.arange(view.frames)  # [B, F, K]
        # [B, F], different for any two different frames
        speed = (codes * CODES ** torch.arange(codes.shape[-1])).sum(-1) * (frame < view.count[:, None])
        steps = speed[..., None].expand(-1, -1, FRAME_SAMPLES).flatten(1)  # [B, N]
        phase = state.phase[view.slots][:, None] + steps.cumsum(1)  # [B, N]
        state.phase[view.slots] = phase[:, -1]
        return (phase % TURN * (2 * math.pi / TURN)).sin(), view.count * FRAME_SAMPLES


class Guided(Toy):
    """A toy with two lanes. The second reads NULL instead of the text, so the prompts differ in length; then
    both read the same frames."""

    def __init__(self) -> None:
        super().__init__()
        options = (
            *self.spec.options,
            Option("cfg_scale", float, "strength of guidance; 1 is off", 1.0, (0, 100)),
        )
        self.spec = replace(self.spec, variant="guided", lanes=2, options=options)

    def prompt(self, request: Request) -> Prompt:
        prompt = super().prompt(request)
        prompt.null = Lane(self.bytes(torch.tensor(NULL)), NULL)
        return prompt

    def embed(self, state: ToyState, slots: Tensor) -> Tensor:
        return super().embed(state, slots).repeat(2, 1)

    def scores(self, state: ToyState, slots: Tensor, h: Tensor) -> Tensor:
        """h [2 B, D] -> [B, 2, V]"""
        return merge(super().scores(state, slots, h), state.cfg_scale[slots])


class Echoing(Toy):
    """A toy with a random voice: a long text continues in the voice of its first piece."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, variant="echoing", keeps_voice=True)

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        prompt = self.prompt(request)
        heard = self.codes(said.frames + CODES * torch.arange(2)).sum(1)  # [F, D]
        keys = tuple(prefix_key(*frame) for frame in said.frames.tolist())
        prompt.inputs, prompt.prefix_keys = torch.cat((heard, prompt.inputs)), keys + prompt.prefix_keys
        return prompt


TOYS = {"toy": Toy, "toy_guided": Guided, "toy_echoing": Echoing}
