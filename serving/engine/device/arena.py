"""The arena: pages of bytes on the device, which all models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_cache import limits
from serving.engine.device.streams import Streams
from zoo.contract import Family, Past

PAGE_TOKENS = 16  # positions of a page; where models share an arena, of the one with the largest positions
CHUNK_PAGES = 64  # pages of a chunk of a renderer's past at most: a chunk is far larger than 16 positions


def row_bytes(family: Family[Any]) -> int:
    """The keys, or the values, of one position in one layer."""
    return family.spec.kv.row_values * family.dtype.itemsize


def token_bytes(family: Family[Any]) -> int:
    """All that one position keeps."""
    return family.spec.kv.token_bytes(family.dtype)


def paged_past(family: Family[Any]) -> Past | None:
    """Return what of a stream's past lies in pages; None on a CPU, and for renderers that keep none."""
    return None if family.device.type == "cpu" else family.spec.past


def chunk_bytes(family: Family[Any]) -> int:
    """Return the bytes of a chunk of the past; 0 without pages."""
    past = paged_past(family)
    return 0 if past is None else past.values * family.dtype.itemsize


def common_page_bytes(families: Sequence[Family[Any]]) -> int:
    """The size of a page that suits all: PAGE_TOKENS of the largest positions, or a part of a chunk of a
    past, rounded up to whole rows of every family.

    The others get as many of their positions into a page as fit, so less than one position of a page is left
    over, at most a 16th of it.
    Raises ValueError where whole rows of all would more than double the page.
    """
    units = [row_bytes(family) for family in families]
    units += [past.row_values * family.dtype.itemsize for family in families if (past := paged_past(family))]
    most = max(PAGE_TOKENS * token_bytes(family) for family in families)
    most = max(most, *(-(-chunk_bytes(family) // CHUNK_PAGES) for family in families))
    step = math.lcm(*units)
    size = -(-most // step) * step
    if size > 2 * most:
        rows = ", ".join(f"{family.spec.family} {row_bytes(family)}" for family in families)
        raise ValueError(
            f"no page suits all these models: rows of keys take (bytes) {rows}, so a page of whole "
            f"rows takes {size}, where {most} are needed: serve them apart"
        )
    return size


def check_there_is(num_bytes: int, device: torch.device, what: str = "KV memory") -> None:
    """Raises ValueError for more memory than the device has, free or in use. what: its name."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = limits.memory_bytes()
    if num_bytes > total:
        raise ValueError(
            f"{num_bytes} bytes of {what} are more than this machine's {device.type} has: {total}"
        )


class Arena:
    """Pages of bytes on the device. Each family reads them as rows of keys and values,
    `page_tokens` positions a page. It reads what it wrote there, and nothing else: bytes of an earlier owner
    may be NaN in its dtype.

    Page i is the scratch of family i, which padding writes to. Raises ValueError for a size that leaves no
    other page.
    """

    def __init__(self, families: Sequence[Family[Any]], kv_memory_bytes: int):
        self.families, self.device = tuple(families), families[0].device
        assert all(family.device == self.device for family in families), (
            f"one arena, on {[str(family.device) for family in families]}"
        )
        self.page_bytes = common_page_bytes(families)
        self.num_pages, self.num_scratch = kv_memory_bytes // self.page_bytes, len(families)
        if self.num_pages <= self.num_scratch:
            whose, least = "this model" if len(families) == 1 else "these models", self.num_scratch + 1
            raise ValueError(
                f"{kv_memory_bytes} bytes of KV memory hold no page: a page of {whose} takes "
                f"{self.page_bytes}, and {least} are the least"
            )
        check_there_is(self.num_pages * self.page_bytes, self.device)
        self.streams = Streams(self.device)
        self.bytes = torch.zeros(self.num_pages * self.page_bytes, dtype=torch.uint8, device=self.device)

    def page_tokens(self, family: Family[Any]) -> int:
        return self.page_bytes // token_bytes(family)

    def page_rows(self, family: Family[Any]) -> int:
        return self.page_bytes // row_bytes(family)

    def chunk_pages(self, family: Family[Any]) -> int:
        """Return the pages of a chunk of the family's past; 0 without one."""
        return -(-chunk_bytes(family) // self.page_bytes)

    def values(self, family: Family[Any]) -> Tensor:
        """-> [pages, values], the whole arena in the family's dtype."""
        return self.bytes.view(family.dtype).view(self.num_pages, -1)

    def rows(self, family: Family[Any]) -> Tensor:
        """-> [rows, H, D], the whole arena in the family's shape."""
        kv = family.spec.kv
        return self.bytes.view(family.dtype).view(-1, kv.num_heads, kv.head_dim)

    @property
    def by_page(self) -> Tensor:
        """-> [P, bytes]"""
        return self.bytes.view(self.num_pages, -1)
