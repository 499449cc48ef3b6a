"""One pass of a codec's decoder over streams whose states are separate rows."""

import torch
from torch import Tensor

from zoo.nn.conv import CodecState


def decode(decoder, codes: Tensor, rows: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples of codes [B, F, K], and the states [B, V] after the first `count` [B] frames."""
    state = CodecState(decoder.layout, rows, codes.shape[1], count)
    return decoder(codes, start, state), state.next()


def decode_latents(decoder, latents: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a new stream's latents [1, D, N], which are `frames` frames, and its state [1,
    V]."""
    zeros = latents.new_zeros(1, decoder.layout.size)
    state = CodecState(decoder.layout, zeros, frames, torch.tensor([frames]))
    return decoder(latents, state), state.next()
