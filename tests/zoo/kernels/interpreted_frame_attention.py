"""The GPU's attention within a frame in Triton's interpreter, compared with the plain operator.
test_triton.py runs this file in a new process."""

from __future__ import annotations

import pytest
import torch
from bf16_products import multiply_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.kernels import triton_frame_attention
from zoo.nn.frame_attention import frame_attention, grow_frame_attention

EXAMPLES = settings(max_examples=6, deadline=None, derandomize=True, database=None)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (4, 2, 16),
    (6, 3, 24),
    (3, 1, 20),
    (2, 2, 64),
    (16, 2, 32),
]  # query heads, key heads, size of a head


@pytest.fixture(autouse=True, scope="module")
def _numbers():
    with pytest.MonkeyPatch.context() as patch:
        multiply_numbers(patch)
        yield


def projected(
    batch: int, tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Return q, k and v as slices of one matrix."""
    heads, kv_heads, dim = shape
    rows = torch.randn(
        batch, tokens, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(seed)
    )
    parts = rows.to(dtype).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    return [part.unflatten(-1, (-1, dim)) for part in parts]


def table(rows: int, dim: int, is_paired: bool) -> tuple[Tensor, Tensor]:
    angle = torch.arange(rows)[:, None] * 100 ** -(torch.arange(dim // 2) / (dim // 2))
    angle = angle.repeat_interleave(2, 1) if is_paired else angle.repeat(1, 2)
    return angle.cos(), angle.sin()


@given(st.sampled_from(SHAPES), st.integers(1, 2), st.integers(1, 11), st.sampled_from(DTYPES))
@EXAMPLES
def test_all_tokens_see_all_tokens(shape, batch, tokens, dtype):
    arguments = *projected(batch, tokens, shape, dtype, seed=tokens), *table(tokens, shape[2], False), 0.3, 0
    near(triton_frame_attention.frame_attention(*arguments), frame_attention(*arguments), dtype)


@pytest.mark.parametrize(("first", "kept"), [(0, 1), (7, 4), (3, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_some_tokens_see_all_tokens(first, kept, dtype):
    """A part of the queries gets the same results as all of them."""
    (q, k, v), rotation = projected(2, 11, (6, 3, 24), dtype, seed=5), table(11, 24, False)
    some = q[:, first : first + kept]
    found = triton_frame_attention.frame_attention(some, k, v, *rotation, 0.3, first)
    near(found, frame_attention(some, k, v, *rotation, 0.3, first), dtype)
    near(found, frame_attention(q, k, v, *rotation, 0.3, 0)[:, first : first + kept], dtype)


@given(
    st.sampled_from(SHAPES), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans(), st.booleans(),
    st.booleans(), st.sampled_from(DTYPES),
)  # fmt: skip
@EXAMPLES
def test_pass_by_pass_over_a_cache(shape, passes, is_normed, is_paired, is_rounded, dtype):
    """Unwritten positions of the cache are NaN and must not be read."""
    room, dim, first = sum(passes) + 2, shape[2], 0
    ours = plain = torch.full((2, 2, shape[1], room, dim), torch.nan)
    norms = (
        (*torch.randn(2, dim, generator=torch.Generator().manual_seed(dim)).to(dtype), 1e-6)
        if is_normed
        else (None, None, 0.0)
    )
    for tokens in passes:
        qkv, at = projected(2, tokens, shape, dtype, seed=first), torch.tensor([first])
        how = at, *norms, is_paired, is_rounded
        found, ours = grown(triton_frame_attention.grow_frame_attention, qkv, ours, *how)
        expected, plain = grown(grow_frame_attention, qkv, plain, *how)
        near(found, expected, dtype)
        first += tokens
        ours[..., first:, :] = torch.nan
        near(ours[..., :first, :], plain[..., :first, :], dtype)


def grown(attend, qkv, cache, at, q_norm, k_norm, eps, is_paired, is_rounded):
    rotation = table(cache.shape[3], cache.shape[4], is_paired)
    return attend(*qkv, *rotation, 0.3, at, cache, q_norm, k_norm, eps, is_paired, is_rounded)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == expected.dtype and found.isfinite().all()
    # in half precision, a key that is rounded the other way changes its weight
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_tokens_with_unequal_strides_are_refused():
    q, k, v = projected(2, 3, (4, 2, 16), torch.float32, seed=0)
    with pytest.raises(AssertionError, match="lie"):
        triton_frame_attention.frame_attention(
            q, k.transpose(0, 1).contiguous().transpose(0, 1), v, *table(3, 16, False), 1.0, 0
        )
