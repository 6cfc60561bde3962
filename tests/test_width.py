"""The width controller, driven by simulated engines: it finds the fast width, and costs little where there is none."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.width import (
    ALLOWANCE,
    CREDIT,
    MARGIN,
    CostModel,
    Kind,
    RowOffer,
    RowResult,
    Survival,
    WidthController,
    best_widths,
)

KINDS = ("ngram", "dflash")


class Engine:
    """Steps of simulated duration; a draft at a slot is accepted with a given probability."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        acceptance: Callable[[int, int], float],  # of a row at a step
        num_rows: int = 1,
        seed: int = 0,
    ) -> None:
        self.controller = WidthController(max_width=15)
        self.seconds = seconds
        self.acceptance = acceptance
        self.num_rows = num_rows
        self.available = 15
        self.kind: Kind = "dflash"
        self.draft_seconds = 0.0
        self.noise = 0.0  # the share of measured times that are ten times too long
        self.rng = random.Random(seed)
        self.widths: list[list[int]] = []
        self.num_committed = 0
        self.total_seconds = 0.0

    def run(self, num_steps: int) -> "Engine":
        for _ in range(num_steps):
            offers = [RowOffer(row, self.kind, self.available) for row in range(self.num_rows)]
            widths = widths_of(self.controller, offers)
            assert all(0 <= width <= self.available for width in widths)
            results = [RowResult(o, w, self.accept(o.request_id, w)) for o, w in zip(offers, widths, strict=True) if w]
            num_tokens = self.num_rows + sum(widths)
            seconds, drafting = self.seconds(num_tokens), self.draft_seconds if any(widths) else 0.0
            measured = seconds * (10 if self.rng.random() < self.noise else self.rng.uniform(1, 1.1))
            self.controller.observe_step(num_tokens, measured, {self.kind: drafting} if drafting else {}, results)
            self.num_committed += self.num_rows + sum(result.num_accepted for result in results)
            self.total_seconds += seconds + drafting
            self.widths.append(widths)
        return self

    def accept(self, row: int, width: int) -> int:
        num_accepted = 0
        while num_accepted < width and self.rng.random() < self.acceptance(row, len(self.widths)):
            num_accepted += 1
        return num_accepted

    def speed_up(self) -> float:
        """Over plain decoding, since the start or the last `reset`."""
        return self.num_committed * self.seconds(self.num_rows) / (self.num_rows * self.total_seconds)

    def reset(self) -> None:
        self.num_committed, self.total_seconds = 0, 0.0


def widths_of(controller: WidthController, offers: Sequence[RowOffer]) -> list[int]:
    """Where each row has one offer."""
    return [width for _, width in controller.widths([[offer] for offer in offers])]


def cheap(num_tokens: int) -> float:
    return 1 + 0.001 * num_tokens


def linear(num_tokens: int) -> float:
    return 1.0 * num_tokens


def moderate(num_tokens: int) -> float:
    return 1 + 0.15 * num_tokens


def stepped(num_tokens: int) -> float:
    """The second token is dear, those after it are not: a drafter that tries one at a time stays at 0 or 1."""
    return {1: 1.0, 2: 1.5, 3: 1.6}.get(num_tokens, 1.7 + 0.12 * (num_tokens - 4))


def test_cheap_verification_and_good_drafts_get_the_full_width() -> None:
    """The controller dithers at small widths where a GPU would verify the whole block for nothing."""
    engine = Engine(cheap, lambda row, step: 0.95).run(200)
    assert sum(widths == [15] for widths in engine.widths[20:]) > 150
    assert engine.speed_up() > 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [linear, moderate, stepped])
def test_poor_drafts_cost_less_than_three_percent(seconds: Callable[[int], float], seed: int) -> None:
    """V1: with a drafter that does not fit the text, speculation is slower than plain decoding."""
    engine = Engine(seconds, lambda row, step: 0.05, seed=seed).run(2000)
    assert engine.speed_up() > 0.97
    assert sum(any(widths) for widths in engine.widths) < 120


def test_verification_that_is_never_worth_it_parks_even_good_drafts() -> None:
    """V1: where eight tokens cost eight times one, the best drafts gain nothing."""
    engine = Engine(linear, lambda row, step: 0.8).run(2000)
    assert engine.speed_up() > 0.97


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_first_step_does_not_mislead_for_long(seed: int) -> None:
    """The first plain step includes warming up; taken as the measure, everything else looks fast for ever."""
    engine = Engine(linear, lambda row, step: 0.3, seed=seed)
    engine.controller.widths([[RowOffer(0, "dflash", 15)]])
    engine.controller.observe_step(1, 10.0, {}, [])
    assert engine.run(2000).speed_up() > 0.97


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_machine_does_not_hide_a_gain(seed: int) -> None:
    """One step in fifty takes ten times as long; averaged in, it makes a width look bad for a long time."""
    engine = Engine(stepped, lambda row, step: 0.8, seed=seed)
    engine.noise = 0.02
    assert engine.run(1000).speed_up() > 0.9 * 1.93  # what the best fixed width reaches


def test_a_dear_first_draft_does_not_hide_the_gain_of_many() -> None:
    """Climbing from width to width stops at the first that does not pay."""
    engine = Engine(stepped, lambda row, step: 0.9).run(500)
    assert engine.speed_up() > 2.4


@pytest.mark.parametrize("seconds", [cheap, moderate, stepped])
def test_drafts_that_become_good_midway_are_used_again(seconds: Callable[[int], float]) -> None:
    """A request that begins with prose is parked for good, though the code that follows is easy."""
    engine = Engine(seconds, lambda row, step: 0.05 if step < 1000 else 0.9).run(1300)
    engine.reset()
    engine.run(300)
    best = max(sum(0.9**k for k in range(width + 1)) * seconds(1) / seconds(1 + width) for width in range(16))
    assert engine.speed_up() > 0.9 * best


def test_drafts_that_become_poor_midway_are_given_up() -> None:
    """An average over the whole request keeps drafting long after the text has changed."""
    engine = Engine(moderate, lambda row, step: 0.9 if step < 500 else 0.02).run(540)
    engine.reset()
    assert engine.run(1000).speed_up() > 0.97


def test_good_and_poor_rows_of_a_batch_get_different_widths() -> None:
    """One width for the whole batch makes the good row pay for the poor one."""
    engine = Engine(moderate, lambda row, step: (0.95, 0.05)[row], num_rows=2).run(500)
    good, poor = ([widths[row] for widths in engine.widths[100:]] for row in (0, 1))
    assert sum(good) > 5 * 400
    assert sum(poor) < 0.2 * 400


def test_a_parked_row_beside_a_good_one_is_still_probed() -> None:
    """The slots of a good neighbour always look better, so that a parked row never gets a chance to show its change."""
    engine = Engine(moderate, lambda row, step: (0.95, 0.0 if step < 500 else 0.95)[row], num_rows=2).run(1200)
    assert sum(widths[1] for widths in engine.widths[:500]) < 60
    assert sum(widths[1] for widths in engine.widths[-200:]) > 5 * 200


def test_a_row_does_not_gain_what_its_neighbours_lose() -> None:
    """Fault: the tokens of all rows together are most when one row gets all drafts, and the other waits for them."""
    engine = Engine(lambda n: 1 + 0.5 * n, lambda row, step: (1.0, 0.0)[row], num_rows=2).run(400)
    widths = [widths[0] for widths in engine.widths[100:]]
    assert 1 <= sorted(widths)[150] <= 4  # 3 of 15: twice the speed of the first, and 0.57 of the other's


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("seconds", [linear, moderate, stepped])
def test_trying_out_loses_no_more_than_its_credit(seconds: Callable[[int], float], num_rows: int) -> None:
    """V1: fault: each row, each drafter and each size of batch tries for itself, and together they cost a tenth."""
    engine = Engine(seconds, lambda row, step: 0.0, num_rows).run(1500)
    lost = engine.total_seconds / seconds(num_rows) - engine.num_committed / num_rows
    assert 0 < lost < 2 * CREDIT + 1500 * ALLOWANCE + 3  # once more for what was believed to pay at first


def test_a_drafting_pass_that_costs_more_than_it_gains_is_left_out() -> None:
    """Verification is cheap, but a slow drafter eats the gain."""
    engine = Engine(cheap, lambda row, step: 0.4)
    engine.draft_seconds = 1.0
    assert engine.run(2000).speed_up() > 0.97
    assert engine.widths[-1] == [0] or sum(any(widths) for widths in engine.widths) < 120


def test_pauses_double_up_to_a_limit_and_a_success_resets_them() -> None:
    """Probing at a fixed rate costs too much when drafts stay poor, and reacts too late when they do not."""
    engine = Engine(moderate, lambda row, step: float(1500 <= step < 2200)).run(2600)
    assert engine.widths[2199][0] >= 10

    def pauses(begin: int, end: int) -> list[int]:
        drafting = [step for step in range(begin, end) if any(engine.widths[step])]
        return [after - before - 1 for before, after in pairwise(drafting) if after > before + 4]

    doubling = pauses(20, 1500)
    assert all(now == min(2 * last, now) for last, now in pairwise(doubling))
    assert max(doubling) - 256 in range(4) and len(doubling) < 10
    assert min(pauses(2200, 2600)) < 16


def test_drafting_starts_after_one_plain_step_and_widens_quickly() -> None:
    """A controller that waits for many measurements before it drafts does nothing for short answers."""
    engine = Engine(cheap, lambda row, step: 1.0).run(8)
    assert [widths[0] for widths in engine.widths] == [0, 1, 3, 7, 15, 15, 15, 15]


def test_a_fixed_width_is_always_used() -> None:
    """`--width 4` that is parked, or `--width 0` that drafts, spoils every measurement."""
    for fixed in (0, 4):
        controller = WidthController(max_width=15, fixed=fixed)
        for _ in range(50):
            offers = [RowOffer(0, "dflash", 15), RowOffer(1, "ngram", 2)]
            assert controller.widths([*([offer] for offer in offers), []]) == [
                (offers[0], fixed),
                (offers[1], min(fixed, 2)),
                (None, 0),
            ]
            controller.observe_step(1, 100.0, {}, [RowResult(offers[0], fixed, 0)] if fixed else [])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_row_gets_more_than_it_has_available(data: st.DataObject) -> None:
    """A width beyond the context limit, or beyond what the n-gram index found, makes a batch that cannot be built."""
    controller = WidthController(max_width=6)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    for _ in range(60):
        rows = [
            [RowOffer(i, kind, rng.randrange(1, 10), rng.randrange(30)) for kind in KINDS if rng.random() < 0.7]
            for i in range(rng.randrange(4))
        ]
        chosen = controller.widths(rows)
        assert len(chosen) == len(rows)
        for offers, (offer, width) in zip(rows, chosen, strict=True):
            assert (width == 0) if offer is None else (offer in offers and 0 < width <= min(6, offer.available))
        results = [RowResult(offer, width, rng.randint(0, width)) for offer, width in chosen if offer]
        num_tokens = len(rows) + sum(width for _, width in chosen)
        controller.observe_step(num_tokens, rng.uniform(0.5, 2), {}, results)


def test_equal_histories_give_equal_decisions() -> None:
    """Decisions that depend on anything but past steps make a slow run impossible to repeat."""
    first, second = (Engine(stepped, lambda row, step: 0.6, num_rows=3, seed=5).run(300).widths for _ in range(2))
    assert first == second


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    """M5: statistics per request, kept for ever, are a leak."""
    controller = WidthController(max_width=15)
    for i in range(100):
        for _ in range(3):
            controller.widths([[RowOffer(i, "dflash", 15)]])
            controller.observe_step(1, 1.0, {}, [RowResult(RowOffer(i, "dflash", 15), 1, 1)])
        controller.forget(i)
    controller.forget("never seen")
    assert not controller._tracks and not controller._survivals


# Up to three rows with up to three slots: conditional rates per slot, and the drafter kind of the row.
rows_of_rates = st.lists(
    st.tuples(st.sampled_from(["ngram", "dflash"]), st.lists(st.floats(0, 1), max_size=3)), min_size=1, max_size=3
)


@given(rows_of_rates, st.lists(st.floats(0.1, 3), min_size=1, max_size=10), st.floats(0.001, 1), st.floats(0.001, 1))
@settings(max_examples=150, deadline=None)
def test_the_chosen_widths_are_the_best_of_all(
    rows: list[tuple[Kind, list[float]]], seconds: list[float], ngram_seconds: float, dflash_seconds: float
) -> None:
    """A greedy choice that stops at the first slot that does not pay, or pays for a drafter that it does not need."""
    costs = CostModel()
    for num_tokens, value in enumerate(seconds, 1):
        costs.observe(num_tokens, value)
    costs.observe_draft("ngram", 1, ngram_seconds)
    costs.observe_draft("dflash", 1, dflash_seconds)
    curves = [[product_of(rates[: slot + 1]) for slot in range(len(rates))] for _, rates in rows]
    kinds: list[Kind | None] = [kind for kind, _ in rows]

    def rate(widths: tuple[int, ...]) -> float:
        expected = [1 + sum(curve[:width]) for curve, width in zip(curves, widths, strict=True)]
        used = dict.fromkeys(kind for kind, width in zip(kinds, widths, strict=True) if kind and width)
        return product_of(expected) ** (1 / len(rows)) / (
            costs.seconds(len(rows) + sum(widths)) + sum(costs.draft_seconds(kind, 1) for kind in used)
        )

    everything = [widths for widths in product(*(range(len(curve) + 1) for curve in curves)) if any(widths)]
    chosen, gain = best_widths(curves, kinds, costs)
    if not everything:
        assert not any(chosen) and gain < MARGIN
        return
    best = max(map(rate, everything))
    assert rate(tuple(chosen)) == pytest.approx(best)
    assert gain == pytest.approx(best / rate((0,) * len(rows)))


def product_of(rates: list[float]) -> float:
    result = 1.0
    for rate in rates:
        result *= rate
    return result


def test_only_slots_that_were_reached_are_learnt_from() -> None:
    """Counting drafts behind a rejection as rejected drags the rates of late slots down to nothing."""
    survival = Survival()
    for _ in range(100):
        survival.observe(num_drafted=8, num_accepted=2)
    assert survival.rate(0) > 0.99 and survival.rate(1) > 0.99
    assert survival.rate(2) < 0.01
    assert survival.rate(3) == 0.7
    assert survival.curve(5) == sorted(survival.curve(5), reverse=True)
    before = survival.curve(8)
    survival.observe(num_drafted=0, num_accepted=0)
    assert survival.curve(2) == before[:2]


def test_a_few_probes_after_a_pause_count_for_much() -> None:
    """Three good probes against a hundred old rejections change nothing, and the row stays parked for good."""
    survival = Survival()
    for _ in range(100):
        survival.observe(num_drafted=1, num_accepted=0)
    survival.age()
    for _ in range(3):
        survival.observe(num_drafted=1, num_accepted=1)
    assert survival.rate(0) > 0.55


def test_a_new_request_starts_from_what_others_experienced() -> None:
    """Each of a thousand short requests pays anew for learning that the drafter does not fit."""
    controller = WidthController(max_width=15)
    engine = Engine(moderate, lambda row, step: 0.0)
    engine.controller = controller
    engine.run(200)
    controller.forget(0)
    assert controller.widths([[RowOffer("new", "dflash", 15)]]) == [(None, 0)]


def test_costs_never_fall_with_the_number_of_tokens() -> None:
    """Noise that makes five tokens look cheaper than four draws the controller to odd widths."""
    costs = CostModel()
    assert costs.seconds(5) == 0
    for num_tokens, seconds in [(1, 1.0), (4, 3.0), (5, 2.0), (16, 4.0), (200, 30.0)]:
        costs.observe(num_tokens, seconds)
    curve = [costs.seconds(num_tokens) for num_tokens in range(1, 400)]
    assert curve == sorted(curve)
    assert costs.seconds(1) == 1.0 and costs.seconds(2) == pytest.approx(1.5) and costs.seconds(4) == 2.5
    assert costs.seconds(400) > costs.seconds(200)


def test_one_outlier_hardly_moves_a_cost() -> None:
    """A pause of the whole machine during one step parks all requests."""
    costs = CostModel()
    for seconds in (50.0, 1.0, 1.0, 1.0, 1.0, 40.0):
        costs.observe(3, seconds)
    assert costs.seconds(3) < 1.1


def test_costs_follow_a_context_that_grows() -> None:
    """Sizes not used lately keep the price of a short context and look like a bargain."""
    costs = CostModel()
    for _ in range(5):
        costs.observe(1, 1.0)
        costs.observe(16, 2.0)
    for _ in range(100):
        costs.observe(1, 4.0)
    assert costs.seconds(1) == pytest.approx(4, rel=0.01)
    assert costs.seconds(16) > 3.9


@pytest.mark.parametrize("num_rows", [4, 8, 16])
def test_short_requests_in_a_batch_do_not_pay_for_probes_again_and_again(num_rows):
    """V1: fault: every new request, and every row of a batch, tries out what has just failed for the others."""
    engine = Engine(lambda n: 1 + 0.12 * n, lambda row, step: 0.2, num_rows)
    engine.draft_seconds = 0.5
    requests = iter(range(10**6))
    for _ in range(60):  # answers of 32 tokens, all rows at once, one after another
        names = [next(requests) for _ in range(num_rows)]
        for _ in range(32):
            offers = [RowOffer(name, "dflash", 5) for name in names]
            widths = widths_of(engine.controller, offers)
            results = [RowResult(o, w, engine.accept(0, w)) for o, w in zip(offers, widths, strict=True) if w]
            num_tokens, drafting = num_rows + sum(widths), engine.draft_seconds if any(widths) else 0.0
            seconds = engine.seconds(num_tokens)
            engine.controller.observe_step(num_tokens, seconds, {"dflash": drafting} if drafting else {}, results)
            engine.num_committed += num_rows + sum(result.num_accepted for result in results)
            engine.total_seconds += seconds + drafting
        for name in names:
            engine.controller.forget(name)
    assert engine.speed_up() > 0.97


# Two drafters that offer for the same row
