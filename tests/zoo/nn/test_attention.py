"""Attention over pages, compared with plain causal attention over whole sequences."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.contract import Batch
from zoo.nn.attention import Paged, _one_sequence, _query_by_query, attend, backend

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 16, 3
SCALE = DIM**-0.5
GENERATOR = torch.Generator().manual_seed(0)


@dataclass
class Sequence:
    """q [T, H, D], k and v [T, Hkv, D] of a whole sequence, and the number of its positions in the cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    pages: list[int]
    length: int = 0

    def truth(self) -> Tensor:
        """Return plain causal attention over the whole sequence."""
        q, k, v = (part.transpose(0, 1) for part in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=SCALE, enable_gqa=True
        ).transpose(0, 1)


class Cache:
    """Sequences over shuffled pages. Unwritten rows have large values, so that reading them changes the
    result."""

    def __init__(self, lengths: list[int], page_tokens: int, seed: int = 0):
        self.page_tokens = page_tokens
        need = [-(-length // page_tokens) for length in lengths]
        dealt = random.Random(seed).sample(range(1, sum(need) + 1), sum(need))
        self.kv = torch.full(((sum(need) + 1) * 2 * LAYERS * page_tokens, KV_HEADS, DIM), 1e4)
        self.sequences = []
        for length, pages in zip(lengths, need, strict=True):
            shapes = (HEADS, KV_HEADS, KV_HEADS)
            parts = [torch.randn(length, heads, DIM, generator=GENERATOR) for heads in shapes]
            self.sequences.append(Sequence(*parts, pages=[dealt.pop() for _ in range(pages)]))

    def row(self, sequence: Sequence, position: int) -> int:
        page, within = divmod(position, self.page_tokens)
        return sequence.pages[page] * 2 * LAYERS * self.page_tokens + within

    def launch(self, which: list[int], counts: list[int], layer: int, padding: int = 0) -> list[Tensor]:
        """Run the next counts[i] positions of each sequence which[i] in one launch, followed by `padding`
        rows of page 0 -> outputs."""
        parts: dict[str, list[Tensor]] = {name: [] for name in "qkv"}
        positions: list[int] = []
        kv_write_index: list[int] = []
        kv_lens: list[int] = []
        cu_seqlens = [0]
        columns = max(len(self.sequences[i].pages) for i in which) + 1
        page_table = torch.zeros(len(which) + padding, columns, dtype=torch.int64)
        for b, (i, count) in enumerate(zip(which, counts, strict=True)):
            sequence = self.sequences[i]
            new = range(sequence.length, sequence.length + count)
            sequence.length += count
            for name, part in parts.items():
                part.append(getattr(sequence, name)[new.start : new.stop])
            positions += new
            kv_write_index += [self.row(sequence, position) for position in new]
            kv_lens.append(sequence.length)
            cu_seqlens.append(cu_seqlens[-1] + count)
            page_rows = 2 * LAYERS * self.page_tokens
            page_table[b, : len(sequence.pages)] = torch.tensor(sequence.pages) * page_rows
        for _ in range(padding):
            for name, part in parts.items():
                part.append(torch.full((1, HEADS if name == "q" else KV_HEADS, DIM), 7.0))
            positions.append(0)
            kv_write_index.append(0)
            kv_lens.append(1)
            cu_seqlens.append(cu_seqlens[-1] + 1)
        batch = Batch(
            slots=torch.arange(len(kv_lens)),
            positions=torch.tensor(positions),
            kv_write_index=torch.tensor(kv_write_index),
            page_table=page_table,
            kv_lens=torch.tensor(kv_lens),
            cu_seqlens=torch.tensor(cu_seqlens),
            kv=self.kv,
            page=torch.arange(self.page_tokens),
            is_audio=torch.zeros(len(positions), dtype=torch.bool),
        )
        q, k, v = (torch.cat(parts[name]) for name in "qkv")
        return list(attend(q, k, v, Paged(batch, layer), SCALE).split([*counts, *[1] * padding]))


def agrees(cache: Cache, which: list[int], outputs: list[Tensor]) -> None:
    for i, found in zip(which, outputs, strict=False):
        sequence = cache.sequences[i]
        truth = sequence.truth()[sequence.length - len(found) : sequence.length]
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_a_whole_prompt(length, page_tokens, layer):
    cache = Cache([length], page_tokens)
    agrees(cache, [0], cache.launch([0], [length], layer))


@pytest.mark.parametrize("seed", range(5))
def test_ragged_launches(seed):
    """Launches mix whole prompts, parts of prompts and single steps until every sequence is done."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 60) for _ in range(6)]
    cache = Cache(lengths, 16, seed)
    while True:
        which = [
            i
            for i, sequence in enumerate(cache.sequences)
            if sequence.length < lengths[i] and chance.random() < 0.7
        ]
        counts = [
            min(chance.choice((1, 1, 2, 5, 16, 40)), lengths[i] - cache.sequences[i].length) for i in which
        ]
        if which:
            agrees(cache, which, cache.launch(which, counts, layer=1))
        elif all(
            sequence.length == length for sequence, length in zip(cache.sequences, lengths, strict=True)
        ):
            return


def test_steps_of_sequences_of_different_lengths():
    lengths = [1, 2, 16, 17, 33, 64]
    cache = Cache([length + 20 for length in lengths], 16)
    which = list(range(len(lengths)))
    cache.launch(which, lengths, layer=2)
    for _ in range(20):
        agrees(cache, which, cache.launch(which, [1] * len(which), layer=2))


def test_padding_stays_on_page_zero():
    cache = Cache([20, 9], 16)
    cache.launch([0, 1], [19, 8], layer=0)
    before = cache.kv.clone()
    outputs = cache.launch([0, 1], [1, 1], layer=0, padding=3)
    agrees(cache, [0, 1], outputs)
    assert all(output.isfinite().all() for output in outputs)
    changed = {row for row in range(len(before)) if not torch.equal(before[row], cache.kv[row])}
    own = {cache.row(cache.sequences[0], 19), cache.row(cache.sequences[1], 8)}
    # a key's row, and its value's row one page further
    assert changed == {row + part for row in own | {0} for part in (0, 16)}


def test_layers_do_not_share_rows():
    """Each layer writes and reads different rows."""
    cache = Cache([40], 16)
    whole = cache.launch([0], [40], layer=0)[0]
    first = cache.kv.clone()
    cache.sequences[0].length = 0
    cache.sequences[0].k.neg_()
    other = cache.launch([0], [40], layer=1)[0]
    assert not torch.allclose(whole, other)
    written = (first < 1e4).flatten(1).any(1)
    assert torch.equal(cache.kv[written], first[written]) and written.sum() == 2 * 40


def test_shared_pages_are_read_by_both():
    """Two sequences begin the same: the second one's table has the first one's page, and it writes only after
    it."""
    cache = Cache([24, 30], 16)
    first, second = cache.sequences
    for name in "kv":
        getattr(second, name)[:16] = getattr(first, name)[:16]
    cache.launch([0], [24], layer=0)
    second.pages[0], second.length = first.pages[0], 16
    agrees(cache, [1], cache.launch([1], [14], layer=0))


def test_bfloat16_is_close():
    cache = Cache([37], 16)
    truth = cache.sequences[0].truth()
    cache.kv = cache.kv.bfloat16()
    for name in "qkv":
        setattr(cache.sequences[0], name, getattr(cache.sequences[0], name).bfloat16())
    found = cache.launch([0], [37], layer=0)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), truth, rtol=0, atol=0.03)


def test_attention_without_host_lengths_equals_one_sequence_at_a_time():
    """This version can be recorded: it reads all pages of the page table, but masks positions beyond a
    sequence. Queries after all sequences give zeros."""
    random = torch.Generator().manual_seed(3)
    kv_lens, page_tokens, columns = torch.tensor([1, 16, 17, 40]), 16, 4
    kv = torch.randn(2 * page_tokens * columns * len(kv_lens), KV_HEADS, DIM, generator=random)
    pages = torch.randperm(columns * len(kv_lens), generator=random).view(len(kv_lens), columns)
    page_table, q = pages * 2 * page_tokens, torch.randn(15, HEADS, DIM, generator=random)
    cu_seqlens = torch.tensor([0, 1, 6, 6, 13])
    for b, length in enumerate(kv_lens.tolist()):
        beyond = (
            page_table[b].repeat_interleave(page_tokens) + torch.arange(columns * page_tokens) % page_tokens
        )
        kv[beyond[length:]] = kv[beyond[length:] + page_tokens] = torch.nan
    batched = _query_by_query(q, kv, page_table, kv_lens, cu_seqlens, page_tokens, SCALE)
    for b, length in enumerate(kv_lens.tolist()):
        own = slice(cu_seqlens[b], cu_seqlens[b + 1])
        if own.stop > own.start:
            alone = _one_sequence(q[own], kv, page_table[b], length, page_tokens, SCALE)
            torch.testing.assert_close(batched[own], alone)
    operator = torch.ops.zoo.paged_attention.default(
        q, kv, page_table, kv_lens, cu_seqlens, page_tokens, SCALE
    )
    torch.testing.assert_close(batched, operator)
    assert (operator[13:] == 0).all()


def test_the_attention_backend_is_named(monkeypatch):
    assert "kernels.cpp" in backend(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "zoo.kernels.triton_attention", None)  # as if Triton were not installed
    monkeypatch.delattr("zoo.kernels.triton_attention", raising=False)
    with pytest.raises(ValueError, match="pip install triton"):
        backend(torch.device("cuda"))
