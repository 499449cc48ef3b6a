"""Copies of pages to the host and back, for streams that are paused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from serving.engine.device.arena import Arena
from serving.engine.device.streams import AsyncCopy, Stream
from zoo.nn.rows import to_device

# Of pages that are copied at once. Pinned memory comes in powers of two, so a whole stream could take twice
# its size on the host.
PIECE_BYTES = 1 << 24


class PageCopies:
    """device: of the model that owns the pages."""

    def __init__(self, arena: Arena, device: torch.device):
        self.arena = arena
        self.device = device
        self.streams = arena.streams

    def save(self, pages: Sequence[int]) -> list[AsyncCopy]:
        """Copy to the host what is written to these pages by now, and by work in flight. In pieces, of which
        the device holds one at a time."""
        return self._save(self.streams.lm, pages)

    def save_past(self, pages: Sequence[int]) -> list[AsyncCopy]:
        """Copy a past to the host, behind the renders in flight. Steps launched later may use its pages."""
        renders = self.streams.renders
        saved = self._save(renders, pages)
        self.streams.lm.wait_for(renders.mark())
        return saved

    def _save(self, stream: Stream, pages: Sequence[int]) -> list[AsyncCopy]:
        def gathered(at: Tensor) -> tuple[Tensor]:
            return (self.arena.by_page[to_device(at, self.device)],)

        return [stream.run(partial(gathered, at)) for at in self._pieces(pages)]

    def restore_past(self, pages: Sequence[int], saved: Sequence[AsyncCopy]) -> None:
        """Write a past to as many other pages, which steps in flight may still use."""
        self.streams.renders.wait_for(self.streams.lm.mark())
        self._restore(self.streams.renders, pages, saved)

    def restore(self, pages: Sequence[int], saved: Sequence[AsyncCopy]) -> None:
        """Write what was saved to as many other pages."""
        self._restore(self.streams.lm, pages, saved)

    def _restore(self, stream: Stream, pages: Sequence[int], saved: Sequence[AsyncCopy]) -> None:
        def write(at: Tensor, values: Tensor) -> tuple[()]:
            self.arena.by_page[to_device(at, self.device)] = values.to(self.device, non_blocking=True)
            return ()

        for at, piece in zip(self._pieces(pages), saved, strict=True):
            [values] = piece.tensors()
            assert len(at) == len(values), f"{len(values)} saved pages are written to {len(at)}"
            stream.run(partial(write, at, values))

    def _pieces(self, pages: Sequence[int]) -> list[Tensor]:
        at = torch.tensor(pages, dtype=torch.int64)
        return list(at.split(max(PIECE_BYTES // self.arena.page_bytes, 1))) if pages else []
