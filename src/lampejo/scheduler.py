"""Which requests take part in a step, with how many tokens, and which pages those tokens get.

Everything that counts tokens or pages of a step is decided in ``schedule``, together with the allocation that may
change it. Pure Python; the device is not known here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


class Scheduler:
    """Waiting and running requests, in order of arrival and of admission. Decoding rows always go; what is left of the
    token budget prefills, oldest first, in chunks; beside decoding rows, which wait for them, ``chunk_beside``
    tokens at most. When pages run out, the youngest running request is preempted: it gives everything back and waits at
    the front, and its prefix cache makes the return cheap.
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
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of prompts that were looked for in the prefix cache, each once ...
        self.num_hit_tokens = 0  # ... and those found

    def add(self, request: Request) -> None:
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
        # Pages: for the anchors, then for the chunks of prompts, whoever has to make room for them.
        known: dict[int, int] = {}
        for request in decoding:
            if request in self.running and self._reserve(request, 1):
                known[request.id] = 1
        for request in prefilling:
            num_known = min(request.num_uncomputed, budget)
            if num_known and request in self.running and self._reserve(request, num_known):
                known[request.id] = num_known
                budget -= num_known
        # Nobody is preempted for drafts, which come last, nor for a request that has no row yet.
        plan = [
            ScheduledRow(request, known[request.id], self._reserve_drafts(request, drafts.get(request.id, 0)))
            for request in self.running
            if request.id in known
        ]
        while self.waiting and len(self.running) < self.max_rows and budget > 0:
            row = self._admit(self.waiting[0], budget)
            if row is None:
                break
            plan.append(row)
            budget -= row.num_known
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

    def _reserve_drafts(self, request: Request, width: int) -> int:
        """Pages for drafts after a decoding row's anchor. Returns the width that fits."""
        pages = self.pool.allocate(self._pages_missing(request, 1 + width)) if width else []
        if pages is None:
            return len(request.pages) * self.pool.page_size - request.num_computed - 1
        request.pages += pages
        return width

    def _preempt(self, request: Request) -> None:
        assert len(self.running) > 1, "one request alone always fits"
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit(self, request: Request, budget: int) -> ScheduledRow | None:
        """Moves the first waiting request into the batch, on top of what the prefix cache holds of it. Returns its
        first chunk, or None if the pages do not suffice now."""
        shared_end = len(self.pool.find(request.ids)) * self.pool.page_size if self.states else 0
        # Where the prompt's own log probabilities are wanted, all of it has to be computed.
        cached = self.pool.match(request.ids) if request.prompt_logprobs is None else []
        num_cached = len(cached) * self.pool.page_size
        num_known = min(len(request.ids) - num_cached, budget)
        needed = -(-(num_cached + num_known) // self.pool.page_size) - len(cached)
        pages = self.pool.allocate(needed)
        if pages is None:
            self.pool.release(cached)
            return None
        self.waiting.popleft()
        self.running.append(request)
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
