"""The GPU's attention kernels in Triton's interpreter, compared with the plain operators. test_triton.py runs
this file in a new process, because the interpreter must be chosen before Triton is imported."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from bf16_products import multiply_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import device_kernels
from benchmarks.device_kernels import TURNS, turned
from zoo import kernels
from zoo.kernels import triton_attention
from zoo.nn.attention import _one_sequence, _query_by_query

LAYERS = 2
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EXAMPLES = settings(max_examples=10, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True, scope="module")
def _small_splits():
    with pytest.MonkeyPatch.context() as patch:
        multiply_numbers(patch)
        patch.setattr(device_kernels, "DEVICE", "cpu")
        # so that sequences of a few dozen positions use all splits
        patch.setattr(triton_attention, "MIN_SPLIT", 16)
        patch.setattr(triton_attention, "ONE_PASS", 32)
        # test fp32 here too, because the bounds of bf16 and fp16 are wide
        patch.setattr(triton_attention, "TURNED_WHERE_READ", set(BOUNDS))
        yield


@dataclass
class Launch:
    q: Tensor
    kv: Tensor
    page_table: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor
    page_tokens: int
    scale: float

    @property
    def counts(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def run(self) -> Tensor:
        """Run the kernel over keys and values that are in the pages, of layer 0."""
        rest = self.kv_lens, self.cu_seqlens, self.page_tokens
        return triton_attention.launch(self.q, self.kv, self.page_table, *rest, 0, self.scale)

    def truth(self) -> Tensor:
        """Return the result sequence by sequence, in fp64, without NaN rows."""
        out, kv = torch.zeros(self.q.shape, dtype=torch.float64), self.kv.double().nan_to_num(0)
        edges = self.cu_seqlens.tolist()
        for b, length in enumerate(self.kv_lens.tolist()):
            own = slice(edges[b], edges[b + 1])
            if own.stop > own.start:
                rest = self.page_table[b], length, self.page_tokens, self.scale
                out[own] = _one_sequence(self.q[own].double(), kv, *rest)
        return out


def launch(
    counts: list[int],
    pasts: list[int],
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 16,
    page_tokens: int = 4,
    padding: int = 0,
    columns: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Launch:
    """Return a launch with counts[b] new positions after pasts[b] older ones, over shuffled pages of layer 1.
    Rows that no sequence wrote are NaN, and so are the pages in the tail of the table."""
    generator = torch.Generator().manual_seed(0)
    lengths = [count + past for count, past in zip(counts, pasts, strict=True)]
    columns = max(columns, -(-max(lengths) // page_tokens) + 1)
    page_rows = 2 * LAYERS * page_tokens
    pages = torch.randperm(len(counts) * columns, generator=generator).view(len(counts), columns)
    page_table = pages * page_rows + 2 * page_tokens
    kv = torch.full((len(counts) * columns * page_rows, kv_heads, dim), torch.nan)
    for b, length in enumerate(lengths):
        position = torch.arange(length)
        at = page_table[b, position // page_tokens] + position % page_tokens
        for rows in (at, at + page_tokens):
            kv[rows] = torch.randn(length, kv_heads, dim, generator=generator)
    q = torch.randn(sum(counts) + padding, kv_heads * group, dim, generator=generator)
    cu_seqlens = torch.tensor([0, *np.cumsum(counts)])
    rest = torch.tensor(lengths), cu_seqlens, page_tokens, dim**-0.5
    return Launch(q.to(dtype), kv.to(dtype), page_table, *rest)


def agrees(given_launch: Launch, found: Tensor) -> None:
    assert found.dtype == given_launch.q.dtype and found.shape == given_launch.q.shape
    apart = (found.double() - given_launch.truth()).abs().max()
    assert apart < BOUNDS[found.dtype], f"{apart:.1e} apart"  # false for NaN


shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 8),
        "dim": st.sampled_from([8, 16, 40, 64, 80, 128]),
        "page_tokens": st.sampled_from([1, 4, 7, 16]),
        "columns": st.sampled_from([0, 40]),
        "dtype": st.sampled_from(list(BOUNDS)),
    }
)


@given(shapes, st.lists(st.integers(0, 90), min_size=1, max_size=4))
@EXAMPLES
def test_steps(shape, pasts):
    step = launch([1] * len(pasts), pasts, **shape)
    agrees(step, step.run())


@given(
    shapes,
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(0, 70),
)
@EXAMPLES
def test_stretches_of_prompts(shape, sequences, padding):
    counts, pasts = zip(*sequences, strict=True)
    prompts = launch(list(counts), list(pasts), padding=padding + (sum(counts) == 0), **shape)
    found = prompts.run()
    agrees(prompts, found)
    assert (found[sum(counts) :] == 0).all()


def turning(given_launch: Launch, how: str) -> tuple[tuple[object, ...], Tensor]:
    """Return the arguments of `rotary_paged_attention` for the same launch, before its keys and values are
    written, and the rows that it must write. Queries, keys and values are slices of one matrix."""
    q, kv, counts = given_launch.q, given_launch.kv, given_launch.counts
    num_tokens, (heads, dim), kv_heads = len(q), q.shape[1:], kv.shape[1]
    rows = torch.randn(
        num_tokens, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(1)
    ).to(q.dtype)
    parts = rows.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    at = given_launch.kv_lens[owner] - given_launch.cu_seqlens[owner + 1] + torch.arange(len(owner))
    page = given_launch.page_tokens
    written = given_launch.page_table[owner, at // page] + at % page  # [T], without padding
    kv = kv.clone()
    for new in (written, written + page):
        kv[new] = torch.nan
    spare = torch.full((num_tokens - len(written),), len(kv))  # rows for padding, in a page of no sequence
    kv = torch.cat((kv, torch.zeros(2 * page, *kv.shape[1:], dtype=kv.dtype)))
    first = 2 * page  # rows of layer 0: `launch` writes to layer 1
    where = torch.cat((written, spare)) - first, given_launch.page_table - first
    lengths = given_launch.kv_lens, given_launch.cu_seqlens
    made = turned(how, num_tokens, dim, q.dtype)
    return (q, k, v, made, kv, *where, *lengths, page, 1, given_launch.scale), written


def agrees_with_plain(given_launch: Launch, how: str) -> None:
    """Check the results and all rows of the pages except those of padding."""
    ours, written = turning(given_launch, how)
    (*new, made, kv), plain = turning(given_launch, how)[0][:5], turning(given_launch, how)[0][5:]
    our_kv = ours[4]
    before, page, num_real = our_kv.clone(), given_launch.page_tokens, sum(given_launch.counts)
    found = triton_attention.rotary_paged_attention(*ours)
    expected = torch.ops.zoo.rotary_paged_attention.default(*new, *made, kv, *plain)
    bound = 2 * BOUNDS[found.dtype]
    torch.testing.assert_close(found[:num_real], expected[:num_real], rtol=bound, atol=bound)
    touched = torch.cat((written, written + page))
    torch.testing.assert_close(our_kv[touched], kv[touched], rtol=bound, atol=bound)
    others = torch.ones(len(before), dtype=torch.bool)
    others[touched] = others[-2 * page :] = False
    assert torch.equal(our_kv[others].nan_to_num(7.0), before[others].nan_to_num(7.0))


@given(shapes, st.lists(st.integers(0, 90), min_size=1, max_size=4), st.sampled_from(TURNS))
@EXAMPLES
def test_steps_that_rotate_and_write(shape, pasts, how):
    agrees_with_plain(launch([1] * len(pasts), pasts, **shape), how)


@given(
    shapes,
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(0, 20),
    st.sampled_from(TURNS),
)
@EXAMPLES
def test_stretches_that_rotate_and_write(shape, sequences, padding, how):
    counts, pasts = zip(*sequences, strict=True)
    agrees_with_plain(launch(list(counts), list(pasts), padding=padding + (sum(counts) == 0), **shape), how)


@pytest.mark.parametrize(
    ("counts", "padding"), [([3, 0, 0], 0), ([0, 2, 1], 0), ([1, 0, 0], 2), ([20, *[0] * 19], 0)]
)
@pytest.mark.parametrize("columns", [0, 40])
@pytest.mark.parametrize("kinds", [set(), set(BOUNDS)], ids=["apart", "where they are read"])
def test_a_launch_that_only_looks_like_a_step_rotates_and_writes(
    counts, padding, columns, kinds, monkeypatch
):
    monkeypatch.setattr(triton_attention, "TURNED_WHERE_READ", kinds)
    looks_like_one = launch(counts, [50, 3, 9, *[0] * 17][: len(counts)], padding=padding, columns=columns)
    agrees_with_plain(looks_like_one, "normed and rotated")


@pytest.mark.parametrize(
    ("counts", "padding"), [([3, 0, 0], 0), ([0, 2, 1], 0), ([1, 0, 0], 2), ([40, 0], 0)]
)
def test_as_many_tokens_as_sequences_need_not_be_a_step(counts, padding):
    """Only its sizes make a launch look like a step; it is right for any counts."""
    looks_like_one = launch(counts, [50, 3, 9][: len(counts)], padding=padding)
    agrees(looks_like_one, looks_like_one.run())


def test_splits_of_long_sequences():
    """A split's size depends on the sequence's length if NUM_SPLITS splits of MIN_SPLIT positions are too few.
    A position that no split reads would be noticed, because each adds far more to a result than the bound."""
    lengths = [15, 16, 17, 128, 129, 140, 500]
    step = launch([1] * len(lengths), [length - 1 for length in lengths], group=1, page_tokens=16)
    agrees(step, step.run())


def test_other_sequences_do_not_change_a_bit():
    """A sequence gives the same bits alone, next to others, and with any page table wider than ONE_PASS."""
    together = launch([1, 1, 1], [60, 2, 300], columns=90)
    found = together.run()
    for b in range(3):
        own = slice(b, b + 1)
        for columns in (90, 200):
            page_table = torch.zeros(1, columns, dtype=torch.int64)
            page_table[:, :90] = together.page_table[own]
            alone = replace(
                together,
                q=together.q[own],
                page_table=page_table,
                kv_lens=together.kv_lens[own],
                cu_seqlens=together.cu_seqlens[:2],
            )
            assert torch.equal(alone.run(), found[own])


def test_a_prompt_in_stretches_equals_the_whole_prompt():
    whole = launch([83], [0])
    found = whole.run()
    for start, stop in ((0, 1), (1, 40), (40, 83)):
        stretch = replace(
            whole,
            q=whole.q[start:stop],
            kv_lens=torch.tensor([stop]),
            cu_seqlens=torch.tensor([0, stop - start]),
        )
        torch.testing.assert_close(stretch.run(), found[start:stop], rtol=0, atol=1e-6)


def test_views_are_read_without_a_copy():
    """The rows of a wider page table and queries in a wider tensor need no copy."""
    step = launch([1, 1], [30, 7])
    page_table = torch.full((4, step.page_table.shape[1] + 3), -1)
    page_table[1:3, :-3] = step.page_table
    q = torch.cat((step.q, step.q), 1)[:, : step.q.shape[1]]
    assert torch.equal(replace(step, q=q, page_table=page_table[1:3, :-3]).run(), step.run())


def test_rows_beyond_32_bits():
    """An arena can have more than 2^31 values. Untouched memory costs nothing."""
    step = launch([1], [5], kv_heads=1, group=1, dim=64)
    rows = (1 << 31) // 64 + 64
    kv = torch.empty(rows, 1, 64, dtype=torch.float16)
    assert kv.numel() > 1 << 31
    shift = rows - len(step.kv)
    kv[shift:] = step.kv
    far = replace(step, q=step.q.half(), kv=kv, page_table=step.page_table + shift)
    near = replace(step, q=step.q.half(), kv=step.kv.half())
    assert torch.equal(far.run(), near.run())


def test_the_version_for_other_devices_gives_the_same():
    """It replaces the kernel when tests simulate a GPU without Triton."""
    prompts = launch([5, 0, 1, 30], [3, 4, 70, 0], padding=4)
    torch.testing.assert_close(_query_by_query(**vars(prompts)), prompts.run(), rtol=0, atol=1e-5)


def test_the_operator_on_a_gpu_calls_the_kernel(monkeypatch):
    for counts in ([1, 1, 1], [5, 0, 30]):
        of_a_kind = launch(counts, [60, 4, 7])
        found, expected = (turning(of_a_kind, "normed and rotated")[0] for _ in range(2))
        q, k, v, made, *rest = found
        monkeypatch.setattr(kernels, "use_gpu", lambda tensor: True)
        by_operator = torch.ops.zoo.rotary_paged_attention.default(q, k, v, *made, *rest)
        monkeypatch.undo()
        assert torch.equal(by_operator, triton_attention.rotary_paged_attention(*expected))
        assert torch.equal(found[4].nan_to_num(7.0), expected[4].nan_to_num(7.0))


def test_a_norm_rounds_where_its_family_rounds():
    """In 16 bits the two norms of heads give different bits. The interpreter rounds fp16 like a GPU, but not bf16."""
    written = {}
    for is_wide in (False, True):
        q, k, v, made, kv, where, *_ = turning(
            launch([1] * 8, [3] * 8, dtype=torch.float16), "normed and rotated"
        )[0]
        made = made._replace(is_wide=is_wide)
        turned = triton_attention.turn_and_write(q, k, v, made, kv, where, 4, 1)
        queries, keys = made.both(q, k)
        written[is_wide] = kv[where + 8]
        assert torch.equal(turned, queries) and torch.equal(written[is_wide], keys)
    assert not torch.equal(written[False], written[True])


def test_queries_keys_and_values_may_lie_apart():
    """A norm over all heads leaves them in tensors of different widths."""
    ours, theirs = (turning(launch([1, 1], [30, 7]), "rotated")[0] for _ in range(2))
    q, k, v = (x.contiguous() for x in ours[:3])
    found = triton_attention.rotary_paged_attention(q, k, v, *ours[3:])
    assert torch.equal(found, triton_attention.rotary_paged_attention(*theirs))


class NoWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), f"{func} waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counts", [[1, 1], [4, 0, 9]])
def test_no_launch_waits_for_the_device(counts):
    of_a_kind = launch(counts, [40] * len(counts))
    with NoWaits():
        of_a_kind.run()
