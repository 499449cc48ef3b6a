"""Vector quantization: codes are replaced by rows of codebooks.

ResidualVQ of vector-quantize-pytorch gives the same latents as SplitVQ (tests/zoo/nn/test_vq.py). It is not
used because it stacks all codebooks again for each decoding (11 ms for four frames of Qwen3-TTS on one core;
0.4 ms here).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.nn.linear import Parted

MIN_USAGE = 1e-5


class SplitVQ(Parted):
    """The way from codes to latents of residual vector quantization in two branches. One is the first
    codebook ("semantic"); in the other, each codebook quantizes the residual of the one before. Each branch
    has its own projections in (width -> dim), which only an encoder applies, and out (dim -> width).

    A checkpoint keeps each row as in training: a sum of vectors, and how often the row was used. `prepare`
    divides them once, for the first `used` codebooks. Source: Defossez et al., "Moshi" (2024), section 3.3;
    transformers, models/mimi, MimiSplitResidualVectorQuantizer.
    """

    table: Tensor  # [K, V, dim], after prepare()

    def __init__(self, codebooks: int, used: int, size: int, dim: int, width: int):
        super().__init__((size,) * codebooks)  # the checkpoint keeps the codebooks apart
        self.sums = nn.Parameter(torch.empty(codebooks * size, dim))
        self.usage = nn.Parameter(torch.empty(codebooks * size))
        self.first_in = nn.Conv1d(width, dim, 1, bias=False)
        self.first_out = nn.Conv1d(dim, width, 1, bias=False)
        self.rest_in = nn.Conv1d(width, dim, 1, bias=False)
        self.rest_out = nn.Conv1d(dim, width, 1, bias=False)
        self.used = used

    @torch.no_grad()
    def prepare(self) -> None:
        """Precompute the tables and free their sources. Call this once, after the weights are loaded."""
        wide = torch.promote_types(self.sums.dtype, torch.float32)
        table = self.sums.to(wide) / self.usage.to(wide).clamp(min=MIN_USAGE)[:, None]
        table = table.unflatten(0, (len(self.parts), -1))[: self.used]  # [K, V, dim]
        self.register_buffer("table", table.to(self.sums.dtype).contiguous(), persistent=False)
        del self.sums, self.usage

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, F, K] -> latent [B, width, F]."""
        first = torch.arange(self.used, device=codes.device) * self.table.shape[1]
        rows = F.embedding(codes + first, self.table.flatten(0, 1))  # [B, F, K, dim]
        return self.first_out(rows[:, :, 0].mT) + self.rest_out(rows[:, :, 1:].sum(2).mT)


class DirectionVQ(nn.Module):
    """One level of residual vector quantization: projections in (width -> dim) and out, and the codebook's
    rows. The nearest row is the one whose direction is most similar.

    vector-quantize-pytorch's VectorQuantize finds rows by direction, too, but needs rows of length one. The
    published rows have other lengths, which the next level and the decoder need. Source: improved VQGAN
    (arXiv 2110.04627), section 3.2.
    """

    def __init__(self, size: int, dim: int, width: int):
        super().__init__()
        self.project_in = nn.Conv1d(width, dim, 1)
        self.rows = nn.Parameter(torch.empty(size, dim))
        self.project_out = nn.Conv1d(dim, width, 1)

    def nearest(self, latent: Tensor) -> Tensor:
        """Return the nearest codes [B, F] of latents [B, width, F]."""
        direction = F.normalize(self.project_in(latent).mT, dim=-1)  # eps 1e-12, as in the references
        return F.linear(direction, F.normalize(self.rows, dim=-1)).argmax(-1)

    def forward(self, code: Tensor) -> Tensor:
        """Return the latents [B, width, F] of codes [B, F]."""
        return self.project_out(F.embedding(code, self.rows).mT)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return the latent of each code [V, width], without the bias [width], and the bias, in fp64."""
        out = self.project_out
        assert out.bias is not None, "these codebooks have a bias"
        return self.rows.double() @ out.weight[:, :, 0].double().T, out.bias.double()
