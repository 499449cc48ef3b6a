"""Measure the cost of guidance: the engine's throughput with two lanes a slot, divided by that with one.

    python benchmarks/guidance.py [--streams 1 4 8] [--requests 8] [--frames 48] [--size mid] [--dtype float32] [--eager] [--json]
    python benchmarks/guidance.py --model DIR ...    a model of the family zonos instead, a random one without ends

The model is a plain transformer. Both variants have the same random weights and generate the same number of
frames for the same number of requests. Every request has its own text; with two lanes, all requests share one
null prompt. Prefix pages are shared, prompts are prefilled in chunks, and reports are read one launch late.
The two engines are warm and alternate, and the best round of each counts. The ratio compares frames per
second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from torch import Tensor, nn

import zoo
from compile_cache.strategy import Strategy
from serving.engine.device.prepare_for_host import cached, prepare_for_host
from serving.engine.engine import Audio, Engine
from zoo.check import check
from zoo.contract import KV, Batch, Family, Lane, Prompt, Spec, State, View, Window, frame_cap
from zoo.nn.attention import Paged, Turn, attend
from zoo.nn.guidance import merge
from zoo.nn.linear import FusedLinear, SwiGLU, Tables
from zoo.nn.norm import RMSNorm
from zoo.nn.rope import rope_table
from zoo.nn.sampling import draw, gumbel
from zoo.request import Option, Request
from zoo.zonos.config import END
from zoo.zonos.model import Zonos, ZonosState

HEAD_DIM, KV_HEADS, BOOKS, CODES = 64, 4, 4, 1024
TEXT, NULL = 120, (0,) * 100  # bytes of a request's text; what the second lane reads instead


@dataclass(frozen=True)
class Size:
    width: int
    inner: int
    layers: int


SIZES = {"tiny": Size(256, 512, 2), "mid": Size(768, 2304, 14)}  # mid: 100 million parameters


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm, self.mlp_norm = RMSNorm(size.width, 1e-6), RMSNorm(size.width, 1e-6)
        self.qkv = FusedLinear(size.width, (size.width, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.mlp = SwiGLU(size.width, size.inner)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, paged: Paged) -> Tensor:
        # [T, H or Hkv, dim]
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in self.qkv(self.norm(x)))
        x = x + self.out(attend(q, k, v, paged, HEAD_DIM**-0.5, Turn(cos, sin)).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class SpeakerState(State):
    """A state that adds the guidance scale of each slot [S+1]."""

    cfg_scale: Tensor

    def __init__(self, spec: Spec, slots: int, max_frames: int, dtype: torch.dtype, device: torch.device):
        super().__init__(spec, slots, max_frames, dtype, device)
        self.add("cfg_scale", default=1)


class Speaker(Family[SpeakerState]):
    """A model that reads bytes, draws four codes a frame until its cap, and renders them unchanged."""

    def __init__(self, size: Size, lanes: int, max_frames: int, dtype: torch.dtype):
        super().__init__()
        self.device, self.dtype, self.strategy = torch.device("cpu"), dtype, Strategy()
        kv = KV(size.layers, KV_HEADS, HEAD_DIM)
        self.spec = Spec(
            family="speaker",
            variant=f"{lanes} lanes",
            frame_shape=(BOOKS,),
            frame_dtype=torch.int64,
            frame_samples=BOOKS,
            sample_rate_hz=100,
            kv=kv,
            width=size.width,
            max_frames=max_frames,
            max_positions=512 + max_frames,
            window=Window(sizes=(1, 4, 25)),
            lanes=lanes,
            options=(Option("cfg_scale", float, "strength of guidance; 1 turns it off", 1.0, (0, 100)),),
        )
        self.bytes = nn.Embedding(256, size.width)
        self.codes = Tables(BOOKS, CODES, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width, 1e-6)
        self.head = nn.Linear(size.width, BOOKS * CODES, bias=False)
        random = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.5
        self.to(dtype).eval().requires_grad_(False)

    def prompt(self, request: Request) -> Prompt:
        keys, slot = tuple(request.text.encode()), {"seed": request.seed, **check(request, self.spec)}
        null = Lane(self.bytes(torch.tensor(NULL)), NULL) if self.spec.lanes == 2 else None
        cap = frame_cap(self.spec, request, len(keys), self.spec.max_frames)
        return Prompt(self.bytes(torch.tensor(keys)), keys, cap, slot, null=null)

    def state(self, slots: int, max_frames: int | None = None) -> SpeakerState:
        return SpeakerState(self.spec, slots, max_frames or self.spec.max_frames, self.dtype, self.device)

    def embed(self, state: SpeakerState, slots: Tensor) -> Tensor:
        rows = self.codes(state.last_frame(slots)).sum(1)  # [B, D]
        return rows.repeat(2, 1) if self.spec.lanes == 2 else rows

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        cos, sin = rope_table(batch.positions, HEAD_DIM, 1e4, inputs.dtype)
        for i, layer in enumerate(self.layers):
            inputs = layer(inputs, cos, sin, Paged(batch, i))
        return self.norm(inputs)

    def emit(self, state: SpeakerState, slots: Tensor, h: Tensor) -> None:
        logits = self.head(h).float().unflatten(-1, (BOOKS, CODES))  # [L B, K, V]
        if self.spec.lanes == 2:
            logits = merge(logits, state.cfg_scale[slots])  # [B, K, V]
        noise = gumbel(state.seed[slots], state.steps[slots], range(BOOKS), CODES)
        one = torch.ones_like(state.cfg_scale[slots]).repeat_interleave(BOOKS)  # [B K]
        frame = draw(logits.flatten(0, 1), one, (50 * one).long(), one, noise.flatten(0, 1)).unflatten(
            0, (-1, BOOKS)
        )
        state.append(slots, frame, torch.zeros_like(state.done[slots]))

    def render(self, state: SpeakerState, view: View) -> tuple[Tensor, Tensor]:
        return state.window(view).flatten(1).float() / CODES, view.count * BOOKS


class Unguided(Zonos):
    """Zonos with one lane: it never reads the prompt without conditions."""

    def prompt(self, request: Request) -> Prompt:
        prompt = super().prompt(request)
        prompt.null = None
        return prompt

    def embed(self, state: ZonosState, slots: Tensor) -> Tensor:
        return self.backbone.rows(state.row[slots])

    def guided(self, state: ZonosState, slots: Tensor, h: Tensor) -> Tensor:
        return self.logits(h)


def endless(path: Path, dtype: torch.dtype, lanes: int) -> Zonos:
    """Return a model of random weights that never draws the end, with one lane or two."""
    family = zoo.load(path, "cpu", str(dtype).removeprefix("torch."))
    assert isinstance(family, Zonos), f"{path} is of the family {family.spec.family}, not of zonos"
    family.backbone.heads.weight[END] = 0
    if lanes == 2:
        return family
    spec = replace(family.spec, lanes=1)
    return Unguided(family.config, spec, family.backbone, family.codec, family.writer).eval()


class Timed:
    """An engine of one such model, and the throughput of a round."""

    def __init__(self, family: Family[Any], streams: int, compile: bool):
        self.family = family
        self.parameters = sum(parameter.numel() for parameter in self.family.parameters())
        prepare_for_host(self.family)
        self.engine = Engine(self.family, max_slots=streams, compile=compile, report_lag=1)
        self.engine.warm(lambda *_: None, cached)
        [self.model] = self.engine.models.values()
        self.rounds = 0

    def round(self, requests: int, frames: int) -> dict[str, float]:
        heard, steps, steps_s = 0, 0, 0.0

        def hear(event: Any) -> None:
            nonlocal heard
            heard += event.frames if isinstance(event, Audio) else 0

        def count(event: str, rows: int, seconds: float) -> None:
            nonlocal steps, steps_s
            if event == "step":
                steps, steps_s = steps + 1, steps_s + seconds

        self.model.runner.observer = count
        texts = np.random.default_rng(self.rounds).integers(97, 123, (requests, TEXT), np.uint8)
        self.rounds += 1
        began, began_cpu = time.perf_counter(), time.process_time()
        for i, text in enumerate(texts):
            said, options = text.tobytes().decode(), {"cfg_scale": 2.0}
            request = Request(text=said, seed=i, max_frames=frames, options=options)
            self.engine.speak(str(i), request, hear)
        while self.engine.turn():
            pass
        took_s = time.perf_counter() - began
        self.model.runner.observer = None
        assert heard == requests * frames, f"received {heard} frames instead of {requests * frames}"
        cpu_ms = (time.process_time() - began_cpu) / heard * 1e3
        rates = {"frames_per_s": heard / took_s, "steps_per_s": steps / took_s, "cpu_ms": cpu_ms}
        return rates | {"steps": steps, "step_ms": steps_s / steps * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    size = SIZES[options.size]

    def made(lanes: int) -> Family[Any]:
        if options.model is None:
            return Speaker(size, lanes, options.frames, dtype)
        return endless(options.model, dtype, lanes)

    result: dict[str, Any] = {
        "size": str(options.model) if options.model else asdict(size),
        "dtype": options.dtype,
        "requests": options.requests,
        "runs": [],
    }
    for streams in options.streams:
        both = {lanes: Timed(made(lanes), streams, not options.eager) for lanes in (1, 2)}
        rounds: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for timed in both.values():
            timed.round(options.requests, 2)
        for _ in range(options.rounds):
            for lanes, timed in both.items():
                rounds[lanes].append(timed.round(options.requests, options.frames))
        one, two = (max(rounds[lanes], key=lambda found: found["frames_per_s"]) for lanes in (1, 2))
        run = {
            "streams": streams,
            "parameters": both[1].parameters,
            "threads": torch.get_num_threads(),
            "one_lane": one,
            "two_lanes": two,
            "pages_shared": both[2].engine.stats()["pages_shared"],
            "ratio": two["frames_per_s"] / one["frames_per_s"],
            # of the best rounds; other programs on the machine change it less
            "cpu_ratio": min(r["cpu_ms"] for r in rounds[1]) / min(r["cpu_ms"] for r in rounds[2]),
        }
        result["runs"].append(run)
        if not options.json:
            ones, twos = (
                f"{found['step_ms']:.1f} ms a step, {found['frames_per_s']:.1f} frames/s"
                for found in (one, two)
            )
            ratios = f"ratio {run['ratio']:.2f}, by CPU time {run['cpu_ratio']:.2f}"
            print(
                f"{streams:3} streams, {options.requests} requests: one lane {ones}; two {twos}; {ratios}",
                flush=True,
            )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
