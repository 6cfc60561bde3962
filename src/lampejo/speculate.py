"""Who drafts, how much, and what is learned from it: the drafters, and the policy over them.

A drafter is anything with the methods of ``Drafter``. The output never depends on it; only the speed does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lampejo.accept import Verdict
from lampejo.batch import Batch
from lampejo.ngram import NgramIndex
from lampejo.request import Request
from lampejo.runner import Runner
from lampejo.scheduler import ScheduledRow
from lampejo.width import LAST_SLOT, RowOffer, RowResult, WidthController

NGRAM_MAX_WIDTH = 15
SHORTEST_MATCH = 2  # tokens; of drafts that continue a match of one, the first is right one time in five


class Drafter(Protocol):
    """Proposes tokens that may follow a request's last committed token, its anchor."""

    name: str

    def offer(self, request: Request) -> RowOffer | None:
        """What it can do after this anchor; None if it has nothing to draft."""
        ...

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        """At most ``widths[i]`` token ids for each request."""
        ...

    def observe(self, batch: Batch, taps: torch.Tensor, num_committed: Sequence[int]) -> None:
        """After every step: the first ``num_committed[i]`` tokens of segment i, with their taps, are committed."""
        ...

    def forget(self, request: Request) -> None:
        """The request is over."""
        ...


class NgramDrafter:
    """Continues the longest suffix of the text so far that occurred before, if it has ``min_match`` tokens or more.

    The longer the match, the likelier the drafts: each token more counts like one accepted already.
    """

    name = "ngram"

    def __init__(self, min_match: int = SHORTEST_MATCH) -> None:
        self.min_match = min_match
        self._indices: dict[int, NgramIndex] = {}

    def offer(self, request: Request) -> RowOffer | None:
        index = self._indices.setdefault(request.id, NgramIndex())
        index.extend(request.ids[len(index) :])
        start = min(index.match_len - self.min_match, LAST_SLOT)
        return RowOffer(request.id, self.name, NGRAM_MAX_WIDTH, start) if start >= 0 else None

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        return [self._indices[request.id].propose(width) for request, width in zip(requests, widths, strict=True)]

    def observe(self, batch: Batch, taps: torch.Tensor, num_committed: Sequence[int]) -> None:
        """The index reads committed tokens from the request itself, when it is asked next."""

    def forget(self, request: Request) -> None:
        self._indices.pop(request.id, None)


@dataclass
class _Pending:
    """Taps of committed tokens, from position ``start`` on, that are not in the drafter's context yet."""

    start: int
    taps: list[torch.Tensor]
    num_tokens: int = 0


class DFlashDrafter:
    """The block-diffusion drafter; its context follows the committed tokens, also while it is parked.

    Taps are collected and entered together: when the drafter is asked next, or when a page is full, because then the
    prefix cache may give it to another request. So a parked drafter costs next to nothing.
    """

    name = "dflash"

    def __init__(self, runner: Runner) -> None:
        assert runner.drafter is not None
        self.runner = runner
        self.max_width = runner.drafter.config.max_drafts
        self._pending: dict[int, _Pending] = {}  # by request id

    def offer(self, request: Request) -> RowOffer | None:
        return RowOffer(request.id, self.name, self.max_width)

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        self._enter(requests)
        return self.runner.draft(requests, widths)

    def observe(self, batch: Batch, taps: torch.Tensor, num_committed: Sequence[int]) -> None:
        page_size, full = self.runner.page_size, []
        for row, segment, count in zip(batch.rows, batch.segments, num_committed, strict=True):
            pending = self._pending.get(row.request.id)
            if pending is None or pending.start + pending.num_tokens != segment.position:  # new, or preempted meanwhile
                pending = self._pending[row.request.id] = _Pending(segment.position, [])
            own = taps[segment.start : segment.start + count]
            pending.taps.append(own if count == len(taps) else own.clone())  # a view would keep the whole step's
            pending.num_tokens += count
            if (pending.start + pending.num_tokens) // page_size > pending.start // page_size:
                full.append(row.request)
        self._enter(full)

    def forget(self, request: Request) -> None:
        """Its context lies in the request's pages and goes with them."""
        self._pending.pop(request.id, None)

    def _enter(self, requests: Sequence[Request]) -> None:
        """Brings the context of the requests up to date, in one pass for all of them."""
        taps: list[torch.Tensor] = []
        positions: list[int] = []
        slots: list[int] = []
        page_size = self.runner.page_size
        for request in requests:
            pending = self._pending.pop(request.id, None)
            if pending is None:
                continue
            span = range(pending.start, pending.start + pending.num_tokens)
            taps += pending.taps
            positions += span
            slots += [request.pages[p // page_size] * page_size + p % page_size for p in span]
        if positions:
            device = self.runner.device
            self.runner.append_context(
                torch.cat(taps), torch.tensor(positions, device=device), torch.tensor(slots, device=device)
            )


class Speculator:
    """Collects what the drafters offer for each row, and asks those that the controller chooses.

    With a fixed width of 0 nobody drafts, so no drafter is kept at work either: it costs what plain decoding costs.
    """

    def __init__(self, drafters: Sequence[Drafter], controller: WidthController) -> None:
        self.drafters = [] if controller.fixed == 0 else list(drafters)
        self.controller = controller
        self._chosen: dict[int, RowOffer] = {}  # by request id: what was taken for it in this step
        self._num_proposed: dict[int, int] = {}  # by request id, in this step, refused by its guide or not
        self._draft_seconds: dict[str, float] = {}

    def widths(self, requests: Sequence[Request]) -> list[int]:
        """How many drafts each decoding row should get in the coming step."""
        if not self.drafters:
            return [0] * len(requests)
        offers = [
            [offer for drafter in self.drafters if (offer := drafter.offer(request))] if request.drafts else []
            for request in requests
        ]
        chosen = self.controller.widths(offers)
        self._chosen = {request.id: offer for request, (offer, _) in zip(requests, chosen, strict=True) if offer}
        return [width for _, width in chosen]

    def draft(self, plan: Sequence[ScheduledRow]) -> list[list[int]]:
        """Drafts for each row of the plan, ragged, maybe none; cut before what the request's guide refuses."""
        drafts: list[list[int]] = [[] for _ in plan]
        self._draft_seconds, self._num_proposed = {}, {}
        for drafter in self.drafters:
            mine = [i for i, row in enumerate(plan) if row.width and self.drafter_of(row.request) == drafter.name]
            if not mine:
                continue
            started = time.perf_counter()
            proposals = drafter.draft([plan[i].request for i in mine], [plan[i].width for i in mine])
            self._draft_seconds[drafter.name] = time.perf_counter() - started
            for i, proposal in zip(mine, proposals, strict=True):
                assert len(proposal) <= plan[i].width
                guide, self._num_proposed[plan[i].request.id] = plan[i].request.guide, len(proposal)
                drafts[i] = guide.cut(proposal) if guide else proposal
        return drafts

    def drafter_of(self, request: Request) -> str:
        """Name of the drafter that drafted for the request in this step."""
        offer = self._chosen.get(request.id)
        return offer.kind if offer else "none"

    def observe(
        self,
        batch: Batch,
        taps: torch.Tensor,
        verdicts: Sequence[Verdict],
        num_committed: Sequence[int],
        seconds: float,
    ) -> None:
        """Learns from a step: context of the drafters, acceptance, and ``seconds`` that verification took."""
        if not self.drafters:
            return
        for drafter in self.drafters:
            drafter.observe(batch, taps, num_committed)
        results = [
            RowResult(self._chosen[row.request.id], num_proposed, verdict.num_accepted)
            for row, verdict in zip(batch.verified, verdicts, strict=True)
            if (num_proposed := self._num_proposed.get(row.request.id))
        ]
        num_tokens = len(verdicts) + sum(map(len, batch.drafts))
        # A row that reaches the end of its prompt is verified too; it has more tokens than its one and its drafts.
        is_alone = len(verdicts) == len(batch.rows) and len(batch.ids) == num_tokens
        if is_alone or results:
            self.controller.observe_step(num_tokens, seconds if is_alone else None, self._draft_seconds, results)

    def forget(self, request: Request) -> None:
        self._chosen.pop(request.id, None)
        self.controller.forget(request.id)
        for drafter in self.drafters:
            drafter.forget(request)
