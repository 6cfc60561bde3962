"""The page allocator: prefix reuse that is never wrong, eviction in order, no page lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lampejo.pages import PagePool
from lampejo.states import StatePool


def run_request(pool: PagePool, ids: list[int]) -> tuple[list[int], int]:
    """Admit a text, commit and register all of it; returns its page table and how many pages came from the cache."""
    cached = pool.match(ids)
    fresh = pool.allocate(-(-len(ids) // pool.page_size) - len(cached))
    assert fresh is not None
    pages = cached + fresh
    pool.register(ids, pages, len(ids))
    pool.check_integrity()
    return pages, len(cached)


@pytest.mark.parametrize("num_tokens", [1072, 2000, 2144, 3000])
def test_the_same_prompt_again_is_found_but_for_its_end(num_tokens: int) -> None:
    """M1: an agent resends its prompt and pays for all of it."""
    pool = PagePool(256, 16)
    ids = list(range(num_tokens))
    pages, num_cached = run_request(pool, ids)
    assert num_cached == 0
    pool.release(pages)
    _, num_cached = run_request(pool, ids)
    assert num_cached * 16 == (num_tokens - 1) // 16 * 16 >= 0.9 * num_tokens


def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache() -> None:
    """A wholly cached prompt leaves nothing to compute, so that no logits exist to continue from."""
    pool = PagePool(8, 4)
    run_request(pool, list(range(8)))
    assert len(pool.match(list(range(8)))) == 1
    assert len(pool.match(list(range(9)))) == 2
    assert pool.match([]) == []


def test_equal_tokens_behind_different_beginnings_are_different_pages() -> None:
    """A page keyed by its own tokens alone is reused behind another prefix: wrong keys and values, wrong text."""
    pool = PagePool(8, 2)
    run_request(pool, [1, 1, 7, 7, 0])
    assert pool.match([2, 2, 7, 7, 0]) == []
    assert pool.match([7, 7, 0]) == []


def test_tokens_with_equal_hashes_are_not_confused() -> None:
    """In Python hash(-1) == hash(-2): a cache that compares only hashes hands out another text's page."""
    pool = PagePool(8, 2)
    run_request(pool, [-1, 5, 0])
    assert pool.match([-2, 5, 0]) == []


def test_only_full_pages_of_committed_tokens_enter_the_cache() -> None:
    """Drafted tokens that are later rejected, or half-written pages, would be found by another request."""
    pool = PagePool(8, 4)
    ids = list(range(12))
    pages = pool.allocate(3)
    assert pages is not None
    pool.register(ids, pages, 7)
    assert pool.match(ids) == pages[:1]


def test_registering_after_each_commit_reads_each_token_once() -> None:
    """Rehashing the chain at every commit makes a long answer quadratic."""

    class CountingList(list[int]):
        num_read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            part = super().__getitem__(index)
            CountingList.num_read += len(part) if isinstance(index, slice) else 1
            return part

    pool = PagePool(100, 4)
    ids = CountingList(range(400))
    pages = pool.allocate(100)
    assert pages is not None
    for num_committed in range(0, 401, 3):
        pool.register(ids, pages, num_committed)
    assert CountingList.num_read <= 400
    pool.check_integrity()


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    """Evicting the first page first makes the whole rest of the cached text useless."""
    pool = PagePool(4, 2)
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    pages, _ = run_request(pool, ids)
    pool.release(pages)
    assert pool.allocate(1) == pages[3:]
    pool.check_integrity()
    assert pool.match([*ids, 9]) == pages[:3]


def test_the_least_recently_used_text_is_evicted_first() -> None:
    """A system prompt in constant use must outlive texts that nobody asked for again."""
    pool = PagePool(4, 2)
    for ids in ([1, 1, 0], [2, 2, 0]):
        pages, _ = run_request(pool, ids)
        pool.release(pages)
    pool.release(pool.match([1, 1, 0]))
    pool.allocate(3)
    assert pool.match([2, 2, 0]) == []
    assert len(pool.match([1, 1, 0])) == 1


def test_free_pages_are_taken_before_cached_ones() -> None:
    """Evicting while free pages lie about empties the prefix cache for nothing."""
    pool = PagePool(4, 2)
    pages, _ = run_request(pool, [1, 1])
    pool.release(pages)
    pool.allocate(3)
    assert pool.match([1, 1, 0]) == pages


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    """Half an allocation kept, or cached pages evicted for nothing, when a request has to wait."""
    pool = PagePool(4, 2)
    pages, _ = run_request(pool, [1, 1, 2, 2])
    pool.release(pages[1:])
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    pool.check_integrity()
    assert pool.match([1, 1, 2, 2, 3]) == pages
    assert pool.allocate(0) == []


def test_a_shared_page_stays_until_its_last_user_is_gone() -> None:
    """M3, M6: an aborted request frees pages that another one still reads."""
    pool = PagePool(4, 2)
    first, _ = run_request(pool, [1, 1, 2])
    second, num_cached = run_request(pool, [1, 1, 3])
    assert num_cached == 1
    pool.release(first)
    assert first[0] not in (pool.allocate(2) or [])
    pool.release(second)
    pool.check_integrity()


def test_a_conversation_survives_the_eviction_of_its_twin() -> None:
    """Two agents compute one system prompt at once; when the first one's copy goes, the second one's text is lost."""
    pool = PagePool(6, 2)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None and second is not None
    pool.register([1, 1, 5, 5], first, 4)
    pool.register([1, 1, 6, 6, 7, 7], second, 6)
    pool.check_integrity()
    pool.release(first)
    pool.check_integrity()
    evicting = pool.allocate(3)
    assert evicting is not None
    pool.release(second)
    pool.check_integrity()
    assert pool.match([1, 1, 6, 6, 7, 7, 8]) == second


def test_copies_of_a_text_are_not_kept_twice() -> None:
    """Requests that computed the same prompt side by side fill the cache with copies of it."""
    pool = PagePool(6, 2)
    tables = [pool.allocate(2) for _ in range(3)]
    for pages in tables:
        assert pages is not None
        pool.register([1, 1, 2, 2], pages, 4)
    for pages in tables:
        pool.release(pages or [])
    pool.check_integrity()
    kept = pool.match([1, 1, 2, 2, 3])
    assert len(kept) == 2
    fresh = pool.allocate(4)
    assert fresh is not None and not [page for page in fresh if page in kept]


def test_all_pages_come_back_when_all_requests_are_gone() -> None:
    """M5, M6: a leak of one page per request stops the server after some hours."""
    pool = PagePool(16, 4)
    for i in range(500):
        pages, _ = run_request(pool, [i % 7] * (i % 60 + 1))
        assert pool.usage == len(pages) / 16
        pool.release(pages)
        assert pool.num_free == 16 and pool.usage == 0
    pool.check_integrity()


def test_releasing_a_page_twice_is_noticed() -> None:
    """A double release hands one page to two requests, which then overwrite each other."""
    pool = PagePool(2, 2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="not in use"):
        pool.release(pages)


def pool_with_states(*ends: int) -> tuple[PagePool, list[int], list[int]]:
    """Of a target with recurrent layers: a text of 4 pages of 2 tokens with snapshots at these ends, and its pages."""
    pool, ids = PagePool(6, 2, StatePool(4)), [1, 2, 3, 4, 5, 6, 7, 8]
    assert pool.states is not None
    pages, _ = run_request(pool, ids)
    for end in ends:
        slot = pool.states.take()
        assert slot is not None
        pool.states.keep(pool.name_at(pages, end), slot, first_to_go=False)
    pool.release(pages)
    return pool, ids, pages


@pytest.mark.parametrize(("ends", "num_found"), [((), 0), ((2,), 1), ((2, 6), 3), ((8,), 4), ((4, 8), 4)])
def test_with_recurrent_layers_a_prefix_ends_where_a_state_was_saved(ends: tuple[int, ...], num_found: int) -> None:
    """M2: keys and values without the state at their end continue another text."""
    pool, ids, pages = pool_with_states(*ends)
    assert pool.match([*ids, 9]) == pages[:num_found]
    pool.check_integrity()
    assert pool.find([*ids, 9]) == pages, "they are there all the same"


def test_a_state_at_the_very_end_of_a_text_is_no_use_to_the_same_text() -> None:
    """M1: a token is left to compute, and the state before it was not saved."""
    pool, ids, _ = pool_with_states(8)
    assert pool.match(ids) == []


def test_a_page_takes_its_state_along_when_it_is_evicted() -> None:
    """Fault: a name without a page keeps a slot for ever."""
    pool, ids, pages = pool_with_states(4, 8)
    pool.allocate(3)
    pool.check_integrity()
    assert pool.states is not None and len(pool.states.names) == 1
    assert pool.match([*ids, 9]) == pages[:2]


def test_a_state_stays_when_another_copy_of_its_page_does() -> None:
    """Fault: two requests bear one text; the first goes, and the text loses its state."""
    pool, ids, _ = pool_with_states(4)
    twin = pool.allocate(2)
    assert twin is not None and pool.states is not None
    pool.register(ids[:4], twin, 4)  # takes the place of the pages that nobody uses
    pool.check_integrity()
    assert pool.match([*ids[:4], 9]) == twin


class PoolAgainstNaiveModel(RuleBasedStateMachine):
    """The model keeps the whole text before each page, and a list of cached texts in order of eviction."""

    SIZE = 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, self.SIZE)
        self.memory: dict[
            int, tuple[int, ...]
        ] = {}  # page -> the text up to its end, as a runner would have written it
        self.requests: list[tuple[list[int], list[int], int]] = []  # ids, pages, committed
        self.evictable: list[tuple[int, ...]] = []

    def registered(self) -> list[tuple[int, ...]]:
        return [
            tuple(ids[:end])
            for ids, _, num_committed in self.requests
            for end in range(self.SIZE, num_committed + 1, self.SIZE)
        ]

    def evict_down_to(self, num_free_before: int, num_taken: int) -> None:
        del self.evictable[: max(0, num_taken - num_free_before)]

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def admit(self, ids: list[int]) -> None:
        size, cached = self.SIZE, self.registered() + self.evictable
        expected = 0
        while (expected + 1) * size < len(ids) and tuple(ids[: (expected + 1) * size]) in cached:
            expected += 1
        pages = self.pool.match(ids)
        assert len(pages) == expected
        for i, page in enumerate(pages):
            text = tuple(ids[: (i + 1) * size])
            assert self.memory[page] == text, "a page of another text"
            if text in self.evictable:
                self.evictable.remove(text)
        num_wanted = -(-len(ids) // size) - len(pages)
        num_free = self.pool.num_free - len(self.evictable)
        fresh = self.pool.allocate(num_wanted)
        if fresh is None:
            assert num_wanted > num_free + len(self.evictable)
            self.requests.append((ids[: len(pages) * size], pages, len(pages) * size))
            self.drop(len(self.requests) - 1)
            return
        self.evict_down_to(num_free, num_wanted)
        held = [page for _, table, _ in self.requests for page in table] + pages
        assert not [page for page in fresh if page in held], "a page in use was given away"
        for i, page in enumerate(pages + fresh):
            self.memory[page] = tuple(ids[: (i + 1) * size])
        self.requests.append((ids, pages + fresh, len(pages) * size))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.requests) - 1))
        ids, pages, num_committed = self.requests[at]
        num_committed = data.draw(st.integers(num_committed, len(ids)))
        self.pool.register(ids, pages, num_committed)
        self.requests[at] = (ids, pages, num_committed)
        self.evictable = [text for text in self.evictable if text not in self.registered()]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.integers(0, len(self.requests) - 1)))

    def drop(self, at: int) -> None:
        ids, pages, num_committed = self.requests.pop(at)
        self.pool.release(pages)
        for end in range(num_committed // self.SIZE * self.SIZE, 0, -self.SIZE):
            if tuple(ids[:end]) not in self.registered():
                self.evictable.append(tuple(ids[:end]))

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        held = dict.fromkeys(page for _, pages, _ in self.requests for page in pages)
        assert self.pool.num_free == 8 - len(held)


PoolAgainstNaiveModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolAgainstNaiveModel = PoolAgainstNaiveModel.TestCase
