"""Memory policy: which request holds which page of the arena, and which prompts' pages can be read again. It
counts pages and never touches them.

    free ---take---> held ---give_back---> free         a page that is in no index
                      |  ^
              publish |  | match
                      v  |
                     held and indexed ---give_back---> cached: had by match as it is, or by take once it is
                     the least recently used

A page is bytes in one arena that all resident models share. Idea of hashed, reference-counted pages:
GeeeekExplorer/nano-vllm, nanovllm/engine/block_manager.py.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b


class Pages:
    """Reference counts and a prefix index over an arena's pages. The first `num_scratch` are scratch, one of
    each model: padding rows write to them, and no request gets them. `num_pages` are left.

    `shared` counts pages handed out by `match`, `evicted` those that lost their place in the index. Raises
    ValueError if none is left.
    """

    def __init__(self, num_in_arena: int, num_scratch: int = 1):
        self.num_pages = num_in_arena - num_scratch
        if self.num_pages < 1:
            raise ValueError(
                f"an arena of {num_in_arena} pages has none to hand out: {num_scratch} are scratch, "
                f"so {num_scratch + 1} are the least"
            )
        self.shared = 0
        self.evicted = 0
        self._references = [0] * num_in_arena
        # a stack, so that the pages used last are used next
        self._free = list(range(num_in_arena - 1, num_scratch - 1, -1))
        # indexed pages without a holder, least recently used first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}  # the index: link of a chain -> page
        self._link_of: dict[int, bytes] = {}  # and back

    @property
    def free(self) -> int:
        """Pages that `take` can give now."""
        return len(self._free) + len(self._cached)

    def match(self, salt: int, keys: Sequence[int], page_tokens: int, multiple: int = 1) -> list[int]:
        """Return the longest run of indexed pages from the start of a prompt, and take one reference on each.
        The first len(pages) * page_tokens positions need not be computed. The run ends before the last key,
        because the model needs the hidden state there.

        keys: one int64 per position. multiple: the run's length is a multiple of this number of pages."""
        pages = []
        for link in _chain(salt, keys, page_tokens, (len(keys) - 1) // page_tokens):
            if link not in self._page_of:
                break
            pages.append(self._page_of[link])
        pages = pages[: len(pages) // multiple * multiple]
        for page in pages:
            self._references[page] += 1
            self._cached.pop(page, None)
        self.shared += len(pages)
        return pages

    def undo_match(self, pages: Sequence[int]) -> None:
        """Give back what `match` returned, as if it had not been asked."""
        self.give_back(pages)
        self.shared -= len(pages)

    def take(self, num: int) -> list[int] | None:
        """`num` pages with one reference each, or None and nothing is taken. Cached pages go last, the least
        recently used first."""
        assert num >= 0, f"{num} pages asked for, 0 or more expected"
        if num > self.free:
            return None
        return [self._take_one() for _ in range(num)]

    def publish(self, salt: int, keys: Sequence[int], page_tokens: int, pages: Sequence[int]) -> None:
        """Let `match` find a prompt's whole pages, once they are written. pages: those of the sequence in
        order, of which the ones behind the prompt are left alone. If the index already has a page with the
        same past, it keeps that one."""
        num_whole = len(keys) // page_tokens
        assert len(pages) >= num_whole, (
            f"{len(pages)} pages cannot hold the {num_whole} whole pages of {len(keys)} keys"
        )
        for link, page in zip(_chain(salt, keys, page_tokens, num_whole), pages, strict=False):
            assert self._references[page] > 0, (
                f"page {page} is published with {self._references[page]} references, at least 1 expected"
            )
            if link not in self._page_of:
                assert page not in self._link_of, (
                    f"page {page} is published as {link.hex()}, but holds {self._link_of[page].hex()}"
                )
                self._page_of[link] = page
                self._link_of[page] = link

    def forget(self, salt: int, keys: Sequence[int], page_tokens: int) -> None:
        """Remove a prompt's whole pages from the index. Requests that hold them keep them."""
        for link in _chain(salt, keys, page_tokens, len(keys) // page_tokens):
            if (page := self._page_of.pop(link, None)) is not None:
                del self._link_of[page]
                if page in self._cached:
                    del self._cached[page]
                    self._free.append(page)

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference on each. From the last page to the first, so that the end of a prefix is evicted
        before what it hangs on."""
        for page in reversed(pages):
            assert self._references[page] > 0, (
                f"page {page} is given back with {self._references[page]} references, at least 1 expected"
            )
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._link_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._link_of.pop(page)]
            self.evicted += 1
        self._references[page] = 1
        return page


def _chain(salt: int, keys: Sequence[int], page_tokens: int, num_pages: int) -> Iterator[bytes]:
    """One 128-bit link per page, which names the page's keys and all before them. The salt (the weights)
    begins the chain, so equal keys of two models never meet. Raises OverflowError for a key beyond
    int64."""
    packed = array("q", keys[: num_pages * page_tokens]).tobytes()
    page_bytes = 8 * page_tokens
    link = blake2b(str(salt).encode(), digest_size=16).digest()
    for i in range(num_pages):
        link = blake2b(link + packed[i * page_bytes : (i + 1) * page_bytes], digest_size=16).digest()
        yield link
