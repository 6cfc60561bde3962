"""Pages of the key-value cache: who owns which, and which hold a prefix that a later request can reuse.

Pure bookkeeping over page numbers. The pools of the target and of the drafter are indexed by the same numbers, so that
one page table, and one prefix hit, serves both. If the target has recurrent layers, a prefix can be reused up to a page
with a snapshot of their state at its end (``states``).
"""

from collections.abc import Sequence

from lampejo.states import StatePool

# Every page is in exactly one of these states:
#
#   |<------------ num_free ----------->|<-------------- in use --------------->|
#   |     free     |     evictable      |       own        |      shared        |
#   | nothing kept | registered,        | refcount 1       | registered,        |
#   |              | refcount 0, LRU    |                  | refcount >= 2      |
#
#   free -> in use: allocate      evictable -> in use: match      evictable -> free: eviction inside allocate
#   in use -> evictable: the last reference is released and no other page holds this content; else -> free
#
# A registered page holds page_size committed tokens. Its content is named by (name of the page before it, its token
# ids), and this pair is the dictionary key: two contents can never be taken for each other. Names are never reused.
# Two requests that compute the same prefix side by side both bear its content; the last bearer stays cached.

ROOT = 0  # the name before the first page of a text; as the name of a page it means: not registered
Key = tuple[int, tuple[int, ...]]


class PagePool:
    """Allocates pages of ``page_size`` tokens, and finds those that already hold the beginning of a text."""

    def __init__(self, num_pages: int, page_size: int, states: StatePool | None = None) -> None:
        """``states``: of a target with recurrent layers."""
        assert num_pages > 0 and page_size > 0
        self.states = states
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # taken from the end
        self._evictable: dict[int, None] = {}  # in order of eviction
        self._refcounts = [0] * num_pages
        self._names = [ROOT] * num_pages
        self._keys: list[Key | None] = [None] * num_pages
        self._bearers: dict[Key, list[int]] = {}  # pages that hold this content; the first one is given to others
        self._last_name = ROOT

    @property
    def num_free(self) -> int:
        """How many pages `allocate` can give now."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """The share of pages in use."""
        return 1 - self.num_free / self.num_pages

    def match(self, ids: Sequence[int]) -> list[int]:
        """Take a reference on each page of the longest cached prefix of ``ids`` that a request can continue from, and
        return them in order.

        The last token is never covered: a step needs at least one token to compute.
        """
        pages = self.usable(ids)
        if self.states is not None and pages:
            self.states.use(self._names[pages[-1]])
        for page in pages:
            self._refcounts[page] += 1
            self._evictable.pop(page, None)
        return pages

    def usable(self, ids: Sequence[int]) -> list[int]:
        """The pages that `match` would return. Takes nothing."""
        pages = self.find(ids)
        if self.states is not None:
            while pages and self.states.find(self._names[pages[-1]]) is None:
                pages.pop()
        return pages

    def find(self, ids: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix of ``ids`` but for its last token, whether or not it can be continued
        from. Takes nothing."""
        pages: list[int] = []
        name = ROOT
        for i in range((len(ids) - 1) // self.page_size):
            bearers = self._bearers.get(self._key(name, ids, i))
            if not bearers:
                break
            pages.append(bearers[0])
            name = self._names[bearers[0]]
        return pages

    def name_at(self, pages: Sequence[int], num_tokens: int) -> int:
        """Name of the page that ends with the text's token number ``num_tokens``, a multiple of the page size."""
        return self._names[pages[num_tokens // self.page_size - 1]]

    def allocate(self, num_pages: int) -> list[int] | None:
        """Give ``num_pages`` fresh pages, evicting the longest unused if need be; None, and no change, if too many."""
        if num_pages > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict(next(iter(self._evictable))) for _ in range(num_pages)]
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def register(self, ids: Sequence[int], pages: Sequence[int], num_committed: int) -> None:
        """Let others find the full pages among the first ``num_committed`` tokens (those whose cache is written).

        ``ids`` is the whole text of a request and ``pages`` its page table. What an earlier call registered is not
        looked at again, so a call after each commit costs next to nothing.
        """
        num_full = num_committed // self.page_size
        assert num_committed <= len(ids) and num_full <= len(pages)
        first = num_full
        while first and self._names[pages[first - 1]] == ROOT:
            first -= 1
        name = self._names[pages[first - 1]] if first else ROOT
        for i in range(first, num_full):
            assert self._refcounts[pages[i]] > 0, f"page {pages[i]} is registered but not in use"
            name = self._bear(pages[i], self._key(name, ids, i))

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference on each page of a request: all its pages at once, or some from the end.

        The end of a text becomes evictable before its beginning, so that no cached page ever loses the one before it.
        """
        for page in reversed(pages):
            assert self._refcounts[page] > 0, f"page {page} is released but not in use"
            self._refcounts[page] -= 1
            if self._refcounts[page]:
                continue
            key = self._keys[page]
            if key is not None and len(self._bearers[key]) == 1:
                self._evictable[page] = None
            else:
                self._forget(page)
                self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and every cached text is whole."""
        in_use = [page for page in range(self.num_pages) if self._refcounts[page] > 0]
        assert sorted([*self._free, *self._evictable, *in_use]) == list(range(self.num_pages)), (
            "a page in no or two states"
        )
        assert min(self._refcounts) >= 0, "a page was released too often"
        assert all(self._keys[page] is None for page in self._free), "a free page is registered"
        assert all(self._keys[page] is not None for page in self._evictable), "an unregistered page is evictable"

        borne = [page for bearers in self._bearers.values() for page in bearers]
        registered = [page for page in range(self.num_pages) if self._keys[page] is not None]
        assert sorted(borne) == registered, "the bearers are not the registered pages"
        assert all((self._names[page] != ROOT) == (self._keys[page] is not None) for page in range(self.num_pages))
        name_of = {key: self._names[bearers[0]] for key, bearers in self._bearers.items()}
        names = list(name_of.values())
        assert len(dict.fromkeys(names)) == len(names), "two contents with one name"
        for key, bearers in self._bearers.items():
            assert len(key[1]) == self.page_size
            assert all(self._keys[page] == key and self._names[page] == name_of[key] for page in bearers)
            assert len(bearers) == 1 or all(self._refcounts[page] > 0 for page in bearers), "a needless copy is kept"
            assert key[0] < name_of[key], "a page is named before the one in front of it"

        eviction_order = {self._names[page]: i for i, page in enumerate(self._evictable)}
        known = {ROOT: True} | dict.fromkeys(names, True)
        for key, name in name_of.items():
            assert key[0] in known, "a cached page lost the one before it"
            if key[0] in eviction_order:
                assert eviction_order.get(name, self.num_pages) < eviction_order[key[0]], (
                    "would be evicted before its end"
                )
        if self.states is not None:
            self.states.check_integrity()
            assert all(name in known and name != ROOT for name in self.states.names), "a snapshot of no cached page"

    def _key(self, name: int, ids: Sequence[int], i: int) -> Key:
        return name, tuple(ids[i * self.page_size : (i + 1) * self.page_size])

    def _bear(self, page: int, key: Key) -> int:
        bearers = self._bearers.setdefault(key, [])
        if bearers:
            name = self._names[bearers[0]]
        else:
            name = self._last_name = self._last_name + 1
        bearers.append(page)
        self._names[page] = name
        self._keys[page] = key
        if bearers[0] in self._evictable:  # ours is in use and takes its place
            self._free.append(self._evict(bearers[0]))
        return name

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is None:
            return
        self._bearers[key].remove(page)
        if not self._bearers[key]:
            del self._bearers[key]
            if self.states is not None:
                self.states.drop(self._names[page])
        self._keys[page] = None
        self._names[page] = ROOT

    def _evict(self, page: int) -> int:
        del self._evictable[page]
        self._forget(page)
        return page
