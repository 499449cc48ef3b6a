"""The position of a window on its tape, while a decoder that looks to both sides turns it into samples.

A window comes with frames before and after it. Each layer computes only the positions that it knows in full,
so its output is a little shorter than its input, until the window alone is left. Positions before the tape's
beginning and after its end are zeros in front of every layer, as the padding of a decoder that is given the
whole tape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.nn.eager import may_follow_values


class Stretch:
    """The positions of a tensor in a decoder, at the rate of the layer that runs next.

    start [B]: the window's first frame. end [B]: the frames that the tape holds. `before` and `after` count
    the positions on both sides of the window; rate is the positions per frame. taped [B, 1, N] says which
    positions lie on the tape.
    """

    def __init__(self, start: Tensor, end: Tensor, frames: int, context: int):
        self.start = start
        self.end = end
        self.frames = frames
        self.rate = 1
        self.before = context
        self.after = context
        self.taped = self._taped()

    def positions(self) -> Tensor:
        """Return the absolute position of each column, at this rate. [B, N] int64"""
        window = torch.arange(-self.before, self.frames * self.rate + self.after, device=self.start.device)
        return self.start[:, None] * self.rate + window

    def _taped(self) -> Tensor:
        at = self.positions()
        return ((at >= 0) & (at < self.end[:, None] * self.rate))[:, None]

    def repeat(self, times: int) -> None:
        """Each position becomes `times` positions."""
        self.rate *= times
        self.before *= times
        self.after *= times
        self.taped = self._taped()

    def shorten(self, edge: int) -> None:
        """A convolution that looks `edge` positions to both sides ran without padding."""
        self.before -= edge
        self.after -= edge
        self.taped = self.taped[..., edge : self.taped.shape[2] - edge]

    def upsample(self, stride: int, padding: int) -> None:
        """A transposed convolution ran whose kernel is two strides long and whose output lacks one stride at
        each end.

        padding: the positions that the whole decoder would cut off the output's beginning.
        """
        self.rate *= stride
        self.before = (self.before - 1) * stride + padding
        self.after = self.after * stride - padding
        self.taped = self._taped()

    def silence(self, x: Tensor) -> Tensor:
        """Write zeros to the positions of x [B, C, N] outside the tape, in place, and return x."""
        return x if may_follow_values(x) and bool(self.taped.all()) else x.mul_(self.taped)
