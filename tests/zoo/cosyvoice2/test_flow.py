"""The flow's cache of a stream, and how a GPU updates it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from models import family
from torch import Tensor

from compile_cache.counts import counts
from compile_cache.lower import lower
from compile_cache.strategy import Parts
from zoo.cosyvoice2.flow import Flow, FlowCache, PagedCache, past_of
from zoo.cosyvoice2.strategy import ADVANCE
from zoo.nn.rows import zeros
from zoo.nn.s3.sizes import GRID, LOOKAHEAD, MELS, TOKEN_FRAMES
from zoo.nn.s3.stretch import Seen, Stretch

STATM = Path("/proc/self/statm")
CAPACITY, SLOTS = 4 * GRID, 6


@pytest.mark.skipif(not STATM.exists(), reason="memory use is read from /proc")
def test_unwritten_zeros_take_no_memory():
    def resident_pages() -> int:
        return int(STATM.read_text().split()[1])

    before = resident_pages()
    made = zeros(torch.ones(1, dtype=torch.bfloat16), 4, 32 << 20)  # 256 MiB
    assert (resident_pages() - before) * 4096 < 32 << 20
    assert made.shape == (4, 32 << 20) and made.dtype == torch.bfloat16
    assert not made[2, -5:].any()
    made[2, -5:] = 1
    assert made[2].sum() == 5


@pytest.fixture(scope="module")
def flow() -> Flow:
    return deepcopy(family("cosyvoice2").flow).double()


def stretch(streams: list[tuple[int, int, int]], tokens: int) -> Stretch:
    """Return a stretch. streams: start, number of kept positions, and count of each."""
    start, kept, count = (torch.tensor(part) for part in zip(*streams, strict=True))
    slots = torch.tensor([4, 1, 5, 0, 2])[: len(streams)]
    return Stretch(slots, start, count, kept, tokens, CAPACITY)


PAGES = 7  # of a chunk


def paged(flow: Flow, rows: int, held: FlowCache) -> PagedCache:
    """Return a cache in scattered pages, which hold NaN. Page 0 is nobody's."""
    past, num_chunks = past_of(flow.config), held.capacity // GRID
    num = PAGES * num_chunks
    page_rows = -(-past.values // (past.row_values * PAGES))
    like = flow.output.bias
    arena = like.new_full((1 + rows * num, page_rows * past.row_values), torch.nan)
    order = 1 + torch.randperm(rows * num, generator=torch.Generator().manual_seed(1)).view(rows, num)
    return PagedCache(held, arena, torch.cat((order, torch.zeros(rows, 1, dtype=torch.int64)), 1))


@pytest.mark.slow
@torch.inference_mode()
def test_pages_hold_the_past_like_rows(flow):
    """The streams advance from stretch to stretch until their rings have wrapped around."""
    generator = torch.Generator().manual_seed(0)
    theirs = FlowCache(flow, SLOTS, CAPACITY)
    ours = paged(flow, 3, FlowCache(flow, SLOTS, CAPACITY))
    starts = torch.tensor([0, 0, 0])
    for tokens in (GRID, 2 * GRID, 2 * GRID, GRID, 2 * GRID):
        counts = torch.tensor([tokens, GRID, 0])
        whole = stretch([(int(s), GRID, int(n)) for s, n in zip(starts, counts, strict=True)], tokens)
        codes = torch.randint(flow.config.num_codes, (3, tokens + LOOKAHEAD), generator=generator)
        prompt = torch.randn(3, TOKEN_FRAMES * tokens, MELS, generator=generator).double()
        speaker = torch.randn(3, flow.config.speaker, generator=generator).double()
        given = codes, counts + LOOKAHEAD, prompt, speaker, whole
        truth = flow(*given, theirs)
        found = flow(*given, ours)
        for row, n in enumerate(TOKEN_FRAMES * counts):
            torch.testing.assert_close(found[row, :n], truth[row, :n], rtol=0, atol=1e-10)
        starts = starts + counts
    torch.testing.assert_close(
        ours.estimator_past[:, whole.slots[:2]], theirs.estimator_past[:, whole.slots[:2]]
    )
    assert starts[0] > 2 * CAPACITY - GRID
    rows, pages = theirs.chunk_of(int(whole.slots[0]), 2), ours.pages[0, 2 * PAGES : 3 * PAGES]
    torch.testing.assert_close(ours.arena[pages].flatten()[: len(rows)], rows)
    assert "estimator" not in vars(ours.ends)


class Speech:
    def __init__(self, flow: Flow):
        self.flow = flow

    def move(self, *given: object) -> Tensor:
        return self.flow.advance(*given)


STREAMS = [(0, 0, 50), (50, GRID, 31), (175, 0, 50), (1000, 2 * GRID, 0), (25, GRID, 7)]


def some(num: int, tokens: int) -> Stretch:
    return stretch([(start, kept, min(n, tokens)) for start, kept, n in STREAMS[:num]], tokens)


@pytest.mark.compile
@torch.inference_mode()
def test_a_step_of_the_solver_is_one_graph_for_any_number_of_streams_and_frames(flow, _as_on_gpu):
    fast, before = lower(Speech(flow).move, Parts((ADVANCE,))), counts().graphs
    generator = torch.Generator().manual_seed(0)
    held = paged(flow, len(STREAMS), FlowCache(flow, SLOTS, CAPACITY))
    for tensor in (held.arena, held.estimator_past):
        tensor.normal_(generator=generator)
    for k, (num, tokens) in enumerate([(3, 50), (5, 75), (2, 27)]):
        seen = Seen(some(num, tokens), TOKEN_FRAMES)
        x = torch.randn(num, TOKEN_FRAMES * tokens, MELS, generator=generator).double()
        pairs = torch.randn(num, 2, TOKEN_FRAMES * tokens, 3 * MELS, generator=generator).double()

        def moved(
            function: object, k: int = k, given: tuple[object, ...] = (x, pairs), seen: Seen = seen
        ) -> tuple[Tensor, ...]:
            past, arena = held.estimator_past[k].clone(), held.arena.clone()
            caches = PagedCache(held.ends, arena, held.pages[: len(seen.slots)].clone()).estimator[k]
            numbers = flow.estimator.numbers[k].clone()
            rest = (
                flow.estimator.shifts[k].clone(),
                flow.strides[k].clone(),
                seen,
                None,
                past,
                caches,
                numbers,
            )
            return function(*given, *rest), past, arena[1:]

        for found, truth in zip(moved(fast), moved(flow.advance), strict=True):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-10)
        assert "advance" not in vars(flow)
    assert counts().graphs - before == 1
