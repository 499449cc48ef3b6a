"""What the estimator writes out for a CPU, against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.cosyvoice2.estimator import KERNEL, Conv, attend, mish, pointwise
from zoo.nn.conv import CodecState, StateLayout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_mish(dtype):
    x = torch.cat((torch.linspace(-30, 30, 601), torch.tensor([-1e4, -100.0, 100.0, 1e4]))).to(dtype)
    torch.testing.assert_close(mish(x), F.mish(x.double()).to(dtype))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_attention_with_a_mask_of_each_row(dtype, atol):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 50, 3, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 70, 16, generator=generator, dtype=torch.float64)
    is_seen = torch.rand(2, 1, 50, 70, generator=generator) < 0.5
    is_seen[..., 0] = True
    q, k, v = (part.to(dtype) for part in (q.transpose(1, 2), k, v))  # queries are not contiguous, as in a block
    mask = torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, -torch.inf)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=is_seen)
    torch.testing.assert_close(attend(q, k, v, mask).double(), truth, rtol=0, atol=atol)


@torch.inference_mode()
def test_a_convolution_of_rows_in_windows_is_conv1d():
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
def test_a_convolution_of_one_position():
    generator = torch.Generator().manual_seed(0)
    conv, x = nn.Conv1d(6, 4, 1), torch.randn(2, 30, 6, generator=generator)
    torch.testing.assert_close(pointwise(x, conv), conv(x.mT).mT)
