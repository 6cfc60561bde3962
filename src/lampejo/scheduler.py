"""Which requests take part in a step, with how many tokens, and which pages those tokens get.

Everything that counts tokens or pages of a step is decided in ``schedule``, together with the allocation that may
change it. Pure Python; the device is not known here.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from lampejo.pages import PagePool
from lampejo.request import Request
from lampejo.states import RowState, Save


@dataclass(frozen=True)
class ScheduledRow:
    """A request's part of a step: the next ``num_known`` committed tokens, then up to ``width`` drafts.

    The orders for the recurrent state of a row without drafts: ``load``, a slot to copy it from before the step, and
    ``saves`` on the way. ``load`` is carried out row by row, in the order of the plan, before anything is computed: a
    later row may already have been given the slot that an earlier one starts from.
    """

    request: Request
    num_known: int
    width: int
    load: int | None = None
    saves: Sequence[Save] = ()

    @property
    def wants_logits(self) -> bool:
        """Whether this step reaches the end of what is known, so that a token can be chosen."""
        return self.num_known == self.request.num_uncomputed


_in_order = attrgetter("arrival")


class Scheduler:
    """Waiting and running requests, each in order of arrival. Decoding rows always go; what is left of the token budget
    prefills in chunks, half of it the oldest prompt, the rest those with least left (``_shares``); beside decoding
    rows, which wait for them, ``chunk_beside`` tokens at most. When pages run out, the youngest running request is
    preempted: it gives everything back and waits in its old place, and its prefix cache makes the return cheap.
    """

    def __init__(
        self, pool: PagePool, max_rows: int, token_budget: int, max_context: int, chunk_beside: int | None = None
    ) -> None:
        self.pool = pool
        self.states = pool.states
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.max_context = max_context
        self.chunk_beside = chunk_beside
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._num_arrived = 0
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of prompts that were looked for in the prefix cache, each once ...
        self.num_hit_tokens = 0  # ... and those found

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes out a finished or aborted request, wherever it is, and gives its pages back."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self, widths: Callable[[Sequence[Request]], Sequence[int]]) -> list[ScheduledRow]:
        """Plans a step. ``widths`` tells, for the decoding rows, how many drafts are wanted for each."""
        decoding = [request for request in self.running if request.num_uncomputed == 1]
        prefilling = [request for request in self.running if request.num_uncomputed > 1]
        # Tokens: every decoding row has its anchor. What that leaves is for drafts, or half of it while a prompt could
        # use the rest: drafts must not starve it.
        budget = draft_budget = self.token_budget - len(decoding)
        if prefilling or (self.waiting and len(self.running) < self.max_rows):
            draft_budget //= 2
        drafts: dict[int, int] = {}  # by request id, as the next one
        for request, wanted in zip(decoding, widths(decoding), strict=True):
            width = max(0, min(wanted, self._most_drafts(request), draft_budget))
            drafts[request.id] = width
            draft_budget -= width
            budget -= width
        if decoding and self.chunk_beside is not None:
            budget = min(budget, self.chunk_beside)
        shares, num_preemptions = self._shares(prefilling, budget), self.num_preemptions
        # Pages: for the anchors, then for the chunks of prompts, whoever has to make room for them.
        known: dict[int, int] = {}
        for request in decoding:
            if request in self.running and self._reserve(request, 1):
                known[request.id] = 1
        for request in prefilling:
            num_known = shares.get(request.id, 0)
            if num_known and request in self.running and self._reserve(request, num_known):
                known[request.id] = num_known
                budget -= num_known
        # Nobody is preempted for what follows: drafts, requests that have no row yet, and what is left after them.
        for request in self.running:
            if drafts.get(request.id):
                drafts[request.id] = self._reserve_more(request, 1, drafts[request.id])
        admitted = []
        if self.num_preemptions == num_preemptions:  # else who had to go comes first
            for request in [request for request in self.waiting if request.id in shares]:
                row = self._admit(request, shares[request.id])
                if row is None:  # nor may others overtake it
                    break
                admitted.append(row)
                budget -= row.num_known
        for request in prefilling:
            if request.id in known:
                more = min(request.num_uncomputed - known[request.id], budget)
                more = self._reserve_more(request, known[request.id], more)
                known[request.id] += more
                budget -= more
        plan = [
            ScheduledRow(request, known[request.id], drafts.get(request.id, 0))
            for request in self.running
            if request.id in known
        ]
        plan += admitted
        if self.states is not None:  # last, when every row has its slot
            plan = [self._with_saves(row) for row in plan]
        return plan

    def committed(self, row: ScheduledRow, num_committed: int) -> Sequence[Save]:
        """After a step that committed the first ``num_committed`` tokens of a row: enters its full pages into the
        prefix cache, with states at their ends. Returns which states are to be saved; those of a row without drafts
        have been already."""
        request = row.request
        self.pool.register(request.ids, request.pages, request.num_computed)
        if self.states is None:
            return ()
        saves = row.saves
        if row.width:
            saves = self._reserve_saves(request, request.num_computed - num_committed, request.num_computed)
        for save in saves:
            self._keep(request, save)
        return saves

    def _shares(self, prefilling: Sequence[Request], budget: int) -> dict[int, int]:
        """How many tokens of which prompts go into this step, by request id.

        Half of the budget is for the oldest prompt, so that it advances whoever else comes; the rest for those with
        least left, so that a short prompt soon ends beside a long one, while two long ones do not hold each other up.
        Of the waiting, as many take part as there are free rows, so that nobody takes the row that an older one waits
        for; but not yet one whose next page another is about to compute: it will be in the prefix cache.
        """
        candidates = sorted([*prefilling, *self.waiting[: self.max_rows - len(self.running)]], key=_in_order)
        starts = {request.id: request.num_computed or self._num_cached(request) for request in candidates}
        lefts = {request.id: len(request.ids) - starts[request.id] for request in candidates}
        takes_part = list(prefilling)

        def is_held(request: Request) -> bool:
            return request not in takes_part and any(
                self._computes_for(other, starts[other.id], request) for other in takes_part
            )

        shares: dict[int, int] = {}
        turns = [(request, -(-budget // 2)) for request in candidates if not is_held(request)][:1]
        turns += [(request, budget) for request in sorted(candidates, key=lambda request: lefts[request.id])]
        for request, most in turns:
            num_known = min(lefts[request.id], most, budget)
            if num_known and not is_held(request):
                takes_part.append(request)
                shares[request.id] = shares.get(request.id, 0) + num_known
                lefts[request.id] -= num_known
                budget -= num_known
        return shares

    def _num_cached(self, request: Request) -> int:
        """Tokens that need not be computed if it starts now. Where the prompt's own log probabilities are wanted, all
        of it has to be."""
        return 0 if request.prompt_logprobs is not None else len(self.pool.usable(request.ids)) * self.pool.page_size

    def _computes_for(self, other: Request, start: int, request: Request) -> bool:
        """Whether the page that ``other`` computes from ``start`` on is also the next one of a waiting request."""
        first = start // self.pool.page_size * self.pool.page_size
        end = first + self.pool.page_size
        return (
            request.prompt_logprobs is None
            and end < len(request.ids)  # the last token is never taken from the cache
            and other.ids[first:end] == request.ids[first:end]  # tells most apart without a copy of the rest
            and other.ids[:first] == request.ids[:first]
        )

    def _most_drafts(self, request: Request) -> int:
        """Drafts that could still be committed: the step adds one token of the target's own."""
        left = self.max_context - len(request.ids)
        if request.stops.max_tokens is not None:
            left = min(left, request.stops.max_tokens - request.num_output)
        return left - 1

    def _pages_missing(self, request: Request, num_tokens: int) -> int:
        needed = -(-(request.num_computed + num_tokens) // self.pool.page_size)
        return max(0, needed - len(request.pages))

    def _reserve(self, request: Request, num_known: int) -> bool:
        """Pages for the next committed tokens; False if the request itself had to be preempted."""
        while (pages := self.pool.allocate(self._pages_missing(request, num_known))) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += pages
        return True

    def _reserve_more(self, request: Request, num_known: int, more: int) -> int:
        """Pages for tokens after those that have theirs, as far as there are free ones. Returns for how many."""
        pages = self.pool.allocate(min(self._pages_missing(request, num_known + more), self.pool.num_free))
        assert pages is not None
        request.pages += pages
        return min(more, len(request.pages) * self.pool.page_size - request.num_computed - num_known)

    def _preempt(self, request: Request) -> None:
        assert len(self.running) > 1, "one request alone always fits"
        self.running.remove(request)
        self._release(request)
        insort(self.waiting, request, key=_in_order)
        self.num_preemptions += 1

    def _admit(self, request: Request, share: int) -> ScheduledRow | None:
        """Moves a waiting request into the batch, on top of what the prefix cache holds of it. Returns its first chunk,
        or None if the pages do not suffice now."""
        shared_end = len(self.pool.find(request.ids)) * self.pool.page_size if self.states else 0
        cached = self.pool.match(request.ids) if request.prompt_logprobs is None else []
        num_cached = len(cached) * self.pool.page_size
        num_known = min(len(request.ids) - num_cached, share)
        needed = -(-(num_cached + num_known) // self.pool.page_size) - len(cached)
        pages = self.pool.allocate(needed)
        if pages is None:
            self.pool.release(cached)
            return None
        self.waiting.remove(request)
        insort(self.running, request, key=_in_order)
        request.pages = cached + pages
        request.num_computed = num_cached
        if request.num_cached is None:
            request.num_cached = num_cached
            self.num_queried_tokens += request.num_prompt
            self.num_hit_tokens += num_cached
        load = None
        if self.states is not None:
            load = self.states.find(self.pool.name_at(cached, num_cached)) if cached else None
            slot = self.states.take()
            assert slot is not None, "there are fewer slots than rows"
            request.state = RowState(slot, shared_end)
        return ScheduledRow(request, num_known, 0, load)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
        request.num_computed = 0
        if self.states is not None and request.state is not None:
            self.states.give_back(request.state.slot)
            request.state = None

    def _with_saves(self, row: ScheduledRow) -> ScheduledRow:
        """Of a row with drafts it turns out later which page ends it reaches."""
        start = row.request.num_computed
        return row if row.width else replace(row, saves=self._reserve_saves(row.request, start, start + row.num_known))

    def _reserve_saves(self, request: Request, start: int, end: int) -> list[Save]:
        """Where the state is worth a slot, among the page ends after ``start`` and up to ``end`` tokens: at the last
        one, and at those that others are likely to start from. Fewer, if rows need the slots."""
        assert self.states is not None and request.state is not None
        last = end // self.pool.page_size * self.pool.page_size
        saves = []
        for position in sorted({self._prompt_end(request), request.state.shared_end, last}):
            if start < position <= end and (slot := self.states.take()) is not None:
                saves.append(Save(position, slot))
        return saves

    def _prompt_end(self, request: Request) -> int:
        """The last page end of the prompt before its last token, which the same prompt again can start from."""
        return (request.num_prompt - 1) // self.pool.page_size * self.pool.page_size

    def _keep(self, request: Request, save: Save) -> None:
        """What was saved is found from now on. Of a request stay: its prompt's end, where it left others' texts, the
        latest page end of its answer, and, as long as nobody needs their slots, the ends of its prompt's chunks."""
        assert self.states is not None and request.state is not None
        name, prompt_end = self.pool.name_at(request.pages, save.position), self._prompt_end(request)
        self.states.keep(
            name, save.slot, first_to_go=save.position < prompt_end and save.position != request.state.shared_end
        )
        if save.position > prompt_end:
            self.states.drop(request.state.answer_name, unless_used=True)
            request.state.answer_name = name
