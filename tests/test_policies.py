"""Lossy acceptance: what it takes and what it refuses, where it ends, what it counts, how it is told."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lampejo.accept import VerifyRow, accept
from lampejo.errors import DamagedModel
from lampejo.sampling import History, SamplingParams, choose

V = 11
HALVES = (0.5, 0.25, 0.125, 0.125)  # entropy 1.75 ln 2, so exp(-entropy) is 0.2973
QUARTERS = (0.25, 0.25, 0.25, 0.25)  # entropy ln 4
SURE = (0.95, 0.05)  # exp(-entropy) is 0.82


def logits_of(*rows: tuple[float, ...]) -> torch.Tensor:
    """Logits whose softmax are these probabilities, of the first tokens; all others are impossible."""
    return torch.tensor([[math.log(p) for p in row] + [-math.inf] * (V - len(row)) for row in rows])


def row_of(drafts: list[int], typical: float | None, seed: int = 0, hidden: Any = None, **params: Any) -> VerifyRow:
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    hidden = hidden or [()] * (len(drafts) + 1)
    return VerifyRow(drafts, 5, sampling, seed, History(), hidden, typical)


def chosen(logits: torch.Tensor, row: VerifyRow) -> list[int]:
    """The target's own tokens at all positions."""
    return choose(logits, row.params, row.seed, range(row.position, row.position + len(logits))).tolist()


def seed_that_chooses(logits: torch.Tensor, first: int) -> int:
    """A seed with which the target's own choice at the first position is ``first``."""
    return next(s for s in range(1000) if chosen(logits, row_of([0] * (len(logits) - 1), None, s))[0] == first)


@pytest.mark.parametrize(
    ("probs", "threshold", "draft", "is_taken"),
    [
        (HALVES, 0.09, 2, True),  # bound 0.3 * 0.2973 = 0.0892
        (HALVES, 0.25, 1, True),  # bound 0.5 * 0.2973 = 0.1487
        (HALVES, 0.25, 2, False),
        (QUARTERS, 0.25, 1, True),  # bound 0.5 * 0.25
        (QUARTERS, 1.0, 1, False),  # bound 1 * 0.25, which it has to exceed
        (SURE, 0.09, 1, False),  # bound 0.09, below 0.3 * 0.82
        (SURE, 0.04, 1, True),
        (SURE, 0.04, 5, False),  # impossible
    ],
)
def test_a_draft_is_typical_above_the_lower_of_two_bounds(probs, threshold, draft, is_taken):
    """Medusa's rule by hand: min(threshold, sqrt(threshold) * exp(-entropy))."""
    logits = logits_of(probs, SURE)
    row = row_of([draft], threshold, seed_that_chooses(logits, 0))
    (verdict,) = accept(logits, [row])
    own = chosen(logits, row)
    if is_taken:
        assert (verdict.ids, verdict.num_accepted, verdict.inexact) == ([draft, own[1]], 1, [0])
    else:
        assert (verdict.ids, verdict.num_accepted, verdict.inexact) == ([0], 0, [])


def test_a_lossless_row_takes_the_same_drafts_as_ever():
    logits = logits_of(HALVES, SURE)
    row = row_of([1], None, seed_that_chooses(logits, 0))
    (verdict,) = accept(logits, [row])
    assert (verdict.ids, verdict.num_accepted, list(verdict.inexact)) == ([0], 0, [])


def test_acceptance_ends_at_the_first_draft_that_is_not_typical():
    """What the target might say after a refused draft was conditioned on the wrong token."""
    logits = logits_of(QUARTERS, HALVES, QUARTERS, SURE)
    row = row_of([1, 7, 1], 0.09, seed_that_chooses(logits, 0))
    (verdict,) = accept(logits, [row])
    assert verdict.ids == [1, chosen(logits, row)[1]]
    assert (verdict.num_accepted, verdict.inexact) == (1, [0])


def test_drafts_that_are_the_targets_choice_are_exact_however_unlikely():
    """A draft that losslessness accepts is never refused, nor counted as lossy."""
    logits = logits_of(SURE, HALVES, QUARTERS, QUARTERS)
    seed = seed_that_chooses(logits, 1)
    own = chosen(logits, row_of([0, 0, 0], None, seed))
    lossless, typical = (accept(logits, [row_of(own[:3], policy, seed)])[0] for policy in (None, 0.9))
    assert typical.ids == lossless.ids == own
    assert typical.num_accepted == 3 and not typical.inexact


def test_the_bonus_token_is_the_targets_own_after_lossy_drafts_too():
    """Its noise is that of its own position, as if the drafts had been the target's choice."""
    logits = logits_of(*[QUARTERS] * 4)
    for seed in range(20):
        row = row_of([1, 2, 3], 0.09, seed)
        (verdict,) = accept(logits, [row])
        own = chosen(logits, row)
        assert verdict.ids == [1, 2, 3, own[3]]
        assert verdict.inexact == [j for j in range(3) if own[j] != j + 1]


def test_without_drafts_every_policy_gives_the_targets_choice():
    """Width 0 is plain decoding."""
    logits = logits_of(QUARTERS)
    for seed in range(20):
        lossless, typical = (accept(logits, [row_of([], policy, seed)])[0] for policy in (None, 0.01))
        assert typical.ids == lossless.ids and not typical.inexact


def test_at_temperature_0_nothing_but_the_greatest_is_taken():
    """Its distribution has one token alone, in a batch of any kind."""
    logits = logits_of(HALVES, QUARTERS)
    greedy = row_of([1], 0.01, temperature=0.0)
    (alone,) = accept(logits, [greedy])
    beside, _ = accept(torch.cat([logits, logits]), [greedy, row_of([1], 0.01)])
    for verdict in (alone, beside):
        assert (verdict.ids, verdict.num_accepted, list(verdict.inexact)) == ([0], 0, [])


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.6}, {"logit_bias": {1: -100.0}}, {"temperature": 0.05}],
    ids=str,
)
def test_what_sampling_would_never_draw_is_not_typical(params):
    """The distribution is that of sampling itself: processed, at its temperature, and cut."""
    logits = logits_of(HALVES, QUARTERS)
    (verdict,) = accept(logits, [row_of([1], 0.09, **params)])
    assert verdict.num_accepted == 0
    assert accept(logits, [row_of([1], 0.09)])[0].num_accepted == 1


def test_hidden_ids_are_never_taken():
    """B9: EOS below min_tokens, however likely."""
    logits = logits_of(HALVES, QUARTERS)
    (verdict,) = accept(logits, [row_of([0], 0.01, hidden=[(0,), ()])])
    assert verdict.num_accepted == 0 and verdict.ids[0] != 0


def test_penalties_count_lossy_drafts_as_answered():
    """Position 1 sees the lossy draft of position 0: with a strong penalty it is not taken again."""
    logits = logits_of(HALVES, HALVES, HALVES)
    row = row_of([1, 1], 0.09, seed_that_chooses(logits, 0), presence_penalty=2.0)
    assert accept(logits, [replace(row, params=SamplingParams(temperature=1.0))])[0].num_accepted == 2
    (verdict,) = accept(logits, [row])
    assert verdict.ids[0] == 1 and verdict.num_accepted == 1


def test_log_probabilities_are_those_of_the_committed_tokens():
    logits = logits_of(QUARTERS, SURE)
    row = row_of([1], 0.09, seed_that_chooses(logits, 0), logprobs=0)
    (verdict,) = accept(logits, [row])
    assert [entry.token_id for entry in verdict.logprobs] == verdict.ids
    assert verdict.logprobs[0].logprob == pytest.approx(math.log(0.25), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad):
    logits = torch.zeros(2, V)
    logits[0, 7] = bad
    with pytest.raises(DamagedModel, match="not numbers"):
        accept(logits, [row_of([1], 0.01)])


def test_rows_of_one_batch_have_their_own_policies():
    logits = logits_of(HALVES, QUARTERS)
    seed = seed_that_chooses(logits, 0)
    rows = [row_of([1], policy, seed) for policy in (0.09, None, 0.5)]  # 0.5: bound 0.21
    verdicts = accept(logits.repeat(3, 1), rows)
    assert [v.num_accepted for v in verdicts] == [1, 0, 1]
    assert [list(v.inexact) for v in verdicts] == [[0], [], [0]]
