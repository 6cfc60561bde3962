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

Kind = str  # a drafter's name

OPTIMISM = 0.7  # least acceptance rate of a slot that nobody has tried
MARGIN = 1.03  # drafting must be this much faster than plain
FIRST_PAUSE, LAST_PAUSE = 8, 256  # steps that a row is parked: doubled by each failed probe
PLAIN_SAMPLE = 4  # of so many plain steps one is measured, once a few were
NUM_PROBES = 3  # steps with at least one draft after a pause
FIRST_RECHECK, LAST_RECHECK = 8, 256  # steps with drafts before a plain one is made and measured; doubles each time


class Survival:
    """The chance that the first k drafts are all accepted, for each k, learnt for one drafter kind.

    Per slot it keeps a moving average of "accepted, given that all slots before were". A slot not seen yet has the
    rate of ``prior``; without one that of the last slot seen, but at least `OPTIMISM`.
    """

    def __init__(self, prior: "Survival | None" = None, min_weight: float = 0.1) -> None:
        self._prior = prior
        self._min_weight = min_weight  # of a new observation; the first ones weigh more
        self._rates: list[float] = []
        self._num_seen: list[int] = []

    def rate(self, slot: int) -> float:
        if slot < len(self._rates):
            return self._rates[slot]
        return self._prior.rate(slot) if self._prior else max([OPTIMISM, *self._rates[-1:]])

    def curve(self, num_slots: int) -> list[float]:
        """The chance that slot k and all before it are accepted, for k = 0 .. num_slots - 1; never rising."""
        return list(accumulate((self.rate(slot) for slot in range(num_slots)), operator.mul))

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified draft: of its slots, those accepted and the first one rejected say something."""
        for slot in range(min(num_accepted + 1, num_drafted)):
            if slot == len(self._rates):
                self._rates.append(self.rate(slot))
                self._num_seen.append(0)
            weight = max(self._min_weight, 1 / (3 + self._num_seen[slot]))
            self._rates[slot] += weight * (float(slot < num_accepted) - self._rates[slot])
            self._num_seen[slot] += 1
        for slot in range(max(1, num_drafted), len(self._rates)):  # not tried: comes to look like the slot before it,
            self._rates[slot] += 0.01 * max(0.0, self._rates[slot - 1] - self._rates[slot])  # until it is tried again

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
    """What a drafter could do for a row in this step."""

    request_id: Hashable
    kind: Kind | None
    available: int  # most drafts possible


@dataclass(frozen=True)
class RowResult:
    """What became of a row's draft."""

    request_id: Hashable
    kind: Kind | None
    num_drafted: int
    num_accepted: int


@dataclass
class _Track:
    """What is known of one request and drafter kind."""

    survival: Survival
    next_pause: int  # steps
    parked_until: int = 0  # step number
    num_probes: int = 0  # to be made after the pause


class WidthController:
    """Chooses the widths of each decode step; ``fixed`` is the user's width, always used (0 is plain)."""

    def __init__(self, max_width: int, fixed: int | None = None) -> None:
        self.max_width = max_width
        self.fixed = fixed
        self.costs = CostModel()
        self._shared: dict[Kind, Survival] = {}  # over all requests: what a new request starts from,
        self._pauses: dict[Kind, int] = {}  # and how long it pauses first if that does not pay
        self._tracks: dict[Hashable, dict[Kind, _Track]] = {}
        self._step = 0
        self._num_drafting = 0  # steps with drafts since the last plain one
        self._recheck = FIRST_RECHECK

    def widths(self, rows: Sequence[RowOffer]) -> list[int]:
        """The width of each row, at most what it has available; the drafter is to deliver exactly this many."""
        if self.fixed is not None:
            return [min(self.fixed, row.available) if row.kind else 0 for row in rows]
        self._step += 1
        widths = self._choose(rows)
        self._num_drafting = self._num_drafting + 1 if any(widths) else 0
        return widths

    def observe_step(
        self, num_tokens: int, verify_seconds: float, draft_seconds: Mapping[Kind, float], results: Sequence[RowResult]
    ) -> None:
        """Learn from a finished step without prompt tokens: what it cost and what became of each row's draft (rows
        without one may be left out)."""
        if not results and self._step % PLAIN_SAMPLE and self.costs.is_settled(num_tokens):
            return
        self.costs.observe(num_tokens, verify_seconds)
        for kind, seconds in draft_seconds.items():
            self.costs.observe_draft(kind, sum(r.kind == kind and r.num_drafted > 0 for r in results), seconds)
        for result in results:
            if result.kind and result.num_drafted:
                self._prior(result.kind).observe(result.num_drafted, result.num_accepted)
                if track := self._tracks.get(result.request_id, {}).get(result.kind):
                    track.survival.observe(result.num_drafted, result.num_accepted)

    def forget(self, request_id: Hashable) -> None:
        """A request has ended."""
        self._tracks.pop(request_id, None)

    def _choose(self, rows: Sequence[RowOffer]) -> list[int]:
        num_rows = len(rows)
        curves = [self._curve(row) for row in rows]
        self._probe_one_at_a_time(rows, curves)
        num_slots = sum(map(len, curves))
        if not num_slots or not self.costs.is_measured(num_rows // 2, num_rows):
            return [0] * num_rows
        if self._num_drafting >= self._recheck:
            self._recheck = min(2 * self._recheck, LAST_RECHECK)
            return [0] * num_rows
        if num_new := self._unexplored(num_rows, num_slots):
            return count_per_row(ranked(curves)[:num_new], num_rows)
        best, gain = best_widths(curves, [row.kind for row in rows], self.costs)
        is_worth_it = gain >= MARGIN
        offered = zip(rows, curves, best, strict=True)
        return [self._judge(row, width, is_worth_it) if curve else 0 for row, curve, width in offered]

    def _curve(self, row: RowOffer) -> list[float]:
        """Survival of the slots to choose from; none while the row is parked."""
        if row.kind is None:
            return []
        track = self._track(row.request_id, row.kind)
        if self._step < track.parked_until:
            return []
        return track.survival.curve(min(self.max_width, row.available))

    def _probe_one_at_a_time(self, rows: Sequence[RowOffer], curves: list[list[float]]) -> None:
        """Where a kind has not paid of late, only the first row on probation is offered: a batch of them would pay the
        price of a probe many times for the same answer."""
        probing: list[Kind] = []
        for i, row in enumerate(rows):
            if not curves[i] or row.kind is None or self._pauses.get(row.kind, FIRST_PAUSE) == FIRST_PAUSE:
                continue
            if self._track(row.request_id, row.kind).num_probes:
                if row.kind in probing:
                    curves[i] = []
                probing.append(row.kind)

    def _unexplored(self, num_rows: int, num_slots: int) -> int:
        """Drafts that make the smallest doubling of the batch that was never measured, if its cost could pay at all.

        What was never measured counts as free: guessing it from smaller batches, a bad start would never be left.
        """
        size = 2 * num_rows
        while size <= num_rows + num_slots:
            if not self.costs.is_measured(size // 2, size):
                return size - num_rows
            if size / self.costs.seconds(size) < MARGIN * num_rows / self.costs.seconds(num_rows):
                return 0  # too dear even if all drafts were accepted
            size *= 2
        return 0

    def _judge(self, row: RowOffer, width: int, is_worth_it: bool) -> int:
        """Park a row that drafts do not help. On probation it gets them all the same, so that they are measured."""
        assert row.kind is not None
        track = self._track(row.request_id, row.kind)
        if track.num_probes:
            track.num_probes -= 1
            return max(1, width)
        if width and is_worth_it:
            track.next_pause = self._pauses[row.kind] = FIRST_PAUSE
            return width
        track.parked_until = self._step + 1 + track.next_pause
        track.next_pause = min(2 * track.next_pause, LAST_PAUSE)
        self._pauses[row.kind] = max(self._pauses.get(row.kind, FIRST_PAUSE), track.next_pause)
        track.num_probes = NUM_PROBES
        track.survival.age()
        return 0

    def _track(self, request_id: Hashable, kind: Kind) -> _Track:
        tracks = self._tracks.setdefault(request_id, {})
        if kind not in tracks:
            tracks[kind] = _Track(Survival(self._prior(kind)), self._pauses.get(kind, FIRST_PAUSE))
        return tracks[kind]

    def _prior(self, kind: Kind) -> Survival:
        return self._shared.setdefault(kind, Survival(min_weight=0.02))


def ranked(curves: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All slots as (-survival, slot, row), the most promising first; a row's slots stay in order."""
    return sorted((-survival, slot, row) for row, curve in enumerate(curves) for slot, survival in enumerate(curve))


def count_per_row(slots: Sequence[tuple[float, int, int]], num_rows: int) -> list[int]:
    widths = [0] * num_rows
    for _, _, row in slots:
        widths[row] += 1
    return widths


def best_widths(
    curves: Sequence[Sequence[float]], kinds: Sequence[Kind | None], costs: CostModel
) -> tuple[list[int], float]:
    """The widths, not all 0, with most expected tokens per second, and how much faster than plain they are.

    For a given number of drafts the best are the first by survival. As a kind costs a drafting pass however few of its
    drafts are used, each choice of kinds is ranked by itself.
    """
    num_rows = len(curves)
    seconds = [costs.seconds(num_rows + n) for n in range(sum(map(len, curves)) + 1)]
    best: list[tuple[float, int, int]] = []
    best_rate = 0.0
    offered = Counter(kind for kind, curve in zip(kinds, curves, strict=True) if kind and curve)
    present = list(offered)
    for chosen in chain.from_iterable(combinations(present, n) for n in range(1, len(present) + 1)):
        slots = ranked([curve if kind in chosen else [] for kind, curve in zip(kinds, curves, strict=True)])
        draft_seconds = sum(costs.draft_seconds(kind, offered[kind]) for kind in chosen)
        num_expected = float(num_rows)
        for n, (minus_survival, _, _) in enumerate(slots, 1):
            num_expected -= minus_survival
            rate = num_expected / (seconds[n] + draft_seconds)
            if rate > best_rate:
                best_rate, best = rate, slots[:n]
    return count_per_row(best, num_rows), best_rate * seconds[0] / num_rows


def _bucket(num_tokens: int) -> int:
    """Up to 64 each count is its own bucket; beyond, buckets grow with the count (by 3 to 6 %)."""
    step = 1 if num_tokens <= 64 else 1 << (num_tokens.bit_length() - 5)
    return num_tokens // step * step


def _rising(values: list[float]) -> list[float]:
    """The middle between the two tightest curves that never fall, one above and one below the values."""
    above = list(accumulate(values, max))
    below = list(accumulate(reversed(values), min))[::-1]
    return [(a + b) / 2 for a, b in zip(above, below, strict=True)]
