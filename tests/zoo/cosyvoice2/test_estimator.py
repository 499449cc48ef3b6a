"""The estimator's own operations for a CPU, compared with torch's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo import kernels
from zoo.nn.conv import CodecState, StateLayout
from zoo.nn.s3.estimator import KERNEL, PAIR, Conv, TransformerBlock, attend, mish, pointwise
from zoo.nn.s3.stretch import Seen, Stretch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_mish_equals_torchs(dtype):
    x = torch.cat((torch.linspace(-30, 30, 601), torch.tensor([-1e4, -100.0, 100.0, 1e4]))).to(dtype)
    torch.testing.assert_close(mish(x), F.mish(x.double()).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_attention_with_a_mask_per_row_equals_torchs(dtype, atol):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 50, 3, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 70, 16, generator=generator, dtype=torch.float64)
    is_seen = torch.rand(2, 1, 50, 70, generator=generator) < 0.5
    is_seen[..., 0] = True
    # queries are not contiguous, as in a block
    q, k, v = (part.to(dtype) for part in (q.transpose(1, 2), k, v))
    mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, -torch.inf)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=is_seen)
    torch.testing.assert_close(attend(q, k, v, mask).double(), truth, rtol=0, atol=atol)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 6), (2, 16), (2, 64), (3, 80)])
@torch.inference_mode()
def test_the_attention_kernel_equals_torchs(heads, dim, dtype, atol, threads, monkeypatch):
    kernels.build()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(dim)
    block, grid, capacity = TransformerBlock(8, heads, dim), 5, 20

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # an empty ring, a partly filled one, and a full one, whose places are read and then overwritten
    starts, counts = torch.tensor([0, 10, 35]), torch.tensor([7, 10, 4])
    slots, kept = torch.tensor([2, 0, 3]), torch.tensor([5, 0, 10])
    seen = Seen(Stretch(slots, starts, counts, kept, 10, capacity, grid), 2)
    mask = torch.zeros(seen.mask.shape, dtype=dtype).masked_fill_(~seen.mask, -torch.inf)
    mask = mask.repeat_interleave(PAIR, 0)[:, None]
    q, k, v = (random(len(slots) * PAIR, 20, heads * dim) for _ in range(3))
    cache = random(4, 2 * capacity + 1, PAIR, 2 * heads * dim)
    ours, theirs, exact = cache.clone(), cache.clone(), cache.double()
    found = block._attend(q, k, v, seen, mask, ours)
    with kernels.plain():
        block._attend(q, k, v, seen, mask, theirs)
        truth = block._attend(q.double(), k.double(), v.double(), seen, mask.double(), exact)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=atol)
    unused = 2 * capacity  # where padding is written, in any order
    assert torch.equal(ours[:, :unused], theirs[:, :unused])
    alone = Seen(Stretch(slots[2:], starts[2:], counts[2:], kept[2:], 10, capacity, grid), 2)
    again = block._attend(q[4:], k[4:], v[4:], alone, mask[4:], cache.clone())
    assert torch.equal(again, found[4:])  # a row does not depend on the others


@torch.inference_mode()
def test_a_convolution_of_rows_in_windows_equals_conv1d():
    generator = torch.Generator().manual_seed(0)
    conv = nn.ModuleList([Conv(6, 4)]).double()
    layout = StateLayout(conv)
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2, 30, 6, generator=generator, dtype=torch.float64)
    truth = F.conv1d(F.pad(x.mT, (KERNEL - 1, 0)), conv[0].weight, conv[0].bias).mT
    conv[0].prepare()
    assert conv[0].weight.mT.is_contiguous()
    rows, heard = x.new_zeros(2, layout.size), []
    for part in x.split((13, 1, 16), 1):
        frames = part.shape[1]
        state = CodecState(layout, rows, frames, torch.full((2,), frames))
        heard.append(conv[0](part, state))
        rows = state.next()
    torch.testing.assert_close(torch.cat(heard, 1), truth)


@torch.inference_mode()
def test_a_pointwise_convolution_equals_conv1d():
    generator = torch.Generator().manual_seed(0)
    conv, x = nn.Conv1d(6, 4, 1), torch.randn(2, 30, 6, generator=generator)
    torch.testing.assert_close(pointwise(x, conv), conv(x.mT).mT)
