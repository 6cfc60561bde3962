"""The width controller where two drafters offer for the same row, and where a width is fixed."""

import random

from lampejo.width import (
    LAST_SLOT,
    Kind,
    RowOffer,
    RowResult,
    Survival,
    WidthController,
)
from test_width import moderate


class TwoDrafters:
    """DFlash always offers; of three tokens one is behind no match, one behind a short and one behind a long one. Rates
    are those at which their drafts are accepted, all slots alike."""

    def __init__(self, dflash: float, short: float, long: float) -> None:
        self.controller = WidthController(max_width=15)
        self.rates = {("dflash", 0): dflash, ("ngram", 0): short, ("ngram", 12): long}
        self.used: list[tuple[Kind, int] | None] = []
        self.num_committed, self.total_seconds = 0, 0.0

    def run(self, num_steps: int) -> "TwoDrafters":
        rng = random.Random(1)
        for step in range(num_steps):
            start = (None, 0, 12)[step % 3]
            offers = [RowOffer(0, "dflash", 5)]
            if start is not None:
                offers.insert(0, RowOffer(0, "ngram", 15, start))
            ((offer, width),) = self.controller.widths([offers])
            self.used.append((offer.kind, offer.start) if offer else None)
            num_accepted, drafting = 0, {}
            while offer and num_accepted < width and rng.random() < self.rates[offer.kind, offer.start]:
                num_accepted += 1
            if offer and offer.kind == "dflash":
                drafting = {"dflash": 0.3}
            seconds = moderate(1 + width)
            results = [RowResult(offer, width, num_accepted)] if offer else []
            self.controller.observe_step(1 + width, seconds, drafting, results)
            self.num_committed += 1 + num_accepted
            self.total_seconds += seconds + sum(drafting.values())
        return self

    def share(self, kind: Kind, start: int, step_of_three: int) -> float:
        """Of the later steps with such offers, those that took this one."""
        steps = self.used[len(self.used) // 2 // 3 * 3 + step_of_three :: 3]
        return steps.count((kind, start)) / len(steps)


def test_where_dflash_does_not_pay_short_matches_are_drafted_from() -> None:
    """V1: a drafter that is always there keeps others from being asked, though it has long been given up."""
    text = TwoDrafters(dflash=0.1, short=0.7, long=0.98).run(900)
    assert text.share("ngram", 0, 1) > 0.85 and text.share("ngram", 12, 2) > 0.9
    assert text.used[450:].count(("dflash", 0)) < 25


def test_a_good_dflash_goes_before_short_matches_and_not_before_long_ones() -> None:
    """One preference for all of a drafter's offers is wrong for some: which is better depends on the match."""
    text = TwoDrafters(dflash=0.8, short=0.3, long=0.99).run(900)
    assert text.share("dflash", 0, 0) > 0.85 and text.share("dflash", 0, 1) > 0.85
    assert text.share("ngram", 12, 2) > 0.85


def test_nobody_drafts_where_none_of_the_offers_pays() -> None:
    """V1: each further drafter that is tried in vain costs anew."""
    text = TwoDrafters(dflash=0.05, short=0.05, long=0.05).run(2000)
    assert text.num_committed * moderate(1) / text.total_seconds > 0.96


def test_a_fixed_width_is_filled_by_the_drafter_that_was_right_more_often() -> None:
    """With a width of the user's there is nothing to decide but whose drafts they are."""
    text = TwoDrafters(dflash=0.8, short=0.2, long=0.99)
    text.controller = WidthController(max_width=15, fixed=4)
    text.run(300)
    assert None not in text.used
    assert text.share("dflash", 0, 1) > 0.9 and text.share("ngram", 12, 2) > 0.9


def test_what_a_fixed_width_drafts_does_not_depend_on_how_long_it_took() -> None:
    """So acceptance at a fixed width is the same on every machine."""
    choices = []
    for seconds in (1e-6, 100.0):
        controller = WidthController(max_width=15, fixed=4)
        offers = [RowOffer("a", "dflash", 5), RowOffer("a", "ngram", 15)]
        for num_accepted in (4, 4, 3, 0, 1):
            (chosen,) = controller.widths([offers])
            choices.append(chosen)
            result = RowResult(offers[0], 4, num_accepted)
            controller.observe_step(5, 0.001, {"dflash": seconds}, [result])
    assert choices[:5] == choices[5:]


def test_a_start_far_down_the_curve_counts_as_its_last_slot() -> None:
    """A match of a thousand tokens must not make a table of a thousand rates."""
    survival = Survival()
    for _ in range(50):
        survival.observe(num_drafted=4, num_accepted=4, start=1000)
    assert len(survival._rates) == LAST_SLOT + 1
    assert survival.curve(3, start=LAST_SLOT)[0] > 0.95 and survival.curve(3, start=2000) == survival.curve(
        3, LAST_SLOT
    )
    assert survival.rate(0) == 0.7


def test_drafts_that_fail_beside_prompts_are_given_up_too() -> None:
    """V1. Fault: on a busy server nearly every step holds a chunk of a prompt, and nothing was learnt from those."""
    controller, offer, num_drafting = WidthController(max_width=5), RowOffer("a", "dflash", 5), 0
    for step in range(1000):
        ((chosen, width),) = controller.widths([[offer]])
        results = [RowResult(chosen, width, 0)] if chosen else []
        seconds = 0.01 * (1 + 0.4 * width) if step < 10 else None
        controller.observe_step(1 + width, seconds, {"dflash": 0.002} if results else {}, results)
        num_drafting += step >= 10 and width > 0
    assert num_drafting < 50
