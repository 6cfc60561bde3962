"""How many draft tokens each row gets in a step: the number that commits the most tokens per second, maybe none.

Expected tokens come from measured acceptance (`Survival`), expected time from measured steps (`CostModel`). Decisions
use past steps only and nothing random, and they never change the output, only the speed.
"""

import operator
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations
from math import exp, log1p

Kind = str  # a drafter's name

LAST_SLOT = 15
OPTIMISM = 0.7  # least acceptance rate of a slot that nobody has tried
MARGIN = 1.03  # drafting must be this much faster than plain
FIRST_PAUSE, LAST_PAUSE = 8, 256  # steps that an offer is parked: doubled by each failed probe
CREDIT = 3.0  # plain steps that trying out drafts may cost at once,
ALLOWANCE = 0.01  # and for each step after that
PLAIN_SAMPLE = 4  # of so many plain steps one is measured, once a few were
NUM_PROBES = 3  # steps with at least one draft after a pause
FIRST_RECHECK, LAST_RECHECK = 8, 256  # steps with drafts before a plain one is made and measured; doubles each time


class Survival:
    """The chance that the first k drafts are all accepted, for each k, learnt for one drafter kind.

    Per slot it keeps a moving average of "accepted, given that all slots before were". A slot not seen yet has the
    rate of ``prior``; without one that of the last slot seen, but at least `OPTIMISM`.

    A draft may start at a later slot than the first: one that continues a match of ten tokens is as good as what is
    left of one that began with a match of two and had eight accepted. Slots from `LAST_SLOT` on are one.
    """

    def __init__(self, prior: "Survival | None" = None, min_weight: float = 0.1) -> None:
        self._prior = prior
        self._min_weight = min_weight  # of a new observation; the first ones weigh more
        self._rates: list[float] = []
        self._num_seen: list[int] = []

    def rate(self, slot: int) -> float:
        slot = min(slot, LAST_SLOT)
        if slot < len(self._rates):
            return self._rates[slot]
        return self._prior.rate(slot) if self._prior else max([OPTIMISM, *self._rates[-1:]])

    def curve(self, num_slots: int, start: int = 0) -> list[float]:
        """The chance that slots start to start + k are all accepted, for k = 0 .. num_slots - 1; never rising."""
        return list(accumulate((self.rate(start + k) for k in range(num_slots)), operator.mul))

    def observe(self, num_drafted: int, num_accepted: int, start: int = 0) -> None:
        """Learn from a verified draft: of its slots, those accepted and the first one rejected say something."""
        for k in range(min(num_accepted + 1, num_drafted)):
            slot = min(start + k, LAST_SLOT)
            while slot >= len(self._rates):
                self._rates.append(self.rate(len(self._rates)))
                self._num_seen.append(0)
            weight = max(self._min_weight, 1 / (3 + self._num_seen[slot]))
            self._rates[slot] += weight * (float(k < num_accepted) - self._rates[slot])
            self._num_seen[slot] += 1
        # Those not tried come to look like the slot before them, until they are tried again.
        for slot in range(max(1, start + num_drafted), len(self._rates)):
            self._rates[slot] += 0.01 * max(0.0, self._rates[slot - 1] - self._rates[slot])

    def age(self) -> None:
        """After a pause the text may be another: the next observations weigh as much as first ones."""
        self._num_seen = [0] * len(self._num_seen)


class Timing:
    """Seconds of one kind of work: the median of the first three samples, then a moving average with outliers cut."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self.seconds = 0.0

    @property
    def is_settled(self) -> bool:
        return len(self._first) == 3

    def observe(self, seconds: float) -> float:
        """Returns by what factor the estimate changed."""
        seconds = max(seconds, 1e-9)
        if len(self._first) < 3:
            self._first.append(seconds)
            self.seconds = sorted(self._first)[(len(self._first) - 1) // 2]
            return 1.0
        before = self.seconds
        self.seconds += 0.1 * (min(seconds, 1.5 * before) - before)
        return self.seconds / before


class CostModel:
    """Seconds of a verify step by the number of tokens in its batch, and of a drafting pass by kind, as measured."""

    def __init__(self) -> None:
        self._verify: dict[int, Timing] = {}
        self._draft: dict[Kind, dict[int, Timing]] = {}  # by the power of two that the number of rows lies below
        self._counts: list[int] = []  # keys of _verify in order
        self._curve: list[float] = []  # their seconds, made to rise; empty when out of date

    def observe(self, num_tokens: int, seconds: float) -> None:
        count = _bucket(num_tokens)
        if count not in self._verify:
            insort(self._counts, count)
        factor = self._verify.setdefault(count, Timing()).observe(seconds)
        for other, timing in self._verify.items():  # a longer context or a busy machine slows steps of all sizes:
            if other != count:  # those not seen now follow by half
                timing.seconds *= (1 + factor) / 2
        self._curve = []

    def observe_draft(self, kind: Kind, num_rows: int, seconds: float) -> None:
        self._draft.setdefault(kind, {}).setdefault(num_rows.bit_length(), Timing()).observe(seconds)

    def is_settled(self, num_tokens: int) -> bool:
        """Were steps of so many tokens measured often enough that one more hardly matters?"""
        timing = self._verify.get(_bucket(num_tokens))
        return timing is not None and timing.is_settled

    def is_measured(self, above: int, up_to: int) -> bool:
        """Was a step of more than ``above`` and at most ``up_to`` tokens measured?"""
        return bisect_right(self._counts, above) < bisect_right(self._counts, up_to)

    def seconds(self, num_tokens: int) -> float:
        """Never falls as ``num_tokens`` rises; linear between measured counts and beyond them; 0 with none measured."""
        counts = self._counts
        if not counts:
            return 0.0
        curve = self._curve = self._curve or _rising([self._verify[count].seconds for count in counts])
        if num_tokens <= counts[0] or len(counts) == 1:
            return curve[0]
        if num_tokens > counts[-1]:
            return curve[-1] + (num_tokens - counts[-1]) * (curve[-1] - curve[0]) / (counts[-1] - counts[0])
        i = bisect_left(counts, num_tokens)
        share = (num_tokens - counts[i - 1]) / (counts[i] - counts[i - 1])
        return curve[i - 1] + share * (curve[i] - curve[i - 1])

    def draft_seconds(self, kind: Kind, num_rows: int) -> float:
        """Of a pass for so many rows; if never measured, as for the next fewer, and 0 when nothing is known."""
        measured = self._draft.get(kind, {})
        fitting = [size for size in measured if size <= num_rows.bit_length()]
        return measured[max(fitting)].seconds if fitting else 0.0


@dataclass(frozen=True)
class RowOffer:
    """What a drafter could do for a row in this step. ``start``: the slot of the kind's survival that the first draft
    counts as."""

    request_id: Hashable
    kind: Kind
    available: int  # most drafts possible, at least 1
    start: int = 0


@dataclass(frozen=True)
class RowResult:
    """What became of a row's draft."""

    offer: RowOffer
    num_drafted: int
    num_accepted: int


@dataclass
class _Track:
    """Whether one request drafts from one kind and start, or has given it up for a while."""

    next_pause: int  # steps
    parked_until: int = 0  # step number
    num_probes: int = 0  # to be made after the pause


class WidthController:
    """Chooses who drafts in each decode step, and how much; ``fixed`` is the user's width, always used (0 is plain) by
    whoever is likely to have more drafts accepted: no measured time plays a part then.

    What is not known to pay is tried out, but on credit: all that this loses, counted in plain steps, is at most
    `CREDIT` and `ALLOWANCE` of the steps made.
    """

    def __init__(self, max_width: int, fixed: int | None = None) -> None:
        self.max_width = max_width
        self.fixed = fixed
        self.costs = CostModel()
        self._shared: dict[Kind, Survival] = {}  # over all requests: what a new request starts from,
        self._pauses: dict[tuple[Kind, int], int] = {}  # and how long it pauses first if that does not pay
        self._survivals: dict[Hashable, dict[Kind, Survival]] = {}
        self._tracks: dict[Hashable, dict[tuple[Kind, int], _Track]] = {}
        self._step = 0
        self._num_drafting = 0  # steps with drafts since the last plain one
        self._recheck = FIRST_RECHECK
        self._credit = CREDIT
        self._is_trying = False  # something in this step
        self._num_rows = 0  # in this step

    def widths(self, rows: Sequence[Sequence[RowOffer]]) -> list[tuple[RowOffer | None, int]]:
        """Of each row's offers the one to take, and how many drafts of it, at most what it has available: exactly this
        many are to be delivered. (None, 0) where nothing is to be drafted."""
        if self.fixed is not None:
            picked = [max(offers, key=lambda offer: sum(self._curve(offer)), default=None) for offers in rows]
            return [(offer, min(self.fixed, offer.available)) if offer else (None, 0) for offer in picked]
        self._step += 1
        self._num_rows = len(rows)
        self._is_trying = False
        self._credit = min(CREDIT, self._credit + ALLOWANCE)
        chosen = self._choose(rows)
        self._num_drafting = self._num_drafting + 1 if any(width for _, width in chosen) else 0
        return [(offer, width) if width else (None, 0) for offer, width in chosen]

    def observe_step(
        self,
        num_tokens: int,
        verify_seconds: float | None,
        draft_seconds: Mapping[Kind, float],
        results: Sequence[RowResult],
    ) -> None:
        """Learn from a finished step: what it cost, and what became of the drafts of rows that had any.

        num_tokens: of the rows that decode. verify_seconds: None if the step held prompt tokens too, whose share of its
        time nobody knows.
        """
        if self._is_trying and (plain_seconds := self.costs.seconds(self._num_rows)):
            gained = 1 + sum(result.num_accepted for result in results) / self._num_rows
            spent = self.costs.seconds(num_tokens) if verify_seconds is None else verify_seconds
            self._credit += gained - (spent + sum(draft_seconds.values())) / plain_seconds
        if not results and self._step % PLAIN_SAMPLE and self.costs.is_settled(num_tokens):
            return
        if verify_seconds is not None:
            self.costs.observe(num_tokens, verify_seconds)
        for kind, seconds in draft_seconds.items():
            self.costs.observe_draft(kind, sum(result.offer.kind == kind for result in results), seconds)
        for result in results:
            offer = result.offer
            for survival in (self._prior(offer.kind), self._survival(offer)):
                survival.observe(result.num_drafted, result.num_accepted, offer.start)

    def forget(self, request_id: Hashable) -> None:
        """A request has ended."""
        self._tracks.pop(request_id, None)
        self._survivals.pop(request_id, None)

    def _choose(self, rows: Sequence[Sequence[RowOffer]]) -> list[tuple[RowOffer | None, int]]:
        num_rows = len(rows)
        picked = [self._pick(offers) for offers in rows]
        curves = [self._curve(offer) for offer in picked]
        widths = [0] * num_rows
        if not any(curves) or not self.costs.is_measured(num_rows // 2, num_rows):
            pass
        elif self._num_drafting >= self._recheck:
            self._recheck = min(2 * self._recheck, LAST_RECHECK)
        elif num_new := self._unexplored(curves):
            self._is_trying = True
            widths = count_per_row(ranked(curves)[:num_new], num_rows)
        else:
            best, gain = best_widths(curves, [offer.kind if offer else None for offer in picked], self.costs)
            is_worth_it = gain >= MARGIN
            for i, offer in enumerate(picked):
                if offer is not None:
                    widths[i] = self._judge(offer, best[i], is_worth_it)
        return list(zip(picked, widths, strict=True))

    def _pick(self, offers: Sequence[RowOffer]) -> RowOffer | None:
        """Of those not parked: one that is to be probed, or else the one that would be fastest if there were no other
        row."""
        awake = [offer for offer in offers if self._track(offer).parked_until <= self._step]
        if len(awake) < 2:
            return awake[0] if awake else None
        for offer in awake:
            if self._track(offer).num_probes and self._credit > 0:
                return offer
        if not self.costs.seconds(1):
            return awake[0]
        return max(awake, key=lambda offer: best_widths([self._curve(offer)], [offer.kind], self.costs)[1])

    def _curve(self, offer: RowOffer | None) -> list[float]:
        """Survival of the slots to choose from."""
        if offer is None:
            return []
        most = self.max_width if self.fixed is None else self.fixed
        return self._survival(offer).curve(min(most, offer.available), offer.start)

    def _unexplored(self, curves: Sequence[Sequence[float]]) -> int:
        """Drafts that make the smallest doubling of the batch that was never measured, if they could pay at all.

        What was never measured counts as dear as the next smaller batch: guessing it from the slope of smaller ones, a
        bad start would never be left.
        """
        num_rows, slots = len(curves), ranked(curves)
        size = 2 * num_rows
        while size <= num_rows + len(slots) and self._credit > 0:
            num_new = size - num_rows
            gain = exp(-sum(minus_worth for minus_worth, _, _ in slots[:num_new]) / num_rows)
            is_measured = self.costs.is_measured(size // 2, size)
            seconds = self.costs.seconds(size if is_measured else size // 2)
            if gain * self.costs.seconds(num_rows) < MARGIN * seconds:
                return 0
            if not is_measured:
                return num_new
            size *= 2
        return 0

    def _judge(self, offer: RowOffer, width: int, is_worth_it: bool) -> int:
        """Parks an offer that does not pay. After its pause it is probed all the same, one row at a time, when there is
        credit for it."""
        track = self._track(offer)
        if track.num_probes and self._credit > 0 and not self._is_trying:
            self._is_trying = True
            track.num_probes -= 1
            return max(1, width)
        if width and is_worth_it:
            track.next_pause = self._pauses[offer.kind, offer.start] = FIRST_PAUSE
            return width
        if not track.num_probes:
            track.parked_until = self._step + 1 + track.next_pause
            track.next_pause = self._pauses[offer.kind, offer.start] = min(2 * track.next_pause, LAST_PAUSE)
            track.num_probes = NUM_PROBES
            self._survival(offer).age()
        return 0

    def _track(self, offer: RowOffer) -> _Track:
        key, tracks = (offer.kind, offer.start), self._tracks.setdefault(offer.request_id, {})
        if key not in tracks:
            tracks[key] = _Track(self._pauses.get(key, FIRST_PAUSE))
        return tracks[key]

    def _survival(self, offer: RowOffer) -> Survival:
        survivals = self._survivals.setdefault(offer.request_id, {})
        if offer.kind not in survivals:
            survivals[offer.kind] = Survival(self._prior(offer.kind))
        return survivals[offer.kind]

    def _prior(self, kind: Kind) -> Survival:
        return self._shared.setdefault(kind, Survival(min_weight=0.02))


def ranked(curves: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All slots as (-worth, slot, row), the most worthwhile first; a row's slots stay in order.

    Worth is what the slot adds to the logarithm of the tokens that its row may expect of the step.
    """
    slots = []
    for row, curve in enumerate(curves):
        expected = 1.0
        for slot, survival in enumerate(curve):
            slots.append((-log1p(survival / expected), slot, row))
            expected += survival
    return sorted(slots)


def count_per_row(slots: Sequence[tuple[float, int, int]], num_rows: int) -> list[int]:
    widths = [0] * num_rows
    for _, _, row in slots:
        widths[row] += 1
    return widths


def best_widths(
    curves: Sequence[Sequence[float]], kinds: Sequence[Kind | None], costs: CostModel
) -> tuple[list[int], float]:
    """The widths, not all 0, that make the rows fastest, and how much faster than plain they are then: in the geometric
    mean, so that a row may not gain what its neighbours lose (proportional fairness: Kelly et al. 1998).

    For a given number of drafts the best are the first by worth. As a kind costs a drafting pass however few of its
    drafts are used, each choice of kinds is ranked by itself.
    """
    num_rows = len(curves)
    seconds = [costs.seconds(num_rows + n) for n in range(sum(map(len, curves)) + 1)]
    best: list[tuple[float, int, int]] = []
    best_gain = 0.0
    offered = Counter(kind for kind, curve in zip(kinds, curves, strict=True) if kind and curve)
    present = list(offered)
    for chosen in chain.from_iterable(combinations(present, n) for n in range(1, len(present) + 1)):
        slots = ranked([curve if kind in chosen else [] for kind, curve in zip(kinds, curves, strict=True)])
        draft_seconds = sum(costs.draft_seconds(kind, offered[kind]) for kind in chosen)
        worth = 0.0
        for n, (minus_worth, _, _) in enumerate(slots, 1):
            worth -= minus_worth
            gain = exp(worth / num_rows) * seconds[0] / (seconds[n] + draft_seconds)
            if gain > best_gain:
                best_gain, best = gain, slots[:n]
    return count_per_row(best, num_rows), best_gain


def _bucket(num_tokens: int) -> int:
    """Up to 64 each count is its own bucket; beyond, buckets grow with the count (by 3 to 6 %)."""
    step = 1 if num_tokens <= 64 else 1 << (num_tokens.bit_length() - 5)
    return num_tokens // step * step


def _rising(values: list[float]) -> list[float]:
    """The middle between the two tightest curves that never fall, one above and one below the values."""
    above = list(accumulate(values, max))
    below = list(accumulate(reversed(values), min))[::-1]
    return [(a + b) / 2 for a, b in zip(above, below, strict=True)]
