"""Pages: one owner or a shared prefix, exact counts, nothing lost, against a model that knows no hashes."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serving.engine.memory.pages import Pages

NUM_PAGES = 9
PAGE_TOKENS = (2, 3)


class Naive:
    """The same rules without hashes: a prefix is the tuple of its keys, and the oldest cached page is found
    by looking."""

    def __init__(self):
        self.references = dict.fromkeys(range(1, NUM_PAGES), 0)
        self.prefix_of: dict[int, tuple] = {}
        self.cached: list[int] = []

    @staticmethod
    def prefixes(salt, keys, page_tokens, num):
        return [(salt, page_tokens, tuple(keys[: (i + 1) * page_tokens])) for i in range(num)]

    def find(self, prefix):
        return next((page for page, known in self.prefix_of.items() if known == prefix), None)

    def unused(self):
        return [page for page, references in self.references.items() if references == 0]

    def match(self, salt, keys, page_tokens):
        pages = []
        for prefix in self.prefixes(salt, keys, page_tokens, (len(keys) - 1) // page_tokens):
            if self.find(prefix) is None:
                break
            pages.append(self.find(prefix))
        for page in pages:
            self.references[page] += 1
        self.cached = [page for page in self.cached if page not in pages]
        return pages

    def took(self, pages):
        """`pages` were handed out: were they the right ones?"""
        assert len(set(pages)) == len(pages) and set(pages) <= set(self.unused())
        num_evicted = max(0, len(pages) - (len(self.unused()) - len(self.cached)))
        evicted, self.cached = self.cached[:num_evicted], self.cached[num_evicted:]
        assert [page for page in pages if page in self.prefix_of] == evicted
        for page in evicted:
            del self.prefix_of[page]
        for page in pages:
            self.references[page] = 1
        return num_evicted

    def publish(self, salt, keys, page_tokens, pages):
        for prefix, page in zip(
            self.prefixes(salt, keys, page_tokens, len(keys) // page_tokens), pages, strict=False
        ):
            if self.find(prefix) is None:
                self.prefix_of[page] = prefix

    def give_back(self, pages):
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0 and page in self.prefix_of:
                self.cached.append(page)


class AgainstNaive(RuleBasedStateMachine):
    """Requests come (match, take, publish) and go (give_back) in any order; keys are few, so prefixes meet
    often."""

    def __init__(self):
        super().__init__()
        self.pages, self.naive = Pages(NUM_PAGES), Naive()
        self.running: list[list[int]] = []
        self.shared = self.evicted = 0

    @rule(
        salt=st.integers(0, 1),
        keys=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        page_tokens=st.sampled_from(PAGE_TOKENS),
        more=st.integers(0, 2),
        is_published=st.booleans(),
    )
    def come(self, salt, keys, page_tokens, more, is_published):
        held = self.pages.match(salt, keys, page_tokens)
        assert held == self.naive.match(salt, keys, page_tokens)
        self.shared += len(held)
        num = -(-len(keys) // page_tokens) + more - len(held)
        fits = num <= len(self.naive.unused())
        taken = self.pages.take(num)
        assert (taken is not None) == fits
        if taken is None:
            self.pages.give_back(held)
            self.naive.give_back(held)
            return
        self.evicted += self.naive.took(taken)
        if is_published:
            self.pages.publish(salt, keys, page_tokens, held + taken)
            self.naive.publish(salt, keys, page_tokens, held + taken)
        self.running.append(held + taken)

    @rule(which=st.integers(0, NUM_PAGES))
    def go(self, which):
        if self.running:
            pages = self.running.pop(which % len(self.running))
            self.pages.give_back(pages)
            self.naive.give_back(pages)

    @invariant()
    def counts_agree(self):
        assert self.pages.free == len(self.naive.unused())
        assert (self.pages.shared, self.pages.evicted) == (self.shared, self.evicted)
        held = [page for pages in self.running for page in pages]
        assert all(held.count(page) == references for page, references in self.naive.references.items())

    def teardown(self):
        for pages in self.running:
            self.pages.give_back(pages)
        assert self.pages.free == NUM_PAGES - 1


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)


def prompt(pages: Pages, keys, salt=1, page_tokens=4) -> list[int]:
    """A request's door: what is known, the rest new, and published."""
    held = pages.match(salt, keys, page_tokens)
    taken = pages.take(-(-len(keys) // page_tokens) - len(held))
    assert taken is not None
    pages.publish(salt, keys, page_tokens, held + taken)
    return held + taken


def test_ten_thousand_operations_leave_everything_free():
    rng = random.Random(7)
    pages, running = Pages(64), []
    for _ in range(10_000):
        if running and rng.random() < 0.5:
            pages.give_back(running.pop(rng.randrange(len(running))))
            continue
        keys = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        held = pages.match(0, keys, 4)
        taken = pages.take(-(-len(keys) // 4) - len(held))
        if taken is None:
            pages.give_back(held)
            continue
        pages.publish(0, keys, 4, held + taken)
        running.append(held + taken)
    assert pages.shared > 1000 and pages.evicted > 1000
    for held in running:
        pages.give_back(held)
    assert pages.free == 63
    everything = pages.take(63)
    assert everything is not None and sorted(everything) == list(range(1, 64))


def test_scratch_is_never_handed_out():
    pages = Pages(4)
    assert pages.free == 3
    assert sorted(pages.take(3)) == [1, 2, 3]
    assert pages.take(1) is None
    with pytest.raises(AssertionError, match="page 0 is given back with 0 references"):
        pages.give_back([0])
    assert sorted(Pages(5, num_scratch=3).take(2)) == [3, 4]


def test_take_is_all_or_nothing():
    pages = Pages(4)
    assert pages.take(4) is None
    assert pages.free == 3
    assert pages.take(0) == []


def test_match_gives_the_longest_run_of_whole_pages():
    pages = Pages(32)
    first = prompt(pages, range(12))
    assert pages.match(1, [*range(8), 99, 10, 11, 12], 4) == first[:2]
    assert pages.match(1, [99, *range(1, 12)], 4) == []
    # page 2 of the new prompt has other keys before it
    assert pages.match(1, [*range(4), 99, *range(5, 16)], 4) == first[:1]
    assert pages.shared == 3


def test_match_never_covers_the_last_key():
    pages = Pages(32)
    first = prompt(pages, range(12))
    assert pages.match(1, range(12), 4) == first[:2]
    assert pages.match(1, range(13), 4) == first[:3]
    assert pages.match(1, range(4), 4) == []
    assert pages.match(1, [0], 4) == []
    assert pages.match(1, [], 4) == []


def test_a_half_page_is_not_shared():
    pages = Pages(32)
    first = prompt(pages, range(6))
    assert pages.match(1, [*range(6), 6, 7, 8], 4) == first[:1]


def test_salt_and_page_length_keep_prefixes_apart():
    pages = Pages(32)
    first = prompt(pages, range(12), salt=1)
    assert pages.match(2, range(13), 4) == []
    assert pages.match(1, range(13), 2) == []
    assert pages.match(1, range(13), 4) == first


def test_the_older_page_stays_in_the_index():
    pages = Pages(32)
    held, also = pages.take(2), pages.take(2)
    pages.publish(1, range(8), 4, held)
    pages.publish(1, range(8), 4, also)  # two equal prompts, prefilled at the same time
    assert pages.match(1, range(9), 4) == held
    free = pages.free
    pages.give_back(also)
    assert pages.free == free + 2
    assert pages.match(1, range(9), 4) == held


def test_pages_outlive_their_request_until_they_are_needed():
    pages = Pages(5)
    first = prompt(pages, range(8))
    pages.give_back(first)
    assert pages.free == 4
    assert pages.match(1, range(9), 4) == first
    assert pages.free == 2
    pages.give_back(first)
    assert len(pages.take(4)) == 4
    assert pages.evicted == 2
    assert pages.match(1, range(9), 4) == []


def test_eviction_takes_the_least_recently_used_first_and_ends_before_beginnings():
    pages = Pages(7)
    old, new = prompt(pages, range(0, 12)), prompt(pages, range(100, 112))
    pages.give_back(old)
    pages.give_back(new)
    pages.give_back(pages.match(1, range(13), 4))  # old is used again
    assert pages.take(4) == [new[2], new[1], new[0], old[2]]
    assert pages.match(1, range(13), 4) == old[:2]


def test_pages_without_content_go_before_cached_ones():
    pages = Pages(5)
    pages.give_back(prompt(pages, range(8)))
    plain = pages.take(2)
    assert pages.evicted == 0
    pages.give_back(plain)
    pages.take(3)
    assert pages.evicted == 1


def test_a_double_free_is_reported_with_both_values():
    pages = Pages(4)
    held = pages.take(2)
    pages.give_back(held)
    with pytest.raises(
        AssertionError, match=rf"page {held[1]} is given back with 0 references, at least 1 expected"
    ):
        pages.give_back(held)


def test_a_shared_page_is_freed_by_its_last_holder():
    pages = Pages(4)
    prompt(pages, range(4))
    held = pages.match(1, range(5), 4)
    assert len(held) == 1 and pages.free == 2
    pages.give_back(held)
    assert pages.free == 2
    pages.give_back(held)
    assert pages.free == 3


def test_publishing_what_is_not_held_is_an_error():
    pages = Pages(4)
    held = pages.take(1)
    with pytest.raises(AssertionError, match="1 pages cannot hold the 2 whole pages of 8 keys"):
        pages.publish(1, range(8), 4, held)
    pages.give_back(held)
    with pytest.raises(AssertionError, match="is published with 0 references"):
        pages.publish(1, range(4), 4, held)
    assert pages.match(1, range(5), 4) == []


def test_a_page_holds_one_prefix():
    pages = Pages(4)
    held = pages.take(1)
    pages.publish(1, range(4), 4, held)
    with pytest.raises(AssertionError, match="is published as"):
        pages.publish(1, range(4, 8), 4, held)


def test_keys_are_any_int64():
    pages = Pages(8)
    edge = [-(2**63), 2**63 - 1, 0, -1, 5]
    held = prompt(pages, edge)
    assert pages.match(1, edge, 4) == held[:1]
    with pytest.raises(OverflowError):
        pages.match(1, [2**63] * 5, 4)


def test_an_arena_of_scratch_alone_is_refused():
    with pytest.raises(
        ValueError, match="an arena of 1 pages has none to hand out: 1 are scratch, so 2 are the least"
    ):
        Pages(1)
    with pytest.raises(
        ValueError, match="an arena of 3 pages has none to hand out: 3 are scratch, so 4 are the least"
    ):
        Pages(3, num_scratch=3)


def test_pages_may_be_shared_several_at_a_time():
    pages, keys = Pages(20), list(range(50))
    held = pages.take(5)
    pages.publish(1, keys, 10, held)
    assert pages.match(1, [*keys, 0], 10, multiple=2) == held[:4]
    assert pages.match(1, keys[:11], 10, multiple=2) == []
    assert pages.shared == 4
    pages.undo_match(pages.match(1, keys, 10))
    assert pages.shared == 4
    pages.give_back(held[:4])
    pages.give_back(held)
    assert pages.free == pages.num_pages


@pytest.mark.parametrize("is_held", [True, False])
def test_a_forgotten_page_is_found_by_no_prompt_and_is_free_like_any_other(is_held):
    pages = Pages(5)
    held = prompt(pages, range(8))
    if not is_held:
        pages.give_back(held)
    pages.forget(1, range(8), 4)
    pages.forget(1, range(8), 4)  # nothing is left to forget
    assert pages.match(1, range(9), 4) == []
    if is_held:
        pages.give_back(held)
    assert len(pages.take(4)) == 4 and pages.evicted == 0
