"""The operators of kernels_operators.cpp, compared with the same operators as written in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compile_cache import choices
from zoo import kernels
from zoo.nn.attention import paged_attention
from zoo.nn.frame_attention import attend_and_grow
from zoo.nn.linear import SwiGLU
from zoo.nn.pack import pack
from zoo.nn.packed import BlockedSwiGLU, PackedLinear
from zoo.nn.sampling import GREEDY, draw_inline

PAGE = 16


pytestmark = pytest.mark.usefixtures("built")


def plain(call):
    with kernels.plain():
        return call()


def test_operators_of_cpp_take_the_place_of_those_in_torch_unless_all_is_plain():
    x = torch.ones(2)
    assert kernels.has_operators(x) and not plain(lambda: kernels.has_operators(x))
    traced = torch.compile(
        lambda x: x + 1 if kernels.has_operators(x) else x + 2, backend="eager", fullgraph=True
    )
    assert traced(x).tolist() == [2.0, 2.0]


def launch(lengths: list[int], dtype: torch.dtype, kv_heads: int = 2, groups: int = 3, width: int = 16):
    """Return a launch with one query per sequence of `lengths` positions, over shuffled pages. Unwritten rows
    are NaN."""
    generator = torch.Generator().manual_seed(len(lengths))
    pages = max(-(-length // PAGE) for length in lengths)
    rows = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages) * 2 * PAGE
    kv = torch.full((rows.numel() * 2 * PAGE, kv_heads, width), torch.nan)
    for sequence, length in zip(rows, lengths, strict=True):
        for i in range(length):
            at = sequence[i // PAGE] + i % PAGE
            kv[at], kv[at + PAGE] = torch.randn(2, kv_heads, width, generator=generator)
    q = torch.randn(len(lengths), kv_heads * groups, width, generator=generator)
    return (
        q.to(dtype),
        kv.to(dtype),
        rows,
        torch.tensor(lengths),
        torch.arange(len(lengths) + 1),
        PAGE,
        width**-0.5,
    )


def attend(*launch):
    return torch.ops.zoo.paged_attention_cpp.default(*launch)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("lengths", [[1], [16, 17], [5, 300, 33, 1, 64]], ids=str)
def test_attention_equals_torch(lengths, dtype, most, threads):
    q, kv, *rest = launch(lengths, dtype)
    torch.set_num_threads(threads)
    found = attend(q, kv, *rest)
    expected = plain(lambda: paged_attention(q.double(), kv.double().nan_to_num(0), *rest))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=most)


def test_attention_of_a_row_depends_on_neither_the_others_nor_the_threads():
    q, kv, rows, lengths, starts, *rest = launch([40, 700, 3], torch.float32)
    together = attend(q, kv, rows, lengths, starts, *rest)
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        for b in range(3):
            alone = attend(q[b : b + 1], kv, rows[b : b + 1], lengths[b : b + 1], starts[:2], *rest)
            assert torch.equal(alone, together[b : b + 1])


def test_prompts_and_other_dtypes_are_left_to_torch():
    q, kv, *rest = launch([20], torch.float64)
    kv = kv.nan_to_num(0)
    assert torch.equal(attend(q, kv, *rest), plain(lambda: paged_attention(q, kv, *rest)))
    rows, lengths, _, *rest = rest
    prompt, starts = torch.randn(20, 6, 16), torch.tensor([0, 20])
    where = kv.float(), rows, lengths, starts, *rest
    assert torch.equal(attend(prompt, *where), plain(lambda: paged_attention(prompt, *where)))


@pytest.mark.parametrize("top_k", [0, 1, 5, 500])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_draws_equal_torch(top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(60, 500, generator=generator)
    logits[:25, 100:130] = -torch.inf
    logits[40] = -torch.inf
    logits[50, 7], logits[51, 3] = torch.nan, torch.nan  # a NaN is drawn, so that it is seen
    heat = torch.linspace(0, 2, 60)
    noise = torch.rand(60, 3, 500, generator=generator).log().neg().log().neg()[:, 1]  # rows lie apart
    settings = heat, torch.full((60,), top_k), torch.full((60,), top_p), noise
    found = draw_inline(logits, *settings)
    assert heat[0] <= GREEDY and torch.equal(found, plain(lambda: draw_inline(logits, *settings)))
    torch.set_num_threads(3)
    assert torch.equal(found, draw_inline(logits, *settings))


FRAMES = {
    "qwen3_tts": {"norms": True},
    "csm": {},
    "fish_s2": {"is_paired": True, "is_rounded": True},
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_attention_within_a_frame_equals_torch(name, dtype, atol):
    """The first pass has two tokens, and the others have one. q, k and v are parts of one product."""
    generator = torch.Generator().manual_seed(0)
    how, (heads, kv_heads, dim, positions) = dict(FRAMES[name]), (6, 2, 16, 5)
    if how.get("norms"):
        weights = [1 + torch.rand(dim, generator=generator).to(dtype) for _ in range(2)]
        how["norms"] = *weights, 1e-5
    angle = torch.rand(positions, dim // 2, generator=generator)
    angle = angle.repeat_interleave(2, -1) if how.get("is_paired") else torch.cat((angle, angle), -1)
    caches = [torch.full((3, 2, kv_heads, positions, dim), torch.nan) for _ in range(2)]
    for first, count in ((0, 2), (2, 1), (3, 1), (4, 1)):
        product = torch.randn(3, count, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        q, k, v = product.split((heads, kv_heads, kv_heads), 2)
        where = angle.cos(), angle.sin(), dim**-0.5, torch.tensor([first])
        mixed, caches[0] = attend_and_grow(q, k, v, *where, caches[0], **how)
        with kernels.plain():
            expected, caches[1] = attend_and_grow(q, k, v, *where, caches[1], **how)
        assert mixed.dtype == dtype and mixed.shape == q.shape
        torch.testing.assert_close(mixed, expected, rtol=0, atol=atol)
        held = [cache[:, :, :, : first + count] for cache in caches]
        torch.testing.assert_close(*held, rtol=0, atol=atol)
        alone, _ = attend_and_grow(q[1:2], k[1:2], v[1:2], *where, caches[0][1:2], **how)
        assert torch.equal(alone, mixed[1:2])


def test_attention_within_a_frame_refuses_positions_that_it_has_not():
    x, table, cache = torch.zeros(1, 1, 2, 4), torch.zeros(3, 4), torch.zeros(1, 2, 2, 3, 4)
    with pytest.raises(RuntimeError, match="position 3 of 3"):
        attend_and_grow(x, x, x, table, table, 1.0, torch.tensor([3]), cache)


def mlp(width: int, inner: int) -> SwiGLU:
    torch.manual_seed(0)
    made = SwiGLU(width, inner)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
        parameter.data = parameter.bfloat16().float()
    return made


@pytest.mark.parametrize("bits", ["8", "16", "32", "16 and 32"])
@pytest.mark.parametrize("sizes", [(64, 192), (70, 200)], ids=str)
def test_a_gated_mlp_is_one_operator_and_gives_the_same(sizes, bits):
    made, is_int8 = mlp(*sizes), bits == "8"
    if "32" in bits:
        made.down.weight.data *= 1.001
    if bits == "32":
        made.gate_up.weight.data *= 1.001
    x = 30 * torch.randn(2, 9, sizes[0])  # gates from -100 to 100
    expected = made.double()(x.double())
    module = nn.Sequential(made.float())
    with choices.assumed("blocks"):
        pack(module, 0, is_int8=is_int8)
    assert isinstance(module[0], BlockedSwiGLU) and not list(module.parameters())
    found = module(x)
    atol = (0.02 if is_int8 else 1e-6) * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 7)):
            assert torch.equal(module(x[:, rows]), found[:, rows])
    assert module(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(module(x.bfloat16()), module(x.bfloat16().float()).bfloat16(), rtol=0, atol=0)


def test_a_gated_mlp_of_onednn_stays_apart():
    module = nn.Sequential(mlp(64, 64))
    with choices.assumed("onednn"):
        pack(module, 0)
    assert type(module[0]) is SwiGLU and isinstance(module[0].down, PackedLinear)


def test_a_product_says_which_rows_it_takes():
    module = nn.Sequential(mlp(64, 64))
    with choices.assumed("blocks"):
        pack(module, 0)
    with pytest.raises(RuntimeError, match="a weight for rows of 64, and rows of 65"):
        module(torch.zeros(1, 65))


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_compiled_product_of_onednn_equals_the_eager_one(has_bias):
    module = nn.Sequential(nn.Linear(64, 96, bias=has_bias))
    with choices.assumed("onednn"):
        pack(module, 0)
    layer, x = module[0], torch.randn(5, 64)
    assert isinstance(layer, PackedLinear)
    assert torch.equal(torch.ops.zoo.packed_linear.default(x, layer.weight, layer.bias), layer(x))


def rows_of(num: int) -> Tensor:
    return torch.randn(num, 300, generator=torch.Generator().manual_seed(num))


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_a_product_gives_a_row_the_same_result_in_every_tile(bits):
    """From 1 to 20 rows, all sizes of tiles occur."""
    torch.manual_seed(0)
    linear = nn.Linear(300, 200)
    if bits < 32:
        linear.weight.data = linear.weight.bfloat16().float()
    module = nn.Sequential(linear)
    with choices.assumed("blocks"):
        pack(module, 0, is_int8=bits == 8)
    x = rows_of(20)
    alone = torch.cat([module(row[None]) for row in x])
    for num in range(1, 21):
        assert torch.equal(module(x[:num]), alone[:num]), f"{num} rows"
