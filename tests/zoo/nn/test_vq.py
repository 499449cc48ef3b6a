"""Our quantizers compared with those of vector-quantize-pytorch 1.32.0: the same rows give the same codes and
latents. The two that we keep are faster, or round as the reference does."""

from __future__ import annotations

import pytest
import torch
from models import family
from torch import Tensor, nn
from vector_quantize_pytorch import FSQ, ResidualVQ

from zoo.higgs_v3.layers import Quantizer
from zoo.nn.vq import SplitVQ
from zoo.voxcpm2.model import FSQ as OurFSQ

CLOSE = {"rtol": 0, "atol": 1e-5}


def copy_linear(theirs: nn.Linear, ours: nn.Linear | nn.Conv1d) -> None:
    """Copy the weights of a linear map to a linear layer, or to a convolution that is 1 wide."""
    theirs.weight.copy_(ours.weight.flatten(1))
    if ours.bias is not None:
        theirs.bias.copy_(ours.bias)


def residual(table: Tensor, way_in: nn.Conv1d, way_out: nn.Conv1d) -> ResidualVQ:
    """Return one branch of SplitVQ as a ResidualVQ: table [K, V, dim]. Its projections have biases, ours do
    not."""
    books, size, dim = table.shape
    theirs = ResidualVQ(
        dim=way_in.in_channels, codebook_dim=dim, num_quantizers=books, codebook_size=size
    ).eval()
    copy_linear(theirs.project_in, way_in)
    copy_linear(theirs.project_out, way_out)
    theirs.project_in.bias.zero_()
    theirs.project_out.bias.zero_()
    for layer, rows in zip(theirs.layers, table, strict=True):
        layer._codebook.embed.copy_(rows[None])
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("used", [2, 5, 16])
def test_split_vq_equals_two_residual_quantizers(used):
    torch.manual_seed(used)
    ours = SplitVQ(16, used, 32, 8, 24)
    for parameter in ours.parameters():
        parameter.normal_()
    ours.usage.uniform_(0.5, 3)
    ours.prepare()
    assert not {name for name, _ in ours.named_parameters()} & {"sums", "usage"}  # the table replaces them
    branches = (
        residual(ours.table[:1], ours.first_in, ours.first_out),
        residual(ours.table[1:], ours.rest_in, ours.rest_out),
    )
    codes = torch.randint(32, (3, 50, used))
    parts = codes[..., :1], codes[..., 1:]
    decoded = sum(branch.get_output_from_indices(part) for branch, part in zip(branches, parts, strict=True))
    torch.testing.assert_close(ours.decode(codes), decoded.mT, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_quantizer_of_higgs_finds_the_nearest_rows():
    """Each level has projections in and out. vector-quantize-pytorch finds the rows by the definition, and
    leaves the remainder to the next level."""
    torch.manual_seed(0)
    ours = Quantizer(family("higgs_v3").config.codec)
    for parameter in ours.parameters():
        parameter.normal_(std=0.3)
    latent = torch.randn(3, 50, ours.books[0].project_in.in_features)
    codes, left = ours.encode(latent), latent
    assert len(codes.unique()) > 20
    for k, book in enumerate(ours):
        distance = (book.project_in(left)[:, :, None] - book.rows).norm(dim=-1)
        assert torch.equal(codes[..., k], distance.argmin(-1))
        left = left - book(codes[..., k])


@torch.no_grad()
def test_the_fsq_of_voxcpm_equals_theirs_that_preserves_symmetry():
    """Their default widens the levels by a thousandth, so that values near a bound get another level."""
    torch.manual_seed(0)
    ours = OurFSQ(24, 6, 9)
    settings = {"levels": [19] * 6, "dim": 24, "return_indices": False}
    theirs, default = FSQ(**settings, preserve_symmetry=True).eval(), FSQ(**settings).eval()
    for module in (theirs, default):
        copy_linear(module.project_in, ours.narrow)
        copy_linear(module.project_out, ours.widen)
    x = 3 * torch.randn(4, 200, 24)
    torch.testing.assert_close(ours(x), theirs(x)[0], **CLOSE)
    assert (ours(x) - default(x)[0]).abs().max() > 1e-3
