"""Print how far Chatterbox in chunks (`zoo serve --chunked`) is from its whole form, in dB.

    python -m benchmarks.chunked MODEL [--codes 100] [--ahead 3 10 25]

The codes are random, so that a model with random weights speaks for as long as wanted. `ahead` is how many codes
behind a chunk the flow reads; the server has `zoo.chatterbox.strategy.AHEAD`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import zoo
from zoo.chatterbox import model
from zoo.chatterbox.strategy import AHEAD, CHUNK
from zoo.contract import View
from zoo.request import Request


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--codes", type=int, default=100)
    parser.add_argument("--ahead", type=int, nargs="+", default=[3, AHEAD, 25])
    options = parser.parse_args()
    whole = rendered(options.model, options.codes, chunked=False)
    print("| codes ahead | mel | mel, first chunk | samples |\n|---|---|---|---|")
    for ahead in options.ahead:
        model.AHEAD = ahead  # type: ignore[attr-defined]
        mel, samples = rendered(options.model, options.codes, chunked=True)
        first = decibels(mel[: 2 * CHUNK], whole[0][: 2 * CHUNK])
        print(
            f"| {ahead} | {decibels(mel, whole[0]):.0f} dB | {first:.0f} dB | {decibels(samples, whole[1]):.0f} dB |"
        )


@torch.inference_mode()
def rendered(path: str, codes: int, chunked: bool) -> tuple[Tensor, Tensor]:
    """Return the mel [F, MELS] and the samples [N] of one speech."""
    family: Any = zoo.load(path, device="cpu", chunked=chunked)
    state = family.state(1, codes)
    family.admit(state, 0, family.prompt(Request(text="Good morning.", max_frames=codes, seed=3)))
    state.tape[0, :, 0] = torch.randint(0, 6000, (codes,), generator=torch.Generator().manual_seed(1))
    state.ready[0] = codes
    part, mels, samples = family._part, list[Tensor](), list[Tensor]()
    family._part = lambda *given: mels.append(part(*given)) or mels[-1]
    size = CHUNK if chunked else codes
    for start in range(0, codes, size):
        count = min(size, codes - start)
        length = family.spec.window.length_bucket(start + count)
        rows = (torch.tensor([value]) for value in (0, start, count))
        view = View(*rows, torch.tensor([start + count == codes]), size, length)
        made, valid = family.render(state, view)
        samples.append(made[0, : valid[0]])
        mels[-1] = mels[-1][0, : 2 * count]
    return torch.cat(mels), torch.cat(samples)


def decibels(made: Tensor, meant: Tensor) -> float:
    error = (made - meant).double().square().mean()
    return float(10 * torch.log10(meant.double().square().mean() / error))


if __name__ == "__main__":
    main()
