"""Attention over pages: everything between the two matrices of a decoder block.

The cache is a view [rows, H, D] of the byte arena. For a page whose first row is r, layer l keeps its keys
from row r + 2 l n and its values n rows further; n is the number of tokens in a page.

On a GPU, one operator normalizes, rotates, writes and reads. It takes a layer's number, so each block is
compiled separately. On a CPU, the graph does all but the reading, and equal blocks share one compiled region.
Either way a whole step compiles without graph breaks.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from zoo import kernels
from zoo.contract import Batch
from zoo.kernels.operator import operator, written_in_regions
from zoo.nn import flashinfer_attention
from zoo.nn.norm import rms_norm
from zoo.nn.rope import rotate_wide


class Paged:
    """One layer's addresses in a launch: the rows for its new keys, and the first rows of its pages."""

    def __init__(self, batch: Batch, layer: int):
        offset = 2 * layer * batch.page_tokens
        self.batch, self.layer = batch, layer
        self.kv = batch.kv
        self.kv_write_index = batch.kv_write_index + offset  # [T]
        self.page_table = batch.page_table + offset  # [B, P]
        self.kv_lens = batch.kv_lens
        self.cu_seqlens = batch.cu_seqlens
        self.page_tokens = batch.page_tokens


class Turn(NamedTuple):
    """The changes to queries and keys before attention; by default none.

    q_norm and k_norm [D]: the weights of an RMS norm of each head, which comes first. eps: of these norms. is_wide:
    they round once, behind their weights, like `nn.RMSNorm`; otherwise they round like `zoo.nn.norm.RMSNorm`.
    cos and sin [T, D]: a rotation in fp32, rounded to the dtype of queries and keys. is_paired: value 2i rotates
    with 2i + 1, and the table has each angle twice; otherwise value i rotates with i + D / 2.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    is_wide: bool = False
    is_paired: bool = False

    def both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize and rotate queries [T, H, D] and keys [T, Hkv, D]."""
        return self._one(q, self.q_norm), self._one(k, self.k_norm)

    def _one(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None and self.is_wide:
            x = F.rms_norm(x, norm.shape, norm, self.eps)
        elif norm is not None:
            x = rms_norm(x, norm, self.eps)
        if self.cos is None or self.sin is None:
            return x
        return rotate_wide(x, self.cos[:, None], self.sin[:, None], self.is_paired)


UNTURNED = Turn()


def attend(q: Tensor, k: Tensor, v: Tensor, paged: Paged, scale: float, turn: Turn = UNTURNED) -> Tensor:
    """Turn q and k, write k and v to the pages, and attend: q [T, H, D], k and v [T, Hkv, D], causal, grouped
    queries -> [T, H, D]. On a GPU, a step is one launch, or two if its splits have to be merged."""
    if q.device.type == "cuda":
        batch, layer = paged.batch, paged.layer
        where = batch.kv_write_index, batch.page_table, batch.kv_lens, batch.cu_seqlens, batch.page_tokens
        flashinfer = batch.block_tables, batch.seq_lens, batch.attention
        return torch.ops.zoo.rotary_paged_attention.default(
            q, k, v, *turn, batch.kv, *where, layer, scale, *flashinfer
        )
    q, k = turn.both(q, k)
    paged.kv.index_copy_(0, paged.kv_write_index, k)
    paged.kv.index_copy_(0, paged.kv_write_index + paged.page_tokens, v)
    given = q, paged.kv, paged.page_table, paged.kv_lens, paged.cu_seqlens, paged.page_tokens, scale
    has_cpp = kernels.has_operators(q)
    return (torch.ops.zoo.paged_attention_cpp if has_cpp else torch.ops.zoo.paged_attention).default(*given)


# Without the tag the compiler computes cos and sin again for each layer, to be sure of their strides.
@operator("rotary_paged_attention", writes=written_in_regions("kv"), tags=(torch.Tag.flexible_layout,))
def rotary_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    is_wide: bool,
    is_paired: bool,
    kv: Tensor,
    kv_write_index: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    layer: int,
    scale: float,
    block_tables: Tensor | None = None,
    seq_lens: Tensor | None = None,
    attention: str = "auto",
) -> Tensor:
    """Do to q [T, H, D] and k [T, Hkv, D] what `Turn` describes, write keys and values to rows of kv, and run
    `paged_attention`. kv_write_index, page_table and block_tables are those of layer 0; the layer's offset is
    added on reading. Padding tokens may write rows that no sequence reads. block_tables, seq_lens, attention:
    as in `zoo.contract.Batch`."""
    turn = Turn(cos, sin, q_norm, k_norm, eps, is_wide, is_paired)
    new = q, k, v, turn, kv, kv_write_index

    def ours(page_table: Tensor, kv_lens: Tensor) -> Tensor:
        given = page_table, kv_lens, cu_seqlens, page_tokens, layer, scale
        return kernels.on_gpu("triton_attention", "rotary_paged_attention", *new, *given)

    def theirs(block_tables: Tensor | None, seq_lens: Tensor | None) -> Tensor:
        turned = _turn_and_write(*new, page_tokens, layer)
        where = block_tables, seq_lens, page_tokens, layer
        return torch.ops.zoo.flashinfer_decode.default(turned, kv, *where, scale)

    is_possible = block_tables is not None and seq_lens is not None
    if is_possible and flashinfer_attention.takes_over(attention, q, kv, page_tokens, ours, theirs):
        return theirs(block_tables, seq_lens)
    if kernels.use_gpu(q):
        return ours(page_table, kv_lens)
    rest = page_table + 2 * layer * page_tokens, kv_lens, cu_seqlens, page_tokens, scale
    return torch.ops.zoo.paged_attention.default(_turn_and_write(*new, page_tokens, layer), kv, *rest)


def _turn_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    kv: Tensor,
    kv_write_index: Tensor,
    page_tokens: int,
    layer: int,
) -> Tensor:
    """Turn queries and keys, and write keys and values -> turned queries [T, H, D]."""
    if kernels.use_gpu(q):
        given = kv, kv_write_index, page_tokens, layer
        return kernels.on_gpu("triton_attention", "turn_and_write", q, k, v, turn, *given)
    q, k = turn.both(q, k)
    kv_write_index = kv_write_index + 2 * layer * page_tokens
    kv.index_copy_(0, kv_write_index, k)
    kv.index_copy_(0, kv_write_index + page_tokens, v)
    return q


@operator("paged_attention")
def paged_attention(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    scale: float,
) -> Tensor:
    """Attend with q [T, H, D] over the pages of page_table [B, P] -> [T, H, D]. Sequence b has kv_lens[b]
    positions; q[cu_seqlens[b]:cu_seqlens[b+1]] are its last ones. Queries from cu_seqlens[-1] on are padding,
    whose result is zero."""
    given = q, kv, page_table, kv_lens, cu_seqlens, page_tokens, scale
    if q.device.type != "cpu":
        return _query_by_query(*given)
    return torch.ops.zoo.attend_sequences.default(*given)


kernels.cpp_operator(
    "paged_attention_cpp",
    "(Tensor q, Tensor kv, Tensor page_table, Tensor kv_lens, Tensor cu_seqlens, SymInt page_tokens,"
    " float scale) -> Tensor",
)


@operator("attend_sequences")
def attend_sequences(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    scale: float,
) -> Tensor:
    """`paged_attention` on a CPU, one sequence at a time, so that no bit of a result depends on the lengths
    of the other sequences."""
    out = torch.empty_like(q)
    edges, counts = cu_seqlens.tolist(), kv_lens.tolist()
    for b, (start, stop) in enumerate(pairwise(edges)):
        if stop > start:
            out[start:stop] = _one_sequence(q[start:stop], kv, page_table[b], counts[b], page_tokens, scale)
    out[edges[-1] :] = 0
    return out


def backend(device: torch.device) -> str:
    """Return a description of the code that computes attention on a device. Raises ValueError if it is not
    installed."""
    if device.type == "cuda":
        triton = f"Triton {kernels.of_gpu('triton_attention').triton.__version__}"
        theirs = flashinfer_attention.version()
        return triton if theirs is None else f"{triton}; steps by FlashInfer {theirs} where it is faster"
    return "kernels.cpp where steps are compiled, else torch" if device.type == "cpu" else "torch"


def _positions(page_table: Tensor, page_tokens: int, count: int) -> Tensor:
    """Return the row of each position's key: page_table [..., P] -> [..., count]."""
    pages = -(-count // page_tokens)
    within = torch.arange(page_tokens, device=page_table.device)
    return (page_table[..., :pages, None] + within).flatten(-2)[..., :count]


def _query_by_query(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    cu_seqlens: Tensor,
    page_tokens: int,
    scale: float,
) -> Tensor:
    """Attend without knowing a length on the host, like a GPU kernel, so that a launch can be recorded. Reads
    all pages of the page table."""
    token = torch.arange(len(q), device=q.device)
    owner = torch.searchsorted(cu_seqlens[1:], token, right=True)  # [T]
    is_real, owner = owner < len(kv_lens), owner.clamp(max=len(kv_lens) - 1)
    limit = kv_lens[owner] - cu_seqlens[owner + 1] + token + 1  # positions that a query sees
    at = _positions(page_table[owner], page_tokens, page_table.shape[1] * page_tokens)  # [T, n]
    seen = torch.arange(at.shape[1], device=q.device) < limit[:, None]
    k, v = (
        kv[rows].masked_fill(~seen[..., None, None], 0).transpose(1, 2) for rows in (at, at + page_tokens)
    )
    # the queries of a group take the place of the query positions in plain attention
    grouped = q.unflatten(1, (kv.shape[1], -1))  # [T, Hkv, G, D]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return out.flatten(1, 2).masked_fill(~is_real[:, None, None], 0)  # [T, H, D]


def _one_sequence(
    q: Tensor, kv: Tensor, page_table: Tensor, length: int, page_tokens: int, scale: float
) -> Tensor:
    heads, new = kv.shape[1], q.shape[0]
    at = _positions(page_table, page_tokens, length)  # [n]
    k = kv[at].transpose(0, 1)  # [Hkv, n, D]
    v = kv[at + page_tokens].transpose(0, 1)
    key = torch.arange(length, device=q.device)
    causal = key <= key[-new:, None]  # [L, n]
    groups = q.shape[1] // heads
    grouped = rearrange(q, "l (h g) d -> h (g l) d", h=heads)  # [Hkv, G * L, D]
    # torch fuses attention only if there is a dimension for the batch; otherwise it writes all scores
    mask = causal.repeat(groups, 1)
    out = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    return rearrange(out, "h (g l) d -> l (h g) d", l=new).contiguous()  # [L, H, D]
