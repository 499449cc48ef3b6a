"""The GPU's draws and noise in Triton's interpreter, compared with the plain operators. test_triton.py runs
this file in a new process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo import kernels
from zoo.kernels import triton_sampling
from zoo.nn import sampling

EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True, database=None)
TOP_K, TOP_P = [0, 1, 5, 300, 307], [0.0, 1e-6, 0.3, 0.9, 1.0]


def scores(rows: int, width: int, seed: int = 0) -> Tensor:
    """Return logits: every other row has many ties, also at the edge; the first half has banned tokens."""
    logits = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    logits[::2] = logits[::2].round()  # with zeros of both signs
    logits[: rows // 2, width // 5 : width // 3] = -torch.inf
    return logits


def same_but_where_a_sum_decides(found: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Check that the same entries are kept, unless the mass above one of them equals top_p up to the last
    bits of fp32. The plain version adds it up in another order."""
    expected = sampling._keep_likely(logits, top_k, top_p)
    differing = (found != expected).any(1).nonzero()[:, 0]
    exact = [sampling._keep_likely(logits.double(), top_k, top_p.double() + shift) for shift in (-1e-6, 1e-6)]
    for row in differing.tolist():
        assert (exact[0][row] != exact[1][row]).any(), f"row {row}: {top_k[row]}, {top_p[row]}"
        assert len(differing) == 1, f"rows {differing} all differ"


def test_the_kept_set_equals_that_of_sorting():
    top_k, top_p = (torch.tensor(values) for values in zip(*product(TOP_K, TOP_P), strict=True))
    logits = scores(50, 300)
    both = logits, top_k.repeat(2), top_p.repeat(2)
    assert torch.equal(triton_sampling.keep_likely(*both), sampling._keep_likely(*both))


rows = st.lists(
    st.tuples(st.integers(0, 70), st.sampled_from([0.0, 0.2, 0.5, 0.75, 0.99, 1.0])), min_size=1, max_size=3
)
values = st.sampled_from([-torch.inf, -3.5, -1.0, -1e-30, -0.0, 0.0, 1e-42, 1.0, 1.0000001, 2.0, 40.0])


@given(rows, st.integers(1, 67), st.data())
@EXAMPLES
def test_any_row(settings_by_row, width, data):
    """Values may be tied, denormal, banned, or zeros of both signs."""
    own = [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in settings_by_row]
    top_k, top_p = (torch.tensor(setting) for setting in zip(*settings_by_row, strict=True))
    logits = torch.tensor(own)
    same_but_where_a_sum_decides(triton_sampling.keep_likely(logits, top_k, top_p), logits, top_k, top_p)


def test_nan_does_no_harm():
    logits = torch.full((3, 100), torch.nan)
    logits[1, ::2] = 1.0
    logits[2] = -torch.inf
    kept = triton_sampling.keep_likely(logits, torch.tensor([5, 5, 5]), torch.tensor([0.5, 0.5, 0.5]))
    assert kept[0].isnan().all() and (kept[1, ::2] == 1.0).all() and (kept[2] == -torch.inf).all()


def test_draws():
    """Hot and cold rows with different settings, in views of wider tensors."""
    count, width = 20, 70
    logits, noise = (
        scores(count, width + 9)[:, 3 : 3 + width],
        scores(count, 3 * width, seed=1)[:, width:-width],
    )
    noise = noise.nan_to_num(neginf=0.0)
    temperature = torch.tensor([0.0, 0.7, 1e-38, 1.6]).repeat(5)
    top_k, top_p = torch.tensor([0, 1, 6, 50, 500]).repeat(4), torch.tensor([1.0, 0.8, 0.3, 0.9]).repeat(5)
    how = temperature, top_k, top_p, noise
    drawn = triton_sampling.draw(logits, *how)
    assert drawn.dtype == torch.int64 and torch.equal(drawn, sampling._draw(logits, *how))


def test_draws_from_rows_that_do_not_fit_into_registers(monkeypatch):
    """Of several blocks, the last one not full: hot and cold rows, ties at the edge, and banned tokens."""
    count, width = 40, 300
    monkeypatch.setattr(triton_sampling, "WIDE_SIZES", {"BLOCK": 64})
    logits, noise = (
        scores(count, width + 9)[:, 3 : 3 + width],
        scores(count, 3 * width, seed=1)[:, width:-width],
    )
    temperature = torch.tensor([0.0, 0.7, 1e-38, 1.6]).repeat(10)
    top_k, top_p = (
        torch.tensor([0, 1, 6, 50, 500]).repeat(8),
        torch.tensor([1.0, 0.8, 0.3, 0.9, 0.0]).repeat(8),
    )
    how = temperature, top_k, top_p.sort().values, noise.nan_to_num(neginf=0.0)
    drawn = triton_sampling.draw_wide(logits, *how)
    assert drawn.dtype == torch.int64 and torch.equal(drawn, sampling._draw(logits, *how))


@given(rows, st.integers(1, 67), st.data())
@EXAMPLES
def test_the_edge_of_any_row_that_does_not_fit_into_registers(settings_by_row, width, data):
    """Noise that rises from entry to entry draws the last one that is kept, and noise that falls the first one."""
    own = [data.draw(st.lists(values, min_size=width, max_size=width)) for _ in settings_by_row]
    top_k, top_p = (torch.tensor(setting) for setting in zip(*settings_by_row, strict=True))
    logits, heat = torch.tensor(own), torch.ones(len(own))
    rises = torch.arange(width).expand(len(own), -1) * 1000.0
    for noise in (rises, -rises):
        found = triton_sampling.draw_wide(logits, heat, top_k, top_p, noise)
        expected = sampling._draw(logits, heat, top_k, top_p, noise)
        for row in (found != expected).nonzero()[:, 0].tolist():
            exact = [
                sampling._keep_likely(logits.double(), top_k, top_p.double() + shift)[row]
                for shift in (-1e-6, 1e-6)
            ]
            assert (exact[0] != exact[1]).any(), f"row {row}: {top_k[row]}, {top_p[row]}"


def test_the_first_of_several_ties_is_drawn():
    logits, zero = torch.zeros(2, 33), torch.zeros(2, 33)
    settings_of_rows = torch.tensor([0.0, 1.0]), torch.tensor([0, 5]), torch.tensor([1.0, 0.5])
    assert triton_sampling.draw(logits, *settings_of_rows, zero).tolist() == [0, 0]
    assert triton_sampling.draw_wide(logits, *settings_of_rows, zero).tolist() == [0, 0]


@pytest.mark.parametrize(("first", "streams", "width"), [(0, 1, 40), (1, 15, 64), (3, 2, 1500)])
def test_noise_is_bitwise_equal(first, streams, width):
    seed = torch.tensor([5, 2**40 + 1, -7, 2**63 - 1, -(2**63)])
    step = torch.tensor([0, 3, (1 << 31) + 9, 100000, (1 << 32) + 1])
    found = triton_sampling.uniform(seed, step, first, streams, width)
    assert torch.equal(found, sampling._plain_uniform(seed, step, first, streams, width))


def test_the_operators_on_a_gpu_call_the_kernels(monkeypatch):
    logits, noise, seed = scores(3, 50), scores(3, 50, seed=1).nan_to_num(neginf=0.0), torch.tensor([1, 2, 3])
    settings_of_rows = torch.tensor([0.0, 1.0, 0.7]), torch.tensor([0, 5, 9]), torch.tensor([1.0, 0.5, 0.9])

    def everything() -> list[Tensor]:
        return [
            torch.ops.zoo.draw.default(logits, *settings_of_rows, noise),
            torch.ops.zoo.keep_likely.default(logits, *settings_of_rows[1:]),
            torch.ops.zoo.uniform.default(seed, seed, 1, 2, 50),
        ]

    plain = everything()
    launched = []
    monkeypatch.setattr(kernels, "use_gpu", lambda tensor: launched.append(tensor) or True)
    for found, expected in zip(everything(), plain, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert len(launched) == 3
