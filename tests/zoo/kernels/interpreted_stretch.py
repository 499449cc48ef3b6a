"""The GPU's attention over stretches of streams in Triton's interpreter, compared with the plain operator.
test_triton.py runs this file in a new process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from bf16_products import multiply_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.kernels import triton_stretch
from zoo.nn.s3.stretch import PagedLayer, Seen, Stretch, stretch_attention

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, database=None)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYERS, FIRST_ROWS = 2, 3  # FIRST_ROWS: of a chunk, before layer 0


@pytest.fixture(autouse=True, scope="module")
def _numbers():
    with pytest.MonkeyPatch.context() as patch:
        multiply_numbers(patch)
        yield


@dataclass
class Launch:
    """A stretch of `num` positions, in chunks of `chunk`, of several streams. Their past is in layer 1 of
    scattered pages. Data that must not be read is NaN: unwritten places, other pages and layers, keys and
    values of padding, and scores by the distance of what is not seen."""

    streams: list[tuple[int, int, int]]  # start and kept positions, in chunks; count
    num: int
    capacity: int  # in chunks
    chunk: int
    heads: int
    dim: int
    lanes: int = 2
    dtype: torch.dtype = torch.float32
    is_relative: bool = False

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)
        start, kept, count = (torch.tensor(part) for part in zip(*self.streams, strict=True))
        slots = torch.arange(len(self.streams))
        places, width = self.capacity * self.chunk, self.heads * self.dim
        stretch = Stretch(slots, start * self.chunk, count, kept * self.chunk, self.num, places, self.chunk)
        self.seen = Seen(stretch, 1)
        rows = len(slots) * self.lanes
        product = torch.randn(rows, self.num, 3 * width, generator=generator).to(self.dtype)
        is_padding = (torch.arange(self.num) >= count[:, None]).repeat_interleave(self.lanes, 0)
        product[..., width:][is_padding] = torch.nan
        self.qkv = product.split(width, -1)
        row = self.lanes * 2 * width
        self.first = FIRST_ROWS * row
        rows_of_page = 1 + self.chunk // 3  # a layer may begin in the middle of a page
        per_chunk = -(-(FIRST_ROWS + LAYERS * self.chunk) // rows_of_page)
        columns = self.capacity * per_chunk
        order = torch.randperm(columns * len(slots), generator=generator) + 1
        nobodys = torch.zeros(len(slots), 1, dtype=torch.int64)
        self.pages = torch.cat((order.view(len(slots), -1), nobodys), 1)
        arena = torch.full((1 + len(order), rows_of_page * row), torch.nan, dtype=self.dtype)
        layer = PagedLayer(arena, self.pages, self.capacity, self.first + self.chunk * row)
        at = layer.rows(torch.arange(places).expand(len(slots), -1), self.chunk, row)
        is_held = torch.arange(places) < self.seen.start[:, None]
        held = torch.randn(int(is_held.sum()), row, generator=generator).to(self.dtype)
        arena.view(-1, row)[at[is_held]] = held
        self.arena = arena
        self.is_real = ~is_padding
        self.by_distance = self._scores(generator) if self.is_relative else None

    def _scores(self, generator: torch.Generator) -> Tensor:
        """Return scores by distance [B * L, H, Q, distances]."""
        places, rows = self.capacity * self.chunk, len(self.streams) * self.lanes
        distances = min(places + self.chunk, places + self.num) + self.chunk
        is_used = torch.zeros(len(self.streams), self.num, distances, dtype=torch.bool)
        row, query, key = self.seen.mask.nonzero(as_tuple=True)
        is_used[row, query, self.seen.distance[row, query, key] + self.chunk - 1] = True
        is_used = is_used.repeat_interleave(self.lanes, 0)[:, None]
        scores = torch.randn(rows, self.heads, self.num, distances, generator=generator).to(self.dtype)
        return scores.masked_fill(~is_used, torch.nan)

    def run(self, function, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        seen, arena, layers = self.seen, self.arena.to(dtype, copy=True), torch.tensor([0, 7, 1, 0])
        where = (
            arena,
            self.pages,
            layers,
            2,
            self.first,
            seen.index,
            seen.start,
            seen.count,
            seen.num_kept,
            self.chunk,
            self.capacity * self.chunk,
            self.heads,
        )
        qkv = self.qkv if dtype == self.dtype else (part.to(dtype).nan_to_num(0) for part in self.qkv)
        scores = None if self.by_distance is None else self.by_distance.to(dtype)
        return function(*qkv, scores, *where), arena

    def check(self) -> Tensor:
        found, ours = self.run(triton_stretch.stretch_attention, self.dtype)
        expected, theirs = self.run(stretch_attention, torch.float64)
        assert found.dtype == self.dtype and found.isfinite().all()
        at = self.is_real
        torch.testing.assert_close(found[at].double(), expected[at], rtol=0, atol=BOUNDS[self.dtype])
        torch.testing.assert_close(ours[1:].double(), theirs[1:], rtol=0, atol=0, equal_nan=True)
        return found


@st.composite
def launches(draw) -> Launch:
    chunk, capacity = draw(st.integers(1, 20)), draw(st.integers(2, 12))
    num = draw(st.integers(1, 90))
    stream = st.tuples(st.integers(0, 3 * capacity), st.integers(0, capacity - 1), st.integers(0, num))
    streams = draw(st.lists(stream, min_size=1, max_size=3))
    shape = draw(st.sampled_from([(1, 8), (3, 20), (2, 64), (1, 100)]))
    return Launch(
        streams,
        num,
        capacity,
        chunk,
        *shape,
        draw(st.integers(1, 2)),
        draw(st.sampled_from(sorted(BOUNDS, key=str))),
        draw(st.booleans()),
    )


@given(launches())
@EXAMPLES
def test_any_streams(launch):
    launch.check()


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 8, 9, 15, 500])
def test_a_ring_that_is_empty_or_full_or_has_wrapped(start, dtype, is_relative):
    streams = [(start, 2, 70), (start, 0, 57)]
    Launch(streams, 70, 9, 10, 2, 16, dtype=dtype, is_relative=is_relative).check()


def test_streams_do_not_affect_each_other():
    streams = [(0, 0, 60), (3, 1, 50), (40, 5, 60), (7, 0, 0)]
    whole = Launch(streams, 60, 12, 10, 2, 16)
    together, _ = whole.run(triton_stretch.stretch_attention, torch.float32)
    alone = Launch(streams[:1], 60, 12, 10, 2, 16)
    alone.pages, alone.arena = whole.pages[:1], whole.arena
    alone.qkv = tuple(part[:2] for part in whole.qkv)
    found, _ = alone.run(triton_stretch.stretch_attention, torch.float32)
    assert torch.equal(found[alone.is_real], together[:2][alone.is_real])
    assert not together[6:].any()  # these rows are only padding


def test_tensors_with_unequal_strides_are_refused():
    launch = Launch([(0, 0, 20)], 20, 4, 10, 2, 16)
    q, k, v = launch.qkv
    launch.qkv = q, k.transpose(0, 1).contiguous().transpose(0, 1), v
    with pytest.raises(AssertionError, match="lie"):
        launch.run(triton_stretch.stretch_attention, torch.float32)
